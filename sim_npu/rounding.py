"""Rounding float32 values to a narrower format, exactly, in float32 containers.

Everything happens on the integer bits of the float32. That is the only form that survives XLA on CPU, which flushes
float32 subnormals in float arithmetic, flushes fp16 subnormals in `lax.reduce_precision`, keeps excess bf16 precision
inside a fusion, and contracts a product followed by a sum into one rounding.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

Mode = Literal["rint", "round", "floor", "ceil", "trunc", "odd"]
Overflow = Literal["inf", "saturate", "nan"]

MODES: tuple[str, ...] = get_args(Mode)
OVERFLOWS: tuple[str, ...] = get_args(Overflow)

_SIGN = 0x80000000
_MAGNITUDE = 0x7FFFFFFF
_INF = 0x7F800000
_NAN = 0x7FC00000
_FRACTION_BITS = 23
_BIAS = 127


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format whose values are all float32 values.

    Attributes:
      name: as `round_to` takes it.
      fraction_bits: bits after the implicit one.
      min_exponent: exponent of the smallest normal number, 2**min_exponent.
      largest: the largest finite value.
      has_inf: whether the format has infinities; if not, they become NaN.

    >>> FORMATS["fp16"].smallest_subnormal == 2.0**-24
    True
    """

    name: str
    fraction_bits: int
    min_exponent: int
    largest: float
    has_inf: bool = True

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value, 2**(min_exponent - fraction_bits)."""
        return 2.0 ** (self.min_exponent - self.fraction_bits)

    @property
    def is_fp32(self) -> bool:
        """Whether every float32 is already a value of the format."""
        return self.fraction_bits == _FRACTION_BITS


def _largest(fraction_bits: int, max_exponent: int) -> float:
    return (2.0 - 2.0**-fraction_bits) * 2.0**max_exponent


# Field widths: IEEE 754-2019 (fp16, fp32); Micikevicius et al. 2022, "FP8 formats for deep learning", table 1
# (e5m2, e4m3); bf16 and tf32 are float32 with 7 and 10 fraction bits; hf32 is Ascend's float32 with 11 (CANN,
# "HF32 mode" of the matrix unit).
FORMATS: dict[str, FloatFormat] = {
    f.name: f
    for f in (
        FloatFormat("fp32", 23, -126, _largest(23, 127)),
        FloatFormat("hf32", 11, -126, _largest(11, 127)),
        FloatFormat("tf32", 10, -126, _largest(10, 127)),
        FloatFormat("bf16", 7, -126, _largest(7, 127)),
        FloatFormat("fp16", 10, -14, 65504.0),
        FloatFormat("e5m2", 2, -14, 57344.0),
        FloatFormat("e4m3", 3, -6, 448.0, has_inf=False),
    )
}

# dtype names of JAX and ml_dtypes for the same formats.
DTYPE_FORMATS: dict[str, str] = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e5m2": "e5m2",
    "float8_e4m3fn": "e4m3",
}


def round_to(
    x: Float[Array, "*shape"], format: str, *, mode: Mode = "rint", overflow: Overflow = "inf"
) -> Float[Array, "*shape"]:
    """Each element of `x` rounded to a value of `format`, kept as float32.

    `mode` names are those of the Ascend vector Cast instruction: rint (nearest, ties to even), round (nearest, ties
    away from zero), floor, ceil, trunc (towards zero), odd (an inexact result gets an odd last bit, which makes a
    second rounding harmless). Subnormals of the format are exact, in and out, and the sign of zero is kept.

    A result beyond the largest finite value follows IEEE 754: nearest modes overflow to infinity, floor, ceil, trunc
    and odd only away from the direction they round to (trunc never). `overflow` says what an overflow gives:
    "inf" (NaN in e4m3, which has no infinity), "saturate" (the largest finite value of that sign, also for infinite
    `x`), "nan". NaN stays NaN.

    Args:
      x: `[...]`, float32, or a narrower float dtype, which is widened exactly.
      format: "fp32", "hf32", "tf32", "bf16", "fp16", "e5m2", "e4m3".
      mode: one of `MODES`.
      overflow: one of `OVERFLOWS`.

    Returns:
      `[...]` float32.

    Raises:
      ValueError: on an unknown format, mode or overflow rule.
      TypeError: if `x` is not of a float dtype of at most 32 bits.

    Source: IEEE 754-2019, sections 4.3 and 7.4; rounding to odd: Boldo and Melquiond 2008, "Emulation of FMA and
    correctly rounded sums".

    >>> round_to(jnp.array([1.0 + 2**-11, 1.0 + 3 * 2**-11, 70000.0]), "fp16")
    Array([1.       , 1.0019531,       inf], dtype=float32)
    >>> float(round_to(jnp.float32(70000.0), "fp16", overflow="saturate"))
    65504.0
    """
    target = float_format(format)
    _check(mode, overflow)
    bits = lax.bitcast_convert_type(_widened(x), jnp.uint32)
    sign = bits & jnp.uint32(_SIGN)
    magnitude = bits & jnp.uint32(_MAGNITUDE)
    finite = magnitude if target.is_fp32 else _rounded_magnitude(magnitude, sign != 0, target, mode)
    finite = _overflowed(finite, magnitude, sign != 0, target, mode, overflow)
    return lax.bitcast_convert_type(sign | finite, jnp.float32)


def float_format(name: str) -> FloatFormat:
    """The format of that name; a ValueError lists the known ones."""
    if name not in FORMATS:
        raise ValueError(f"`format` must be one of {', '.join(FORMATS)}; got {name!r}.")
    return FORMATS[name]


def _check(mode: str, overflow: str) -> None:
    if mode not in MODES:
        raise ValueError(f"`mode` must be one of {', '.join(MODES)}; got {mode!r}.")
    if overflow not in OVERFLOWS:
        raise ValueError(f"`overflow` must be one of {', '.join(OVERFLOWS)}; got {overflow!r}.")


def _widened(x: Array) -> Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
        raise TypeError(f"`x` must be of a float dtype of at most 32 bits; got {x.dtype}. Convert it first.")
    return x.astype(jnp.float32)


def _rounded_magnitude(magnitude: Array, negative: Array, target: FloatFormat, mode: str) -> Array:
    """Bits of |x| rounded as if the format had no largest value."""
    exponent = jnp.maximum(magnitude >> _FRACTION_BITS, 1)  # subnormals share the first normal's exponent
    base = (exponent - 1) << _FRACTION_BITS
    significand = magnitude - base  # implicit one included, in units of 2**(exponent - 150)
    drop = jnp.uint32(_FRACTION_BITS - target.fraction_bits)
    deepest = target.min_exponent + _BIAS + _FRACTION_BITS - target.fraction_bits
    if target.min_exponent > 1 - _BIAS:
        # Subnormals of the format: a fixed quantum. 25 dropped bits leave less than half a quantum, as any more would.
        below = jnp.clip(jnp.int32(deepest) - exponent.astype(jnp.int32), drop.astype(jnp.int32), 25)
        drop = below.astype(jnp.uint32)
    kept = significand >> drop
    rest = significand & ((jnp.uint32(1) << drop) - 1)
    kept = _incremented(kept, rest, jnp.uint32(1) << (drop - 1), negative, mode)
    if target.min_exponent == 1 - _BIAS:
        return base + (kept << drop)
    # With 24 or 25 bits dropped `kept` is 0 or 1, in units of the smallest subnormal rather than of this exponent.
    quantum = jnp.uint32((round(math.log2(target.smallest_subnormal)) + _BIAS) << _FRACTION_BITS)
    return jnp.where(drop > _FRACTION_BITS, kept * quantum, base + (kept << drop))


def _incremented(kept: Array, rest: Array, half: Array, negative: Array, mode: str) -> Array:
    """The kept digits after looking at the rest."""
    one = jnp.uint32(1)
    if mode == "rint":
        up = (rest > half) | ((rest == half) & ((kept & one) == one))
    elif mode == "round":
        up = rest >= half
    elif mode == "floor":
        up = negative & (rest != 0)
    elif mode == "ceil":
        up = ~negative & (rest != 0)
    elif mode == "odd":
        return kept | (rest != 0).astype(jnp.uint32)
    else:
        return kept
    return kept + up.astype(jnp.uint32)


def _overflowed(finite: Array, magnitude: Array, negative: Array, target: FloatFormat, mode: str, rule: str) -> Array:
    """Bits of |result| with overflow, infinities and NaN put right."""
    largest = jnp.uint32(int(np.float32(target.largest).view(np.uint32)))
    beyond = jnp.uint32(_INF if target.has_inf and rule == "inf" else _NAN)
    if rule == "saturate":
        beyond = largest
    if mode in ("rint", "round"):
        over = beyond
    elif mode in ("floor", "ceil"):
        over = jnp.where(negative == (mode == "floor"), beyond, largest)
    else:
        over = largest
    result = finite
    if not target.is_fp32:
        result = jnp.where(finite > largest, over, finite)
    result = jnp.where(magnitude == _INF, beyond, result)
    return jnp.where(magnitude > _INF, jnp.uint32(_NAN), result)


def int8_chain(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """The A2 quantisation chain: float32, rint to int32, to fp16, trunc to int8; each cast saturates.

    Bits, not one rounding: fp16 holds integers exactly to 2048, so nothing within int8 is rounded twice, and what
    lies outside saturates.  NaN gives 0.

    Args:
      x: `[...]`, float32 or narrower.

    Returns:
      `[...]` int8.

    Source: CANN ops-nn quantising kernels (Cast fp32 to int32 with CAST_RINT, to half, to int8 with CAST_TRUNC).

    >>> int8_chain(jnp.array([0.5, 1.5, -2.5, 300.0]))
    Array([  0,   2,  -2, 127], dtype=int8)
    """
    whole = rint_int32(x)
    half = round_to(whole.astype(jnp.float32), "fp16", overflow="saturate")
    return jnp.clip(half, -128.0, 127.0).astype(jnp.int8)


def rint_int32(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """`x` to the nearest int32, ties to even, saturating; NaN gives 0.

    >>> rint_int32(jnp.array([2.5, -3.5, 3e9]))
    Array([         2,         -4, 2147483647], dtype=int32)
    """
    x = _widened(x)
    return jnp.where(jnp.isnan(x), 0, lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32))


def approximate(x: Float[Array, "*shape"], bits: int) -> Float[Array, "*shape"]:
    """`x` with `bits` significant fraction bits, ties to even: what a table look-up instruction leaves.

    >>> float(approximate(jnp.float32(1 / 3), 8))
    0.3330078125
    """
    if not 1 <= bits < _FRACTION_BITS:
        raise ValueError(f"`bits` must be from 1 to {_FRACTION_BITS - 1}; got {bits}.")
    target = FloatFormat("approximate", bits, 1 - _BIAS, _largest(bits, _BIAS))
    word = lax.bitcast_convert_type(_widened(x), jnp.uint32)
    sign, magnitude = word & jnp.uint32(_SIGN), word & jnp.uint32(_MAGNITUDE)
    finite = _rounded_magnitude(magnitude, sign != 0, target, "rint")
    finite = _overflowed(finite, magnitude, sign != 0, target, "rint", "inf")
    return lax.bitcast_convert_type(sign | finite, jnp.float32)
