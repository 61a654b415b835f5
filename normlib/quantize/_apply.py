"""One epilogue for every norm: codes and scales of the normalised value."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from normlib import _arguments as check
from normlib.quantize import _kinds as kinds
from normlib.quantize._formats import narrowed, to_floats, to_integers
from normlib.scope import LOCAL, Scope


class Quantized(NamedTuple):
    """Codes and what is needed to read them: value = (y - zero_point) * scale; see `normlib.dequantize`.

    Attributes:
      y: codes, in the normalised array's shape, one per element.
      scale: the step, float32, broadcastable to y (with groups `[..., D / group]`); of MX the bytes
        `[..., ceil(D / 32)]`, uint8.
      zero_point: int32, broadcastable to y, or None for 0.
    """

    y: Array
    scale: Array
    zero_point: Array | None = None


class DualQuantized(NamedTuple):
    """Two quantisations of one array, each as in `Quantized`.

    Attributes:
      y: codes of the first.
      scale: step of the first.
      zero_point: of the first, or None.
      y2: codes of the second.
      scale2: step of the second.
      zero_point2: of the second, or None.
    """

    y: Array
    scale: Array
    zero_point: Array | None
    y2: Array
    scale2: Array
    zero_point2: Array | None

    @property
    def first(self) -> Quantized:
        return Quantized(self.y, self.scale, self.zero_point)

    @property
    def second(self) -> Quantized:
        return Quantized(self.y2, self.scale2, self.zero_point2)


def apply(
    quant: Any,
    n: Float[Array, ...],
    *,
    axes: tuple[int, ...] = (-1,),
    where: Array | None = None,
    scope: Scope = LOCAL,
) -> Quantized | DualQuantized:
    """Codes and scales of `n`.

    Args:
      quant: one of the kinds.
      n: `[..., D]`, any shape; taken in float32.
      axes: of a row, which has one dynamic scale; and of features, which have one static scale or smoothing each.
      where: bool of n's rank, broadcastable to n: entries that dynamic scales are found in; None for all.
      scope: the devices over which rows are split, which then share dynamic scales.

    Returns:
      `Quantized`, or `DualQuantized` for a Dual. Codes carry no gradient; see `StraightThrough`.

    Raises:
      ValueError: for a scale, zero point, smoothing or group that does not fit n.

    >>> apply(Static(0.5), jnp.array([0.6, -9.0, 100.0])).y.tolist()
    [1, -18, 127]
    """
    kinds.check_quant(quant)
    n = jnp.asarray(n).astype(jnp.float32)
    axes = check.axes(axes, n.ndim, "axes")
    return _quantisers()[type(quant)](quant, n, axes=axes, where=where, scope=scope)


def out_dtype(quant: Any, dtype: DTypeLike | None = None) -> DTypeLike | None:
    """The dtype in which a norm must hand y to `finish`: float32 with a `quant`, else `dtype`.

    Raises:
      TypeError: if `quant` is none of the kinds.
    """
    kinds.check_quant(quant)
    return dtype if quant is None else jnp.float32


def finish(
    n: Float[Array, ...],
    quant: Any,
    dtype: DTypeLike,
    *,
    axes: tuple[int, ...] = (-1,),
    where: Array | None = None,
    scope: Scope = LOCAL,
    norm_round_first: bool = False,
) -> Any:
    """The last line of a norm that takes `quant`: y in `dtype` without one, codes and scales with one.

    Args:
      n: the normalised value, any shape, unrounded float32 (see `out_dtype`) where there is a `quant`.
      quant: None, or one of the kinds.
      dtype: of x.
      axes: normalised or feature axes; a row of them has one dynamic scale.
      where: bool of n's rank, broadcastable to n: measured entries; None for all.
      scope: the devices over which a row's entries are split; local if rows are whole here.
      norm_round_first: round n to `dtype` before quantising.

    Returns:
      The array y, `Quantized` or `DualQuantized`.

    >>> finish(jnp.ones((2, 4)), None, jnp.bfloat16).dtype
    dtype(bfloat16)
    """
    if quant is None:
        return n.astype(dtype)
    n = n.astype(jnp.float32)
    n = narrowed(n, dtype) if norm_round_first else n
    return apply(quant, n, axes=axes, where=where, scope=scope)


def _static(quant: kinds.Static, n, *, axes, where, scope) -> Quantized:
    scale = _fitted(quant.scale, "scale", n, axes).astype(jnp.float32)
    inverse = 1 / scale
    factor, step = (scale, inverse) if quant.multiply else (inverse, scale)
    zero_point = quant.zero_point
    if zero_point is not None:
        zero_point = _fitted(zero_point, "zero_point", n, axes).astype(jnp.int32)
    return Quantized(encoded(quant, n * factor, zero_point, quant.smallest_code), step, zero_point)


def _dual(quant: kinds.Dual, n, **options) -> DualQuantized:
    first, second = (apply(kind, n, **options) for kind in (quant.first, quant.second))
    return DualQuantized(*first, *second)


def encoded(quant: kinds.Kind, v: Array, zero_point: Array | None, lowest: float) -> Array:
    """Codes of `v` (float32, any shape), which is n in units of the step."""
    if quant.format.is_integer:
        return to_integers(v, quant.format, zero_point, lowest, quant.rounding, quant.key)
    return to_floats(v, quant.format, quant.key)


def _fitted(value, name: str, n: Array, axes: tuple[int, ...]) -> Array:
    return lax.stop_gradient(check.parameter(value, name, n, axes))


@functools.cache
def _quantisers():
    return {kinds.Static: _static, kinds.Dual: _dual}
