"""The formats of codes, and rounding to them: integers, and small floats.

Rounding works on a product v = n * inv and never adds to it first: XLA contracts a product and a sum to one fused
operation (17 % of float32 results differ from NumPy's, measured on CPU), while a product that is rounded, compared or
read bit by bit is the same everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from normlib.precision import magnitude, on_grid, signed

MODES = ("rint", "half_away", "floor", "ceil", "trunc", "stochastic")
BEYOND = 2.0**30  # past every code and zero point, and safe to convert to int32


@dataclass(frozen=True)
class Format:
    """A dtype of codes.

    Attributes:
      name: of the dtype.
      lowest: smallest code value.
      largest: largest code value; for floats the saturation bound of both signs.
      mantissa: stored mantissa bits; None for integers.
      min_exponent: of the smallest normal number (floats).
    """

    name: str
    lowest: float
    largest: float
    mantissa: int | None = None
    min_exponent: int = 0

    @property
    def dtype(self):
        return jnp.dtype(self.name)

    @property
    def is_integer(self) -> bool:
        return self.mantissa is None

    @property
    def max_exponent(self) -> int:
        """floor(log2(largest)), exactly."""
        return math.frexp(self.largest)[1] - 1


FORMATS = {
    f.name: f
    for f in (
        Format("int8", -128, 127),
        Format("uint8", 0, 255),
        Format("int4", -8, 7),
        Format("float8_e4m3fn", -448, 448, 3, -6),
        Format("float8_e5m2", -57344, 57344, 2, -14),
        Format("float4_e2m1fn", -6, 6, 1, 0),
    )
}


def format_of(dtype: DTypeLike, allowed=tuple(FORMATS)) -> Format:
    """The format of `dtype`; a ValueError that lists `allowed` if it is none of them."""
    name = jnp.dtype(dtype).name
    if name not in allowed:
        raise ValueError(f"`dtype` must be one of {', '.join(allowed)}; got {name}.")
    return FORMATS[name]


def rounded(v: Float[Array, ...], mode: str, key: PRNGKeyArray | None = None) -> Float[Array, ...]:
    """`v` rounded to integers, still float32; NaN and infinities stay.

    Args:
      v: float32, any shape.
      mode: one of `MODES`. "stochastic" rounds up in magnitude with the probability of the fraction.
      key: for "stochastic".

    >>> rounded(jnp.array([0.5, 1.5, -2.5]), "half_away").tolist()
    [1.0, 2.0, -3.0]
    """
    if mode == "half_away":
        doubled = v + v  # exact, and only compared
        tie = (doubled == jnp.rint(doubled)) & (v != jnp.rint(v))
        return jnp.where(tie, jnp.trunc(v) + jnp.sign(v), jnp.rint(v))
    if mode == "stochastic":
        return _stochastic(v, _whole_fraction_bits(v), 1.0, 1.0, key)
    return {"rint": jnp.rint, "floor": jnp.floor, "ceil": jnp.ceil, "trunc": jnp.trunc}[mode](v)


def to_integers(
    v: Float[Array, ...], form: Format, zero_point: Int[Array, ...] | None, lowest: float, mode: str, key
) -> Array:
    """Integer codes sat(round(v) + zero_point), NaN to 0; v float32 of any shape, zero_point broadcastable to it.

    The zero point is added to the rounded value, as an integer: added before, it would be contracted with the product.
    Saturation comes before the cast: casts of NaN and of large values differ between XLA, NumPy and PyTorch.
    """
    r = rounded(v, mode, key)
    missing = jnp.isnan(r)
    r = jnp.where(missing, 0, r)
    if zero_point is None:
        return jnp.clip(r, lowest, form.largest).astype(form.dtype)
    q = jnp.clip(r, -BEYOND, BEYOND).astype(jnp.int32) + zero_point
    q = jnp.where(missing, 0, jnp.clip(q, int(lowest), int(form.largest)))
    return q.astype(form.dtype)


def to_floats(v: Float[Array, ...], form: Format, key: PRNGKeyArray | None = None, *, in_kernel: bool = False) -> Array:
    """Float codes: `v` (float32, any shape) clamped, then rounded half to even, or stochastically with a key.

    NaN stays NaN, and is 0 where the format has none (fp4). Rounded before the cast: XLA on GPU takes a cast to codes
    and one back away as a pair, and a fake quantiser would do nothing (seen on H200); a cast `in_kernel` stays.
    """
    missing, has_nan = jnp.isnan(v), form.name != "float4_e2m1fn"
    kept = jnp.clip(jnp.where(missing, 0, v), form.lowest, form.largest)
    if key is not None:
        assert form.mantissa is not None
        drop = jnp.full(v.shape, 23 - form.mantissa, jnp.uint32)
        smallest = 2.0**form.min_exponent
        kept = _stochastic(kept, drop, smallest, 2.0 ** (form.min_exponent - form.mantissa), key)
        kept = jnp.clip(kept, form.lowest, form.largest)
    elif has_nan and not in_kernel:
        assert form.mantissa is not None
        kept = on_grid(kept, form.mantissa, form.min_exponent)
    return jnp.where(missing, v, kept).astype(form.dtype) if has_nan else _to_fp4(kept)


def _to_fp4(v) -> Array:
    """float4_e2m1fn of |v| <= 6, half to even: by the place on the grid 0, 0.5, 1, 1.5, 2, 3, 4, 6.

    XLA's own cast takes 1.5 (jax 0.10) to 6 times (0.12) as long on CPU.
    """
    size = jnp.abs(v)
    place = jnp.where(size < 2, jnp.rint(size * 2), jnp.where(size < 4, jnp.rint(size) + 2, jnp.rint(size * 0.5) + 4))
    bits = place.astype(jnp.uint8) | (jnp.signbit(v).astype(jnp.uint8) << 3)
    return lax.bitcast_convert_type(bits.astype(jnp.uint4), jnp.float4_e2m1fn)


def _whole_fraction_bits(v) -> Array:
    """How many of the 23 mantissa bits of |v| >= 1 lie below the binary point."""
    exponent = (magnitude(v)[0] >> 23).astype(jnp.int32) - 127
    return jnp.clip(23 - exponent, 0, 23).astype(jnp.uint32)


def _stochastic(v, drop, smallest: float, unit: float, key) -> Array:
    """v rounded to a grid, up in magnitude with the probability of the fraction, to 2**-23 or finer.

    From `smallest` on the grid is v's mantissa without its last `drop` bits; below, multiples of `unit`. Random bits
    are added to the bits of the float, not to its value.
    """
    bits, sign = magnitude(v)
    random = jax.random.bits(key, v.shape, jnp.uint32)
    mask = (jnp.uint32(1) << drop) - 1
    ordinary = lax.bitcast_convert_type((bits + (random & mask)) & ~mask, jnp.float32)
    parts = (jnp.minimum(jnp.abs(v), smallest) * (2.0**24 / unit)).astype(jnp.uint32)
    small = ((parts + (random >> 8)) >> 24).astype(jnp.float32) * unit
    result = signed(jnp.where(jnp.abs(v) < smallest, small, ordinary), sign)
    return jnp.where(jnp.isfinite(v), result, v)
