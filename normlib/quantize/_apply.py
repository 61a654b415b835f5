"""One epilogue for every norm: codes and scales of the normalised value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from normlib import _arguments as check
from normlib.passes.xla import own_copy
from normlib.precision import rounded
from normlib.quantize._codes import DualQuantized, Quantized, dequantize
from normlib.quantize._formats import to_floats, to_integers
from normlib.quantize._kinds import (
    MX,
    ONE_OUTPUT,
    Asymmetric,
    Dual,
    Dynamic,
    Kind,
    Static,
    StraightThrough,
    check_quant,
)
from normlib.quantize._mx import scaled
from normlib.quantize._ranges import at_least, divided, extremes, largest_magnitude
from normlib.scope import LOCAL, Scope

LEVELS = 255  # steps of an int8 range
FINEST = 2.0**-21  # smallest step by a row's magnitude at which two float32 roundings stay within half a step


def apply(
    quant: Any,
    n: Float[Array, ...],
    *,
    axes: check.Axes = -1,
    where: Array | None = None,
    scope: Scope = LOCAL,
) -> Quantized | DualQuantized:
    """Codes and scales of `n`.

    Args:
      quant: one of the
      n: `[..., D]`, any shape; taken in float32, values below the smallest normal number as 0.
      axes: of a row, which has one dynamic scale; and of features, which have one static scale or smoothing each.
      where: bool, broadcastable to n: entries that dynamic scales are found in; None for all.
      scope: the devices over which rows are split, which then share dynamic scales (MX blocks and groups stay local).

    Returns:
      `Quantized`, or `DualQuantized` for a Dual. Neither codes nor scales carry gradients; see `StraightThrough`.

    Raises:
      ValueError: for a scale, zero point, smoothing, group or mask that does not fit n.
      TypeError: if `quant` is none of the kinds, or n is complex.

    >>> apply(Static(0.5), jnp.array([0.6, -9.0, 100.0])).y.tolist()
    [1, -18, 127]
    >>> apply(Dynamic(), jnp.array([[1.0, -127.0], [0.0, 0.0]])).y.tolist()
    [[1, -127], [0, 0]]
    """
    check_quant(quant, optional=False)
    out_dtype(quant, jnp.result_type(n))
    n = jnp.asarray(n).astype(jnp.float32)
    options = {"axes": check.axes(axes, n.ndim, "axes"), "where": check.mask(where, n), "scope": scope}
    if isinstance(quant, StraightThrough):
        inner = quant.kind
        if isinstance(inner, Dual):
            return _both(_passed_through(_coded(k, n, **options)) for k in (inner.first, inner.second))
        return _passed_through(_coded(inner, n, **options))
    if isinstance(quant, Dual):
        return _both(_coded(k, n, **options).out for k in (quant.first, quant.second))
    return _coded(quant, n, **options).out


def fake_quantize(quant: Any, n: Float[Array, ...], *, axes: check.Axes = -1, where: Array | None = None) -> Array:
    """`n` as it looks after quantising and dequantising, with gradients that pass straight through.

    Args:
      quant: Static, Dynamic, Asymmetric or MX.
      n: `[..., D]`, any float dtype; computed in float32.
      axes: of a row or of features; see `apply`.
      where: bool, broadcastable to n: entries that dynamic scales are found in; None for all.

    Returns:
      `[..., D]` in n's dtype: (code - zero_point) * scale. Its derivative by n is 1 where the code did not saturate
      (the smoothing factor for a Dynamic with `smooth`, whose value is that of n * smooth), else 0.

    Raises:
      TypeError: if `quant` is something else.
      ValueError: as `apply`.

    Source: Bengio, Leonard and Courville 2013.

    >>> jax.grad(lambda n: fake_quantize(Static(0.5), n).sum())(jnp.array([0.6, 100.0])).tolist()
    [1.0, 0.0]
    """
    if not isinstance(quant, ONE_OUTPUT):
        raise TypeError(f"`quant` must be Static, Dynamic, Asymmetric or MX; got {quant!r}.")
    n = jnp.asarray(n)
    return apply(StraightThrough(quant), n, axes=axes, where=where).y.astype(n.dtype)


def out_dtype(quant: Any, dtype: DTypeLike) -> DTypeLike:
    """The dtype in which a norm of x in `dtype` hands y to `finish`: float32 with a `quant`, else `dtype`.

    Raises:
      TypeError: if `quant` is none of the kinds, or x is complex.
    """
    check_quant(quant)
    if quant is None:
        return dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"`quant` needs real values; x is {jnp.dtype(dtype)}.")
    return jnp.float32


def finish(
    n: Float[Array, ...],
    quant: Any,
    dtype: DTypeLike,
    *,
    axes: check.Axes = -1,
    where: Array | None = None,
    scope: Scope = LOCAL,
    norm_round_first: bool = False,
) -> Any:
    """The last line of a norm that takes `quant`: y in `dtype` without one, codes and scales with one.

    Args:
      n: the normalised value, any shape, unrounded float32 (see `out_dtype`) where there is a `quant`.
      quant: None, or one of the
      dtype: of x (and of y without a quant, or with StraightThrough).
      axes: normalised or feature axes; a row of them has one dynamic scale.
      where: bool, broadcastable to n: measured entries; None for all.
      scope: the devices over which a row's entries are split; local if rows are whole here.
      norm_round_first: round n to `dtype` before quantising.

    Returns:
      The array y, `Quantized` or `DualQuantized`.

    Raises:
      ValueError: as `apply`, or for `norm_round_first` without a quant.
      TypeError: as `apply`.

    >>> finish(jnp.ones((2, 4)), None, jnp.bfloat16).dtype
    dtype(bfloat16)
    """
    if quant is None:
        if norm_round_first:
            raise ValueError("`norm_round_first` says what `quant` quantises; give a `quant` with it.")
        return n.astype(dtype)
    out_dtype(quant, n.dtype)
    n = n.astype(jnp.float32)
    if norm_round_first:
        n = rounded(n, dtype).astype(n.dtype)
    out = apply(quant, n, axes=axes, where=where, scope=scope)
    if not isinstance(quant, StraightThrough):
        return out
    floats = {"y": out.y.astype(dtype)}
    if isinstance(out, DualQuantized):
        floats["y2"] = out.y2.astype(dtype)
    return out._replace(**floats)


class _Coded(NamedTuple):
    """Codes and what a straight-through gradient needs: the quantised value, and where it did not saturate."""

    out: Quantized
    value: Array
    inside: Array


def _coded(quant, n, *, axes, where, scope) -> _Coded:
    return _QUANTISERS[type(quant)](quant, n, axes, where, scope)


def _static(quant: Static, n, axes, where, scope) -> _Coded:
    scale = _fitted(quant.scale, "scale", n, axes, jnp.float32)
    inverse = 1 / scale
    factor, step = (scale, inverse) if quant.multiply else (inverse, scale)
    zero_point = None if quant.zero_point is None else _fitted(quant.zero_point, "zero_point", n, axes, jnp.int32)
    v = lax.stop_gradient(n) * factor
    lowest, offset = quant.smallest_code, 0 if zero_point is None else zero_point
    inside = (v >= lowest - offset) & (v <= quant.format.largest - offset)
    return _Coded(Quantized(_encoded(quant, v, zero_point, lowest), step, zero_point), n, inside)


def _dynamic(quant: Dynamic, n, axes, where, scope) -> _Coded:
    value = n if quant.smooth is None else n * _fitted(quant.smooth, "smooth", n, axes, jnp.float32)
    (fixed,) = own_copy(lax.stop_gradient(value))
    shape, largest = n.shape, quant.format.largest
    if quant.group is not None:
        fixed, where = _grouped(quant.group, axes, fixed, where)
        axes, scope = (fixed.ndim - 1,), LOCAL
    scale = at_least(divided(largest_magnitude(fixed, axes, where, scope), largest), quant.floor)
    own, inverse = own_copy(fixed, 1 / scale)
    codes = _encoded(quant, own * inverse, None, -largest).reshape(shape)
    return _Coded(Quantized(codes, scale if quant.group is None else scale[..., 0]), value, ~jnp.isnan(value))


def _grouped(group: int, axes, n, where):
    """n (and a mask) `[..., D]` as `[..., D / group, group]`."""
    size = n.shape[-1] if n.ndim else 1
    if n.ndim - 1 not in axes or size % group:
        raise ValueError(f"`group` {group} must divide the last axis of x, which must be normalised; x is {n.shape}.")

    def split(t):
        return t.reshape(*n.shape[:-1], size // group, group)

    return split(n), None if where is None else split(jnp.broadcast_to(where, n.shape))


def _asymmetric(quant: Asymmetric, n, axes, where, scope) -> _Coded:
    (fixed,) = own_copy(lax.stop_gradient(n))
    low, high = extremes(fixed, axes, where, scope)
    floor = at_least(jnp.maximum(jnp.abs(low), jnp.abs(high)) * FINEST, quant.floor)
    scale = at_least(divided(high - low, LEVELS), floor)
    inverse = 1 / scale
    offset = jnp.rint(low * inverse)
    smallest = int(quant.format.lowest)
    zero_point = smallest - jnp.where(jnp.isnan(offset), 0, offset).astype(jnp.int32)
    own, inverse, offset = own_copy(fixed, inverse, zero_point)
    codes = _encoded(quant, own * inverse, offset, smallest)
    return _Coded(Quantized(codes, scale, zero_point), n, ~jnp.isnan(n))


def _mx(quant: MX, n, axes, where, scope) -> _Coded:
    if not n.ndim:
        raise ValueError("`quant` MX needs an axis to form blocks along; x is a scalar.")
    (fixed,) = own_copy(lax.stop_gradient(n))
    where = None if where is None else jnp.broadcast_to(where, n.shape)
    v, byte, valid = scaled(fixed, quant.format, quant.scale_alg, where)
    return _Coded(
        Quantized(to_floats(v, quant.format, quant.key), byte), n, valid & (jnp.abs(v) <= quant.format.largest)
    )


_QUANTISERS: dict[type, Callable[..., _Coded]] = {Static: _static, Dynamic: _dynamic, Asymmetric: _asymmetric, MX: _mx}


def _encoded(quant: Kind, v: Array, zero_point: Array | None, lowest: float, *, in_kernel: bool = False) -> Array:
    """Codes of `v` (float32, any shape), which is n in units of the step."""
    if quant.format.is_integer:
        return to_integers(v, quant.format, zero_point, lowest, quant.rounding, quant.key)
    return to_floats(v, quant.format, quant.key, in_kernel=in_kernel)


def _fitted(value, name: str, n: Array, axes: tuple[int, ...], dtype) -> Array:
    fitted = check.parameter(value, name, n, axes)
    return jnp.asarray(lax.stop_gradient(fitted)).astype(dtype)


def _both(pair) -> DualQuantized:
    first, second = pair
    return DualQuantized(*first, *second)


def _passed_through(coded: _Coded) -> Quantized:
    return coded.out._replace(y=_straight_through(coded.value, dequantize(coded.out), coded.inside))


@jax.custom_jvp
def _straight_through(value, result, inside):
    """`result`, whose derivative is that of `value` where `inside`, else 0."""
    return result


@_straight_through.defjvp
def _straight_through_jvp(primals, tangents):
    # the primal goes through the rule again, for derivatives of derivatives
    return _straight_through(*primals), jnp.where(primals[2], tangents[0], 0)
