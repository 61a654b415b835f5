"""Sums along one run of axes: of rows (lanes are summed) and of columns (lanes stay, partial results are merged).

Cores cannot add into one tile, so sums of columns are partial sums first and are merged in a fixed order by the same
kernel: deterministic on any number of cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from normlib.kernels.affine import MOST_LANES, as_bytes, elementwise
from normlib.kernels.machine import Machine
from normlib.kernels.tile import (
    Chunk,
    Operand,
    fold,
    inside,
    lanes_per_tile,
    launch,
    output,
    rows_per_tile,
    rows_that_fit,
    widened,
)  # fmt: skip
from normlib.kernels.view import columns_of, last_run, rows_of
from normlib.precision import wide_dtype

MERGED_LANES = 32  # of a program that merges: few, so that there are many programs

# Of float32 tiles (masks bool), the summands as tiles of the first operand's shape.
Terms = Callable[..., tuple[Array, ...]]


def sums(
    terms: Terms, operands: Sequence[Array | None], *, axes: Sequence[int], number: int, name: str, machine: Machine,
    rows: int | None = None, chunk: int | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """Sums of `terms(*operands)` over `axes`, kept with size 1, in float32.

    Args:
      terms: gives `number` summands of the first operand's tile shape, 0 where nothing is to be added.
      operands: the first gives the shape; the rest of its rank and broadcastable to it, or None.
      axes: any axes; runs of neighbours are summed one after another.
      name: of the kernels in reports.
      machine: where they run.
      rows, chunk: rows and lanes per tile; by default what fits.
    """
    x = operands[0]
    assert x is not None
    if not axes:  # nothing to sum: the terms themselves
        wide = wide_dtype(x.dtype)
        return tuple(
            elementwise(lambda *t, i=i: terms(*t)[i], operands, name=name, dtype=wide, machine=machine)
            for i in range(number)
        )
    run = last_run(x.shape, axes)
    rest = tuple(a for a in axes if a not in run)
    options: dict[str, Any] = {"number": number, "machine": machine, "rows": rows, "chunk": chunk}
    shapes = [t.shape for t in operands if t is not None]
    view = rows_of(x.shape, run, shapes) if any(x.shape[i] != 1 for i in run) else None
    if view is not None:
        found = [view.back(t) for t in _row_sums(terms, view, operands, name=name, **options)]
    else:
        view = columns_of(x.shape, run)
        found = [view.back(t) for t in _column_sums(terms, view, operands, name=name, **options)]
    if not rest or all(x.shape[a] == 1 for a in rest):
        return tuple(found)
    again: Terms = lambda *t: t  # noqa: E731
    return sums(again, found, axes=rest, number=number, name=f"{name}_merge", machine=machine)


def _loaded(chunk: Chunk, operands, refs) -> list[Array | None]:
    refs = list(refs)
    values: list[Array | None] = []
    for t in operands:
        if t is None:
            values.append(None)
            continue
        ref = refs.pop(0)
        value = chunk.read(ref)
        values.append(value != 0 if ref.dtype == jnp.int8 else widened(value))
    return values


def _row_sums(terms, view, operands, *, number, name, machine, rows, chunk):
    a, m, l = view.tile_shape
    present = [as_bytes(view.array(t)) for t in operands if t is not None]
    dtype = wide_dtype(present[0].dtype)
    lanes = lanes_per_tile(l, chunk or MOST_LANES, machine)
    turns = pl.cdiv(l, lanes)
    fit = rows_that_fit(present, lanes, machine, size=a * m * l, extra=4 * (number + 2))
    tile = rows_per_tile(m, rows or min(fit, machine.tile_bytes // (lanes * 4 + machine.row_bytes)), machine)
    # where steps run in order, chunks are steps of the grid; elsewhere a program walks its rows
    walk = 1 if machine.sequential else turns
    steps = turns if machine.sequential else 1
    width = lanes * walk

    def kernel(*refs):
        ins, outs = refs[: len(present)], refs[len(present) :]
        within = None if m % tile == 0 else inside(pl.program_id(1) * tile, tile, m, 0)

        def add(part: Chunk) -> tuple[Array, ...]:
            found = terms(*_loaded(part, operands, ins))
            return tuple(jnp.sum(part.clean(jnp.broadcast_to(t, (tile, lanes))), 1, keepdims=True) for t in found)

        if steps == 1:
            total = fold(
                machine, l, lanes, within if machine.masked else None,
                lambda c, carry: tuple(t + u for t, u in zip(carry, add(c))), add,
            )  # fmt: skip
            row = Chunk(machine, 0, 1, None, within, 1)
            for out, t in zip(outs, total):
                row.write(out, t)
            return
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _():
            for out in outs:
                out[...] = jnp.zeros_like(out)

        def step(part):
            for out, t in zip(outs, add(part)):
                out[...] += t

        def at(masked):
            return Chunk(machine, 0, lanes, inside(0, lanes, l - (steps - 1) * lanes, 1) if masked else None, None, 0)

        if l % lanes:
            pl.when(k == steps - 1)(lambda: step(at(True)))
            pl.when(k < steps - 1)(lambda: step(at(False)))
        else:
            step(at(False))

    def operand(t: Array) -> Operand:
        s = tuple(n != 1 for n in t.shape)
        block = (None, tile if s[1] else 1, width if s[2] else 1)
        return Operand(t, block, lambda i, j, k: (i * s[0], j * s[1], k * s[2]))

    outs = [output((a, m, 1), dtype, (None, tile, 1), lambda i, j, k: (i, j, 0)) for _ in range(number)]
    return launch(
        kernel, name, (a, pl.cdiv(m, tile), steps), [operand(t) for t in present], outs, machine,
        semantics=("parallel", "parallel", "arbitrary"), entries=tile * lanes,
    )  # fmt: skip


def _column_tile(present, shape, *, number, machine, rows, chunk) -> tuple[int, int, int, bool]:
    """(rows and lanes of a tile, parts at most, whether few warps do) of arrays `present` seen as `shape`."""
    a, m, l = shape
    most = machine.parts
    if machine.masked and rows == m:  # a program walks all rows of a few columns: many programs, one launch
        rows, chunk, most = min(m, 128), MERGED_LANES, 1
    # terms of more arrays keep so many values that few warps with long parts would leave a multiprocessor idle
    few = len(present) <= 2 * number and most != 1
    lanes = lanes_per_tile(l, chunk or machine.column_lanes, machine)
    fit = rows_that_fit(present, lanes, machine, size=a * m * l, extra=4 * (number + 2))
    fit = machine.column_rows // (1 if few else 2) if machine.masked else fit
    if rows is not None and fit < rows and not machine.masked:  # fewer lanes, so that the rows asked for fit
        lanes = lanes_per_tile(l, lanes * fit // rows, machine)
    return rows_per_tile(m, rows or fit, machine), lanes, most, few


def _column_sums(terms, view, operands, *, number, name, machine, rows, chunk):
    a, m, l = view.tile_shape
    present = [as_bytes(view.array(t)) for t in operands if t is not None]
    dtype = wide_dtype(present[0].dtype)
    tile, lanes, most, few = _column_tile(
        present, view.tile_shape, number=number, machine=machine, rows=rows, chunk=chunk
    )  # fmt: skip
    blocks = pl.cdiv(m, tile)
    parts = min(most, blocks)
    turns = pl.cdiv(blocks, parts)
    parts = pl.cdiv(blocks, turns)
    # where steps run in order, tiles of a part are steps of the grid; elsewhere a program walks them
    walk, steps = (1, turns) if machine.sequential else (turns, 1)

    def kernel(*refs):
        ins, outs = refs[: len(present)], refs[len(present) :]
        p, t = pl.program_id(2), pl.program_id(3)
        first = (p * turns + t) * tile if machine.sequential else p * turns * tile
        lane_mask = None if l % lanes == 0 else inside(pl.program_id(1) * lanes, lanes, l, 1)

        def add(start, row, masked):
            within = inside(start, tile, m, 0) if masked else None
            lane = lane_mask if machine.masked else None
            part = Chunk(machine, 0, lanes, lane, within, lanes, row, None if walk == 1 else tile)
            found = terms(*_loaded(part, operands, ins))
            found = [jnp.broadcast_to(u, (tile, lanes)) for u in found]
            if within is not None:
                found = [jnp.where(within, u, jnp.zeros((), u.dtype)) for u in found]
            return tuple(jnp.sum(u, 0, keepdims=True) for u in found)

        column = Chunk(machine, 0, lanes, lane_mask if machine.masked else None, None, lanes)
        if steps == 1:

            def turn(i, carry):
                found = add(first + i * tile, i * tile, m % (tile * turns) != 0)
                return tuple(u + v for u, v in zip(carry, found))

            zero = tuple(jnp.zeros((1, lanes), dtype) for _ in range(number))
            total = turn(0, zero) if walk == 1 else lax.fori_loop(0, walk, turn, zero)
            for out, u in zip(outs, total):
                column.write(out, u)
            return

        @pl.when(t == 0)
        def _():
            for out in outs:
                out[...] = jnp.zeros_like(out)

        def step(masked):
            for out, u in zip(outs, add(first, 0, masked)):
                out[...] += u

        if m % tile or parts * turns != blocks:
            pl.when(first + tile > m)(lambda: step(True))
            pl.when(first + tile <= m)(lambda: step(False))
        else:
            step(False)

    def at(p, t):
        """The last part may have fewer blocks than turns: it stays at the last block, masked."""
        return jnp.minimum(p * steps + t, pl.cdiv(blocks, walk) - 1) if parts * turns != blocks else p * steps + t

    def operand(u: Array) -> Operand:
        s = tuple(n != 1 for n in u.shape)
        block = (None, tile * walk if s[1] else 1, lanes if s[2] else 1)
        return Operand(u, block, lambda i, j, p, t: (i * s[0], at(p, t) * s[1], j * s[2]))

    shape, block = (a, parts, 1, l), (None, None, 1, lanes)
    outs = [output(shape, dtype, block, lambda i, j, p, t: (i, p, 0, j)) for _ in range(number)]
    found = launch(
        kernel, name, (a, pl.cdiv(l, lanes), parts, steps), [operand(t) for t in present], outs, machine,
        semantics=("parallel", "parallel", "parallel", "arbitrary"), entries=tile * lanes, columns=few,
    )  # fmt: skip
    found = [t.reshape(a, parts, l) for t in found]
    if parts == 1:
        return found
    merged = columns_of((a, parts, l), (1,))
    again: Terms = lambda *t: t  # noqa: E731
    return _column_sums(
        again, merged, found, number=number, name=f"{name}_merge", machine=machine, rows=parts, chunk=None
    )
