"""The forward of every norm: moments, pooled over a scope, then one affine pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from normlib import _arguments as check
from normlib import passes
from normlib.moments import Moments, count_entries
from normlib.precision import wide, wide_dtype
from normlib.scope import Scope, cast


@dataclass(frozen=True)
class Config:
    """The static part of a norm; hashable, so that it can be a non-differentiated argument."""

    axes: tuple[int, ...]
    centered: bool
    scale_offset: float
    scope: Scope
    batch_invariant: bool
    backend: Any  # a pass
    out_dtype: str | None = None
    eps: float | None = None  # where it is known while tracing; a kernel then holds it as a constant

    @property
    def is_xla(self) -> bool:
        """Whether passes may read deferred arrays."""
        return self.backend is passes.xla

    @property
    def passes(self) -> type[passes.Pass]:
        """The five functions of the chosen backend."""
        return self.backend


def forward(config, x, scale, bias, where, shift, eps):
    """(y, moments of y, moments of the whole scope); x of any shape, the rest broadcastable to it."""
    return normalized(config, x, scale, bias, where, shift, eps)[:3]


def normalized(config, x, scale, bias, where, shift, eps):
    """(y, moments of y, moments of the whole scope, rstd); in one sweep where the backend has one for it."""
    whole = getattr(config.passes, "forward", None)
    if whole is not None and config.scope.is_local and not heeded(config, shift) and isinstance(x, jax.Array):
        found = whole(
            [x], effective(scale, config.scale_offset), wide_or_none(bias), where, axes=config.axes,
            eps=eps if config.eps is None else config.eps, centered=config.centered, dtype=config.out_dtype or x.dtype,
            batch_invariant=config.batch_invariant, **sets_of(config),
        )  # fmt: skip
        if found is not None:
            return found.y, found.moments, found.moments, found.rstd
    own, total = pooled(config, x, where, shift, eps)
    rstd = own.rstd(eps)
    return apply(config, x, own, rstd, scale, bias, where), own, total, rstd


def heeded(config, shift) -> bool:
    """Whether a guess of the mean, any shape or None, is more than help to save a pass: a method asked for by name."""
    return shift is not None and config.scope.method != "auto"


def sets_of(config) -> dict[str, Any]:
    """Which channels share statistics, as a kernel is told."""
    return {"channels": config.scope.channels, "channel_axis": config.scope.channel_axis}


def pooled(config, x, where, shift, eps) -> tuple[Moments, Moments]:
    """(moments of y, moments of the whole scope) of x, any shape; reduced axes of size 1."""
    backend, scope, axes = config.passes, config.scope, config.axes
    options = {"axes": axes, "where": where, "batch_invariant": config.batch_invariant}

    def sums(k):
        k = None if k is None else scope.expand(k, x.shape[scope.channel_axis])
        s1, s2 = backend.sums(x, k, **options)
        return (s1 if config.centered else None), s2

    def local():
        if config.centered:
            return backend.moments(x, **options)
        s2 = sums(None)[1]
        zero = jnp.zeros_like(s2)
        return Moments(jnp.broadcast_to(count, s2.shape), zero, zero, s2)

    count = count_entries(x.shape, axes, where)
    counted = where is not None
    # a wider guess would widen the statistics and all that follows
    shift = None if shift is None else cast(shift, wide_dtype(x.dtype))
    return scope.pool(local, sums, count, shift=shift, eps=eps, centered=config.centered, counted=counted)


def apply(config, x, own, rstd, scale, bias, where):
    """y of x, any shape, with given moments and rstd; rounded once."""
    mean, low, rstd = by_channel(config, x, own, rstd)
    scale, bias = effective(scale, config.scale_offset), wide_or_none(bias)
    options = {"where": where, "dtype": config.out_dtype, "batch_invariant": config.batch_invariant}
    return config.passes.apply(x, mean, low, *folded(rstd, scale, bias, where), **options)


def by_channel(config, x, own, rstd):
    """(mean, low, rstd) broadcastable to x; no mean where x is not centred."""
    scope, channels = config.scope, x.shape[config.scope.channel_axis] if x.ndim else 1
    if not config.centered:
        return None, None, scope.expand(rstd, channels)
    return tuple(scope.expand(t, channels) for t in (own.mean, own.low, rstd))


def effective(scale, offset):
    """scale + offset in the dtype of statistics, any shape; None where there is no scale."""
    scale, offset = wide_or_none(scale), check.number(offset, "scale_offset")
    return scale + offset if scale is not None and offset else scale


def folded(rstd, scale, bias, where=None):
    """A scale that is constant along the reduced axes becomes part of the (tiny) rstd.

    Not beside a mask: an rstd of 0 then says that nothing was measured, which a scale of 0 must not.
    """
    if where is None and scale is not None and constant_along(scale.shape, rstd.shape):
        return rstd * scale, None, bias
    return rstd, scale, bias


def constant_along(shape, tiny) -> bool:
    """True if a parameter of `shape` [..., 1 or n] is constant along the axes that the statistics `tiny` reduce."""
    return all(s == 1 or s == t for s, t in zip(shape, tiny))


def wide_or_none(t: Array | None) -> Array | None:
    """`t`, any shape, in the dtype of statistics, or None."""
    return None if t is None else wide(t)
