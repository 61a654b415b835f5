"""Which dtype a norm computes in, which it returns, how it is rounded, and what epsilon the vendors advise."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(n: Array, dtype) -> Array:
    """`n` (any shape) cast to `dtype` so that the rounding stays, even where the result is widened again.

    XLA on GPU takes two casts, to a narrow dtype and back, away as a pair (seen on H200, bfloat16, float16 and fp8):
    what follows would compute with the unrounded value.

    >>> rounded(jnp.float32(1.001), jnp.bfloat16).astype(jnp.float32).item()
    1.0
    """
    return (narrowed(n, dtype) if n.dtype == jnp.float32 else n).astype(dtype)


@rounded.defjvp
def _rounded_jvp(dtype, primals, tangents):
    return rounded(*primals, dtype), tangents[0].astype(dtype)


def narrowed(n: Array, dtype) -> Array:
    """float32 `n`, any shape, rounded half to even to `dtype` (bfloat16 or float16; others pass) but kept in float32.

    >>> narrowed(jnp.float32(1.001), jnp.bfloat16).item()
    1.0
    """
    name = jnp.dtype(dtype).name
    if name == "bfloat16":
        return lax.reduce_precision(n, 8, 7)
    if name != "float16":
        return n
    close = on_grid(n, 10, -14)  # not lax.reduce_precision, which flushes float16's subnormals
    return jnp.where(jnp.abs(close) > 65504.0, jnp.copysign(jnp.inf, close), close)


def on_grid(n: Array, mantissa: int, min_exponent: int) -> Array:
    """float32 `n`, any shape, rounded half to even to `mantissa` bits, by its bits; NaN and infinities stay.

    Below 2**min_exponent, the smallest normal number, to multiples of the smallest subnormal one.

    >>> on_grid(jnp.array([1.06, 0.001]), 3, -6).tolist()
    [1.0, 0.001953125]
    """
    bits, sign = magnitude(n)
    drop = 23 - mantissa
    odd = (bits >> drop) & 1
    ordinary = lax.bitcast_convert_type((bits + ((1 << (drop - 1)) - 1) + odd) >> drop << drop, jnp.float32)
    unit = 2.0 ** (min_exponent - mantissa)
    size = jnp.where(jnp.abs(n) < 2.0**min_exponent, jnp.rint(jnp.abs(n) * (1 / unit)) * unit, ordinary)
    return jnp.where(jnp.isnan(n), n, signed(size, sign))


def magnitude(v: Array) -> tuple[Array, Array]:
    """(bits of |v|, bit of the sign) of float32 `v`, uint32 of its shape.

    >>> int(magnitude(jnp.float32(-1.0))[0]) == 127 << 23
    True
    """
    bits = lax.bitcast_convert_type(v, jnp.uint32)
    return bits & 0x7FFFFFFF, bits & jnp.uint32(0x80000000)


def signed(size: Array, sign: Array) -> Array:
    """float32 `size` >= 0 with a bit of the sign as `magnitude` gives it, any shape.

    >>> signed(jnp.float32(2.0), jnp.uint32(1 << 31)).item()
    -2.0
    """
    return lax.bitcast_convert_type(lax.bitcast_convert_type(size, jnp.uint32) | sign, jnp.float32)


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
