"""Eight host devices in one process, and a compilation cache that outlives it."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

most_bytes = 1536 << 20  # of a worker between files
CACHE = Path(__file__).resolve().parent / ".cache" / f"jax-{jax.__version__}"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def _example_names(doctest_namespace):
    """The names that docstring examples may use without importing them."""
    doctest_namespace.update(jax=jax, jnp=jax.numpy, np=np)


def _resident_bytes():
    """Memory that this process holds now, or infinity where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return float("inf")


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory():
    """Drop compiled programs between files once a worker is large: kept for good it would grow to 8 GB.

    What is freed stays with the process for the next programs, so the bound is raised to where that leaves it.
    """
    global most_bytes
    yield
    if _resident_bytes() > most_bytes:
        jax.clear_caches()
        most_bytes = max(most_bytes, _resident_bytes()) + (256 << 20)


@pytest.fixture
def double_precision():
    """Turn on float64 for one test."""
    with jax.enable_x64(True):
        yield
