"""Which dtype a norm computes in, which it returns, and what epsilon the vendors advise."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array
from numpy import dtype as Dtype


def wide_dtype(dtype) -> Dtype:
    """The dtype of statistics for an input of `dtype`: float32, or float64 / complex for inputs that have it.

    >>> wide_dtype(jnp.bfloat16)
    dtype('float32')
    """
    dtype = jnp.dtype(dtype)
    if dtype in (jnp.float64, jnp.complex64, jnp.complex128):
        return dtype
    return jnp.dtype(jnp.float32)


def statistics_dtype(x: Array) -> Dtype:
    """The dtype of statistics of `x` (any shape): the real one that goes with `wide_dtype`; nothing is converted.

    >>> statistics_dtype(jnp.ones((2,), jnp.complex64))
    dtype('float32')
    """
    return jnp.finfo(wide_dtype(x.dtype)).dtype


def wide(x: Array) -> Array:
    """`x` in the dtype of its statistics, any shape.

    >>> wide(jnp.ones((2,), jnp.float16)).dtype
    dtype('float32')
    """
    return x.astype(wide_dtype(x.dtype))


def output_dtype(dtype) -> Dtype:
    """The dtype of a norm's result: that of x, float32 for integers and bools.

    >>> output_dtype(jnp.uint8)
    dtype('float32')
    """
    return jnp.dtype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(jnp.float32)


def recommended_eps(dtype, *, mixed_precision: bool = False) -> float:
    """The epsilon that Ascend's operator guides advise for data of `dtype`; nothing here uses it unasked.

    Args:
      dtype: dtype of the data: float32 1e-5, 16-bit floats 1e-4, integers (an int8 path) 1e-2.
      mixed_precision: True for mixed-precision training: 1e-3 whatever the 16-bit dtype.

    Returns:
      A Python float, in units of x squared (it is added to the variance).

    Source: the CANN operator guides' advice as collected for this project; 1e-3 is their mixed-precision setting.

    >>> recommended_eps(jnp.float32)
    1e-05
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return 1e-2
    if mixed_precision:
        return 1e-3
    return 1e-5 if jnp.finfo(dtype).bits >= 32 else 1e-4
