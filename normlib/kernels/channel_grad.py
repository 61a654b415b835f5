"""The backward of a norm over channels in one kernel, for one read of x and dy where the entries of a channel stay.

    z = xhat * scale + bias + behind;     dz = dy, or the cotangent of z through an activation
    g = dz * scale;   dx = (g - c1 * (x - mean) - c0) * rstd,   c0 = sum(g) / n,   c1 = rstd * sum(g * xhat) / n

The sums of dz and dz * xhat over a channel, which are the cotangents of bias and scale, are outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from normlib.kernels.affine import grad_tile
from normlib.kernels.channel_cost import Bytes, bytes_of
from normlib.kernels.channel_sets import Pool, Sets
from normlib.kernels.channel_tiling import channel_tilings
from normlib.kernels.channel_walk import Rows, run_channels
from normlib.kernels.machine import Machine
from normlib.kernels.phases import Columns, Phase
from normlib.kernels.rows_grad import Given, through
from normlib.kernels.tile import sum_rows, widened
from normlib.kernels.tiling import Tiling


class ChannelGrad(NamedTuple):
    """What `channel_norm_grad` returns: dx and, where asked for, dz, of the view's shape; the sums of dz and of
    dz * xhat of every channel, `[A, 1, C]` or `[1, C, 1]` in float32."""

    dx: Array
    dz: Array | None
    s0: Array
    s1: Array


def grad_bytes(
    x: Array, given: Given, *, sets: Sets, activation: Any = None, behind_dtype: Any = None, **_: Any
) -> Bytes:
    """What a tile of `channel_norm_grad` holds, for the same arguments; shapes and dtypes are enough."""
    written = [x.dtype] if behind_dtype is None else [x.dtype, behind_dtype]
    return bytes_of(sets, x, given, written, 16 if activation is None else 28)


def channel_norm_grad(
    x: Array, given: Given, *, sets: Sets, machine: Machine, activation: Any = None, behind_dtype: Any = None,
    name: str = "channel_norm_grad", rows: int | None = None, chunk: int | None = None, residency: str | None = None,
) -> ChannelGrad | None:  # fmt: skip
    """Cotangents of `channel_norm`; None where not one channel, or one group, fits a tile.

    Args:
      x: of the shape that `sets` was made for.
      given: dy and the rest, of x's rank; mean, low (None where x was not centred), rstd and scale one value per
        channel, bias and behind only where there is an activation; no `extra`.
      sets: which entries share statistics.
      machine: where it runs.
      activation: with a method `pull(dy, z, one)`, or None.
      behind_dtype: of dz as an output; None for no such output.
      name, rows, chunk, residency: as `channel_norm`.
    """
    arrays = [sets.view.array(t) for t in (x, *given) if t is not None]
    dtypes = [x.dtype] if behind_dtype is None else [x.dtype, jnp.dtype(behind_dtype)]
    held = grad_bytes(x, given, sets=sets, activation=activation, behind_dtype=behind_dtype)
    tile = channel_tilings(sets, machine, held, rows=rows, chunk=chunk, residency=residency)
    if tile is None:
        return None
    body = _Body(sets, machine, tile, given, activation)
    phases = [
        Phase(body.summed, body.add, body.end, 2, 4),
        Phase(lambda rows, refs, done: body.write(rows, refs, (), done), body.write, lambda *_: (), 0, 0),
    ]
    found, (s0, s1) = run_channels(
        phases, sets, arrays, dtypes, tile, name=name, machine=machine, number=2, columns=lambda done: done[2:]
    )
    return ChannelGrad(found[0], found[1] if behind_dtype is not None else None, s0, s1)


class _Body:
    """Refs: x, those given, then dx and dz."""

    def __init__(self, sets: Sets, machine: Machine, tile: Tiling, given: Given, activation: Any):
        self.sets, self.machine, self.lanes, self.activation = sets, machine, tile.chunk, activation
        self.given = [t is not None for t in given]
        self.used = 1 + sum(self.given)

    def _values(self, rows: Rows, refs: Sequence[Any]) -> tuple[Array, Given]:
        left = list(refs[1 : self.used])
        values = Given(*(widened(rows.read(left.pop(0))) if use else None for use in self.given))
        return widened(rows.read(refs[0])), values

    def _column(self, refs: Sequence[Any], number: int) -> Array:
        """A value per channel, of that number among those given."""
        return widened(refs[1 + sum(self.given[:number])][...])

    def total(self, t: Array) -> Array:
        """The sum over what a channel has in a tile, axis by axis: Triton takes one at a time."""
        t = sum_rows(t, self.machine, self.sets.serial)
        return jnp.sum(t, 2, keepdims=True) if self.sets.spread else t

    def summed(self, rows: Rows, refs: Sequence[Any], done: Columns) -> Columns:
        """(sum of dz, sum of dz * xhat) of some rows."""
        x, v = self._values(rows, refs)
        dz, xhat = through(x, v, self.activation)
        dz = rows.clean(jnp.broadcast_to(dz, x.shape))
        return self.total(dz), self.total(dz * rows.clean(xhat))

    def add(self, rows: Rows, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """The sums with those of some more rows."""
        more = self.summed(rows, refs, done)
        return carry[0] + more[0], carry[1] + more[1]

    def end(self, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """(c0, c1) of the whole set in each of its channels, and the sums."""
        s0, s1 = carry
        if self.given[4]:
            scale = self._column(refs, 4)
            s0, s1 = s0 * scale, s1 * scale
        pool, n = Pool(self.lanes, self.sets.group, self.machine), float(self.sets.entries)
        return pool(s0) / n, self._column(refs, 3) * (pool(s1) / n), *carry

    def write(self, rows: Rows, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """dx and dz of some rows."""
        c0, c1 = done[:2]
        x, v = self._values(rows, refs)
        dz, _ = through(x, v, self.activation)
        dx = grad_tile(x, dz, v.mean, v.low, v.rstd, v.scale, c1, None if v.mean is None else c0)
        for ref, value in zip(refs[self.used :], (dx, dz)):
            rows.write(ref, value)
        return ()
