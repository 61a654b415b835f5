"""Eight host devices in one process, and a compilation cache that outlives it."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

CACHE = Path(__file__).resolve().parents[1] / ".cache" / f"jax-{jax.__version__}"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def double_precision():
    """Turn on float64 for one test."""
    with jax.enable_x64(True):
        yield
