"""The engine: one forward, one backward rule, for every norm.

A norm is moments of x over some axes, pooled over a scope, then an affine map with one rounding:

    y = (x - mean) * rstd * (scale + scale_offset) + bias,      rstd = 1 / sqrt(var + eps)

Backward, with g = dy * (scale + scale_offset), A = sum(g), B = sum(g * xhat) over everything that shares a mean:

    dx = g * rstd - (A + xhat * B) * rstd / n    (the second term for measured entries only)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from normlib import _arguments as check
from normlib import passes
from normlib._forward import Config, effective, folded, forward, wide_or_none
from normlib._rules import both, reverse
from normlib._sharding import splits
from normlib.moments import Moments
from normlib.precision import output_dtype, statistics_dtype, wide
from normlib.scope import LOCAL, Scope, vary_typed

RULES: dict[str, Callable] = {"reverse": reverse, "both": both, "autodiff": forward}
RESCALE_ABOVE = 2.0**40  # squares of float32 overflow at 2**64; ordinary rows keep a factor of exactly 1


class Normalized(NamedTuple):
    """What `normalize` returns.

    Attributes:
      y: the normalised array in x's shape; in x's dtype, or `out_dtype`.
      moments: those that y used; reduced axes of size 1, one per group of channels.
      total: those of the whole scope, for running statistics; the same as `moments` without groups of devices or
        virtual batches.
    """

    y: Array
    moments: Moments
    total: Moments


def normalize(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    axes: tuple[int, ...],
    eps: float,
    centered: bool = True,
    where: Array | None = None,
    scale_offset: float = 0.0,
    scope: Scope = LOCAL,
    shift: Array | None = None,
    rule: str = "reverse",
    rescale: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
    out_dtype: DTypeLike | None = None,
) -> Normalized:
    """Normalise `x` by the moments over `axes`, pooled over `scope`.

    Args:
      x: any shape; statistics in float32 (float64 for float64 x).
      scale: of x's rank, broadcastable to x, or None for ones.
      bias: likewise, or None for zeros.
      axes: non-negative axes to reduce.
      eps: added to the variance inside the root, in units of x squared; with 0 a set of equal entries is NaN.
      centered: False keeps the mean in (RMS).
      where: bool of x's rank, broadcastable to x: which entries are measured; None for all.
      scale_offset: added to `scale` in float32 (1 for gemma-style and adaptive norms).
      scope: what else shares the statistics.
      shift: a guess of the mean, broadcastable to the statistics: saves a pass (and a collective) where it is close.
      rule: "reverse" (hand-written backward; the fastest), "both" (forward and reverse mode from one linear tangent
        map), "autodiff" (JAX differentiates the forward).
      rescale: multiply by a power of two where max|x| > 2**40, so that squares cannot overflow; a further pass.
      batch_invariant: y of a row does not change by a bit with the number of rows beside it.
      backend: name of the pass to run on; the one of `use_backend`, or XLA, where None.
      out_dtype: dtype of y, for an epilogue that rounds later; that of x where None.

    Returns:
      `Normalized(y, moments, total)`; cotangents of the moments are honoured.

    Raises:
      TypeError: for a `scale_offset` that is no number.
      ValueError: for an unknown `rule`, a `shift` with channel groups, or shapes that do not broadcast.

    Source: Ioffe and Szegedy 2015 for the backward; Chan, Golub and LeVeque 1979 for the pooling.

    >>> normalize(jnp.arange(6.0).reshape(2, 3), axes=(1,), eps=0.0).y.shape
    (2, 3)
    """
    if rule not in RULES:
        raise ValueError(f"`rule` must be one of {', '.join(RULES)}; got {rule!r}.")
    if shift is not None and scope.channels is not None:
        raise ValueError("`shift` does not combine with groups of channels; leave it None.")
    for name, array in (("scale", scale), ("bias", bias), ("where", where)):
        if array is not None and jnp.broadcast_shapes(array.shape, x.shape) != x.shape:
            raise ValueError(f"`{name}` of shape {array.shape} does not broadcast to x's shape {x.shape}.")
    if batch_invariant:
        _check_whole(x, axes)
    scope.check_bound()
    config = Config(
        axes, centered, check.number(scale_offset, "scale_offset"), scope, batch_invariant,
        passes.current_backend() if backend is None else passes.checked(backend),
        None if out_dtype is None else check.result_dtype(out_dtype, x.dtype).name,
        float(eps) if isinstance(eps, int | float) and not rescale else None,
    )  # fmt: skip
    x = x.astype(output_dtype(x.dtype))
    room = jnp.asarray(eps, statistics_dtype(x))
    factor = _power_of_two(x, where, config) if rescale else None
    if factor is not None:
        by_entry = scope.expand(factor, x.shape[scope.channel_axis]) if x.ndim else factor
        dtype, x = x.dtype, wide(x) * by_entry
        # not below the smallest normal number, or a constant row would be divided by 0
        room = jnp.maximum(room * jnp.square(factor), jnp.where(room > 0, jnp.finfo(room.dtype).tiny, 0))
        shift = None if shift is None else shift * factor
    rule = "autodiff" if jnp.iscomplexobj(x) else rule
    y, own, total = _run(rule, config, x, scale, bias, where, shift, room)
    if factor is not None:
        y = y.astype(out_dtype or dtype)
        own, total = _unscaled(own, factor), _unscaled(total, factor)
    return Normalized(y, own, total if scope.has_total else own)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _run(rule: str, config: Config, *arrays):
    """One program for a norm that is called outside of jit: some sixty small ones would take seconds to compile."""
    return RULES[rule](config, *arrays)


def affine(
    x: Array, mean: Array | None, rstd: Array, scale: Array | None = None, bias: Array | None = None, *,
    low: Array | None = None, scale_offset: float = 0.0,
) -> Array:  # fmt: skip
    """The affine map with given statistics, rounded once: (x - mean - low) * rstd * (scale + scale_offset) + bias.

    All of x's rank and broadcastable to x; differentiated by JAX. The apply step on its own, for who schedules other
    work between statistics and apply.

    >>> affine(jnp.ones((2, 3)), jnp.ones((1, 3)), jnp.ones((1, 3))).shape
    (2, 3)
    """
    x = x.astype(output_dtype(x.dtype))
    low = None if mean is None else jnp.zeros_like(mean) if low is None else low
    parameters = folded(rstd, effective(scale, scale_offset), wide_or_none(bias))
    return passes.current_backend().apply(x, mean, low, *parameters)


def _check_whole(x: Array, axes: tuple[int, ...]) -> None:
    """Raise where `axes` of x are split over an explicit mesh: halving them could not be typed."""
    names = sorted({name for a in axes for name in splits(x)[a]})
    if names:
        raise ValueError(
            "`batch_invariant` needs each row whole on one device, but x is sharded along its reduced axes over "
            f"{names}: reshard x first, or leave `batch_invariant` False."
        )


def _power_of_two(x: Array, where: Array | None, config: Config) -> Array:
    """A power of two by which what shares statistics can be multiplied without overflow of its squares.

    One per set of statistics, by group of channels; 1 for ordinary values. Only measured, finite entries count.
    """
    scope = config.scope
    size = jnp.abs(lax.stop_gradient(x))
    size = jnp.where(jnp.isfinite(size) if where is None else jnp.isfinite(size) & where, size, 0)
    largest = wide(jnp.max(size, config.axes, keepdims=True, initial=0))
    largest = scope.max_channels(largest)
    largest = jnp.max(largest, scope.total_axes, keepdims=True) if scope.total_axes else largest
    if scope.all_names:
        largest = lax.stop_gradient(lax.pmax(vary_typed(largest, scope.all_names), scope.all_names))
    _, exponent = jnp.frexp(largest)
    return jnp.where(largest > RESCALE_ABOVE, jnp.ldexp(jnp.ones_like(largest), -exponent), 1)


def _unscaled(moments: Moments, factor: Array) -> Moments:
    return moments._replace(mean=moments.mean / factor, low=moments.low / factor, m2=moments.m2 / factor / factor)
