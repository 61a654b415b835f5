"""PyTorch for the tests here, which are skipped unless it is release 2.13.0."""

import jax.numpy as jnp
import numpy as np
import pytest

NEEDED = "2.13.0"


def torch_or_skip():
    """The torch module; skips the file that asks where it is not installed, or another release."""
    torch = pytest.importorskip("torch", reason=f"needs torch {NEEDED} (make peers)", exc_type=ImportError)
    if torch.__version__.split("+")[0] != NEEDED:
        pytest.skip(f"needs torch {NEEDED}, found {torch.__version__}", allow_module_level=True)
    torch.set_num_threads(1)  # tiny arrays, and other tests run beside
    return torch


def channels_last(t):
    """[N, C, ...] of PyTorch as [N, ..., C] in NumPy."""
    return np.moveaxis(t.detach().numpy(), 1, -1)


def assert_close(actual, expected, dtype, ulps=32):
    """Equal to `ulps` roundings of the largest expected value."""
    expected = np.asarray(expected)
    atol = ulps * float(jnp.finfo(dtype).eps) * max(abs(expected).max(), 1)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=atol)
