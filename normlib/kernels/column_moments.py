"""Moments over any axes for one read of x: of rows, of columns, and of tables of moments.

A tile's moments are taken about its own mean while it is in the buffer. Tiles, parts of the rows and tables of moments
are merged by Chan's formula in a fixed order, the mean in two words: as accurate as two passes, for one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from normlib.kernels.machine import Machine
from normlib.kernels.rows import row_moments
from normlib.kernels.sums import MERGED_LANES
from normlib.kernels.tile import (
    Chunk,
    Operand,
    at_least_zero,
    chan,
    inside,
    lanes_per_tile,
    launch,
    output,
    quotient,
    rows_per_tile,
    sum_rows,
    widened,
)
from normlib.kernels.tile import rows_that_fit as that_fit
from normlib.kernels.view import View, columns_of, last_run, rows_of
from normlib.moments import two_sum
from normlib.precision import wide_dtype


class Table(NamedTuple):
    """Moments of sets, arrays of one shape; `each` entries in every set, or `counts` (float, constant along lanes)."""

    mean: Array
    low: Array | None
    m2: Array | None
    each: int = 1
    counts: Array | None = None


def moments(
    x: Array, *, axes: Sequence[int], machine: Machine, name: str = "moments", rows: int | None = None,
    chunk: int | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(mean, low, m2) of x over `axes`, kept with size 1, in float32.

    Args:
      x: any shape, not empty.
      axes: any axes; runs of neighbours are pooled one after another.
      machine: where it runs.
      name: of the kernels in reports.
      rows, chunk: rows and lanes per tile of columns; by default what fits.
    """
    table = Table(x, None, None)
    left = tuple(a for a in axes if x.shape[a] != 1)
    if not left:
        zero = jnp.zeros(x.shape, wide_dtype(x.dtype))
        return x.astype(zero.dtype), zero, zero
    run = last_run(x.shape, left)
    view = rows_of(x.shape, run)
    if view is not None:
        mean, low, m2 = (view.back(t) for t in row_moments(x, view=view, machine=machine, name=name))
        table = Table(mean, low, m2, math.prod(x.shape[a] for a in run))
        left, name = tuple(a for a in left if a not in run), f"{name}_merge"
    while left:
        run = last_run(table.mean.shape, left)
        table = _columns(table, columns_of(table.mean.shape, run), name, machine, rows, chunk)
        left, name = tuple(a for a in left if a not in run), f"{name}_merge"
    assert table.low is not None and table.m2 is not None
    return table.mean, table.low, table.m2


def _columns(table: Table, view: View, name: str, machine: Machine, rows=None, chunk=None) -> Table:
    """The sets along the middle of `view`, pooled."""
    parts = _partial(table, view, name, machine, rows, chunk)
    each = table.each * view.tile_shape[1]
    a, number, l = parts.mean.shape
    if number > 1:
        merge = columns_of((a, number, l), (1,))
        # a Triton program walks all parts of a few columns
        tall = (min(number, 128), MERGED_LANES, 1) if machine.masked else (number, None)
        parts = _partial(parts, merge, f"{name}_merge", machine, *tall)
    mean, low, m2 = (view.back(t) for t in (parts.mean, parts.low, parts.m2) if t is not None)
    return Table(mean, low, m2, each)


def _partial(table: Table, view: View, name: str, machine: Machine, rows, chunk, most=None) -> Table:
    """Moments of the parts of the rows, `[A, parts, L]`, with their counts."""
    a, m, l = view.tile_shape
    present = [view.array(t) for t in (table.mean, table.low, table.m2) if t is not None]
    present += [] if table.counts is None else [table.counts]
    dtype = wide_dtype(table.mean.dtype)
    lanes = lanes_per_tile(l, chunk or machine.column_lanes, machine)
    fit = machine.column_rows if machine.masked else that_fit(present, lanes, machine, size=a * m * l, extra=16)
    if rows is not None and fit < rows and not machine.masked:
        lanes = lanes_per_tile(l, lanes * fit // rows, machine)
    whole = pl.next_power_of_2(m) if machine.power_of_two else m
    tile = whole if rows == m else rows_per_tile(m, rows or fit, machine)
    blocks = pl.cdiv(m, tile)
    turns = pl.cdiv(blocks, min(most or machine.parts, blocks))
    parts = pl.cdiv(blocks, turns)
    # where steps run in order, tiles of a part are steps of the grid; elsewhere a program walks them
    walk, steps = (1, turns) if machine.sequential else (turns, 1)
    exact = m == parts * turns * tile
    body = _Columns(machine, m, tile, lanes, table.each, table.m2 is not None, table.counts is not None, dtype)

    def kernel(*refs):
        ins, outs = refs[: len(present)], refs[len(present) :]
        p, t = pl.program_id(2), pl.program_id(3)
        lane = inside(pl.program_id(1) * lanes, lanes, l, 1) if machine.masked and l % lanes else None
        first = p * (turns * tile)
        column = Chunk(machine, 0, lanes, lane, None, lanes)

        def found(turn, row):
            return body.tile(ins, lane, first + turn * tile, row, None if walk == 1 else tile, exact)

        if steps == 1:
            carry = found(0, 0)
            if walk > 1:
                carry = lax.fori_loop(1, walk, lambda i, c: chan(c, found(i, i * tile), machine), carry)
            for ref, value in zip(outs, carry[1:]):
                column.write(ref, value)
            return

        @pl.when(t == 0)
        def _():
            for ref, value in zip(outs, found(0, 0)[1:]):
                ref[...] = value

        if steps > 1:

            @pl.when(t > 0)
            def _():
                before = (body.number(t * tile), *(ref[...] for ref in outs))
                for ref, value in zip(outs, chan(before, found(t, 0), machine)[1:]):
                    ref[...] = value

    def at(p, t):
        """The last part may have fewer blocks than turns: it stays at the last block, masked."""
        return jnp.minimum(p * steps + t, pl.cdiv(blocks, walk) - 1) if parts * turns != blocks else p * steps + t

    def operand(u: Array) -> Operand:
        s = tuple(n != 1 for n in u.shape)
        block = (None, tile * walk if s[1] else 1, lanes if s[2] else 1)
        return Operand(u, block, lambda i, j, p, t: (i * s[0], at(p, t) * s[1], j * s[2]))

    shape, block = (a, parts, 1, l), (None, None, 1, lanes)
    outs = [output(shape, dtype, block, lambda i, j, p, t: (i, p, 0, j)) for _ in range(3)]
    result = launch(
        kernel, name, (a, pl.cdiv(l, lanes), parts, steps), [operand(t) for t in present], outs, machine,
        semantics=("parallel", "parallel", "parallel", "arbitrary"), entries=tile * lanes, columns=most != 1,
    )  # fmt: skip
    mean, low, m2 = (t.reshape(a, parts, l) for t in result)
    span = turns * tile
    # computed, not a constant array: a kernel call that is split between devices may hold none
    rows_of_part = jnp.clip(m - span * lax.broadcasted_iota(jnp.int32, (1, parts, 1), 1), 0, span)
    return Table(mean, low, m2, counts=rows_of_part.astype(dtype) * table.each)


class _Columns:
    """(count, mean, low, m2) of tiles: count `[1, 1]`, the rest `[1, lanes]`."""

    def __init__(self, machine, m, tile, lanes, each, is_table, counted, dtype):
        self.machine, self.m, self.rows, self.lanes, self.each = machine, m, tile, lanes, float(each)
        self.is_table, self.counted, self.dtype = is_table, counted, dtype

    def number(self, rows: Any) -> Array:
        """Entries of so many rows."""
        return jnp.full((1, 1), rows, jnp.int32).astype(self.dtype) * self.each

    def tile(self, refs, lane, start, row, height, exact: bool):
        """Moments of the rows of a tile from `start` on, which lie at `row` of the block."""
        within = None if exact else inside(start, self.rows, self.m, 0)
        part = Chunk(self.machine, 0, self.lanes, lane, within if self.machine.masked else None, 0, row, height)

        def clean(t):
            return t if within is None else jnp.where(within, t, jnp.zeros((), t.dtype))

        def total(t):
            return sum_rows(t, self.machine)

        mean, *others = (widened(part.read(ref)) for ref in refs)
        if self.counted:
            weights = clean(others.pop())
            count = total(weights)
        else:
            weights, count = None, self.number(jnp.clip(self.m - start, 0, self.rows))
        weigh = (lambda t: t * weights) if weights is not None else (lambda t: t * self.each)
        weigh = (lambda t: t) if weights is None and self.each == 1 else weigh
        safe = jnp.maximum(count, 1.0)
        k = quotient(total(clean(weigh(mean))), safe, self.machine)
        d = mean - k
        d = clean(d + others[0] if self.is_table else d)
        s1 = total(weigh(d))
        share = quotient(s1, safe, self.machine)
        m2 = total(weigh(d * d)) - s1 * share
        m2 = at_least_zero(m2)
        m2 = m2 + total(clean(others[1])) if self.is_table else m2
        return (count, *two_sum(k, share), m2)
