"""Norms over channels in one kernel: batch, instance and group norm of whole channels, forward.

    y = activation((x - mean) * rstd * scale + bias + behind)

A tile holds all entries of some channels, so statistics and y come from one launch, and from one read of x where the
entries stay. Statistics of some rows are taken about their own mean, while they are in the buffer; rows, and the
channels of a group, are merged by Chan's formula with the mean in two words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from normlib.kernels.affine import affine_tile
from normlib.kernels.channel_cost import Bytes, bytes_of
from normlib.kernels.channel_sets import Pool, Sets
from normlib.kernels.channel_tiling import channel_tilings
from normlib.kernels.channel_walk import Rows, run_channels
from normlib.kernels.machine import Machine
from normlib.kernels.phases import Columns, Phase
from normlib.kernels.tile import activated, at_least_zero, chan, quotient, sum_rows, widened
from normlib.kernels.tiling import Tiling
from normlib.moments import two_sum


class ChannelNorm(NamedTuple):
    """What `channel_norm` returns: y of the view's shape and, per channel, `[A, 1, C]` or `[1, C, 1]` in float32, the
    statistics of its set; no mean and low where x is not centred."""

    y: Array
    mean: Array | None
    low: Array | None
    m2: Array
    rstd: Array


def norm_bytes(
    x: Array, scale: Any = None, bias: Any = None, behind: Any = None, *, sets: Sets, activation: Any = None,
    dtype: Any = None, **_: Any,
) -> Bytes:  # fmt: skip
    """What a tile of `channel_norm` holds, for the same arguments; shapes and dtypes are enough."""
    return bytes_of(sets, x, [scale, bias, behind], [dtype or x.dtype], 12 if activation is None else 20)


def channel_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, behind: Array | None = None, *, sets: Sets,
    eps: float, machine: Machine, centered: bool = True, activation: Callable[[Array], Array] | None = None,
    dtype: Any = None, name: str = "channel_norm", rows: int | None = None, chunk: int | None = None,
    residency: str | None = None,
) -> ChannelNorm | None:  # fmt: skip
    """Normalise whole channels; None where not one of them, or one group, fits a tile.

    Args:
      x: of the shape that `sets` was made for.
      scale, bias, behind: of its rank and broadcastable to it, or None; `behind` is added after the norm.
      sets: which entries share statistics.
      eps: added to the variance.
      machine: where it runs.
      centered: False keeps the mean in.
      activation: applied to float32 before the rounding.
      dtype: of y; that of x by default.
      name: of the kernel in reports.
      rows, chunk, residency: the tiling asked for: rows of a tile at a time, channels of a tile, and whether their
        entries stay ("row") or are read twice ("stream").
    """
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    given = (x, scale, bias, behind)
    arrays = [sets.view.array(t) for t in given if t is not None]
    held = norm_bytes(*given, sets=sets, activation=activation, dtype=dtype)
    tile = channel_tilings(sets, machine, held, rows=rows, chunk=chunk, residency=residency)
    if tile is None:
        return None
    body = _Body(sets, machine, tile, [t is not None for t in given[1:]], eps, centered, activation)
    phases = [
        Phase(body.measure, body.merge, body.end, 3, 4),
        Phase(lambda rows, refs, done: body.write(rows, refs, (), done), body.write, lambda *_: (), 0, 0),
    ]
    kept = (0, 1, 2, 3) if centered else (2, 3)
    (y,), found = run_channels(
        phases, sets, arrays, [dtype], tile, name=name, machine=machine, number=len(kept),
        columns=lambda done: tuple(done[i] for i in kept),
    )  # fmt: skip
    mean, low = found[:2] if centered else (None, None)
    return ChannelNorm(y, mean, low, *found[-2:])


class _Body:
    """The phases. Refs: x, scale, bias and behind (those given), y."""

    def __init__(self, sets: Sets, machine: Machine, tile: Tiling, given, eps, centered, activation):
        self.sets, self.machine, self.lanes, self.given = sets, machine, tile.chunk, given
        self.eps, self.centered, self.activation = eps, centered, activation
        _, self.m, _, self.r = sets.sides

    def total(self, t: Array) -> Array:
        """The sum over what a channel has in a tile, axis by axis: Triton takes one at a time."""
        t = sum_rows(t, self.machine, self.sets.serial)
        return jnp.sum(t, 2, keepdims=True) if self.sets.spread else t

    def number(self, rows: Any, dtype: Any) -> Array:
        """Entries of so many rows of a channel."""
        shape = (1, 1, 1) if self.sets.spread else (1, 1)
        return jnp.full(shape, rows, jnp.int32).astype(dtype) * float(self.r)

    def measure(self, rows: Rows, refs: Sequence[Any], done: Columns) -> Columns:
        """(mean, low, m2) of some rows, about their own mean."""
        x = widened(rows.read(refs[0]))
        if not self.centered:
            x = rows.clean(x)
            m2 = self.total(x * x)
            return jnp.zeros_like(m2), jnp.zeros_like(m2), m2
        n = float(rows.count * self.r) if isinstance(rows.count, int) else self.number(rows.count, x.dtype)
        mean = quotient(self.total(rows.clean(x)), n, self.machine)
        d = rows.clean(x - mean)
        rest, m2 = self.total(d), self.total(d * d)
        share = quotient(rest, n, self.machine)
        return *two_sum(mean, share), at_least_zero(m2 - rest * share)

    def merge(self, rows: Rows, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """The moments with those of some more rows."""
        mine = self.measure(rows, refs, done)
        if not self.centered:
            return *carry[:2], carry[2] + mine[2]
        before, more = (self.number(n, carry[0].dtype) for n in (rows.start, rows.count))
        return chan((before, *carry), (more, *mine), self.machine)[1:]

    def end(self, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """(mean, low, m2, rstd), of the whole set in each of its channels."""
        mean, low, m2 = self.pooled(*carry)
        var = m2 / float(self.sets.entries)
        # var - var is 0, or NaN where the variance is not finite: 1 / inf would be a silent 0
        return mean, low, m2, 1.0 / jnp.sqrt(var + self.eps) + (var - var)

    def pooled(self, mean: Array, low: Array, m2: Array) -> Columns:
        """The moments of each channel's group."""
        group = self.sets.group
        pool = Pool(self.lanes, group, self.machine)
        if pool.alone:
            return mean, low, m2
        if not self.centered:
            return mean, low, pool(m2)
        k = quotient(pool(mean), float(group), self.machine)
        d = (mean - k) + low
        s1 = pool(d)
        share = quotient(s1, float(group), self.machine)
        apart = pool(d * d) - s1 * share
        return *two_sum(k, share), pool(m2) + at_least_zero(apart) * float(self.m)

    def write(self, rows: Rows, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """y of some rows."""
        mean, low, _, rstd = done
        left = list(refs[1:-1])
        scale, bias, behind = (widened(rows.read(left.pop(0))) if use else None for use in self.given)
        if scale is not None and scale.shape == rstd.shape:  # one product per channel, not per entry
            rstd, scale = rstd * scale, None
        s = widened(rows.read(refs[0]))
        y = affine_tile(s, mean if self.centered else None, low, rstd, scale, bias)
        y = y if behind is None else y + behind
        rows.write(refs[-1], activated(self.activation, y, self.machine))
        return ()
