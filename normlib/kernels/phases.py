"""A computation on rows in phases, in two tilings: rows that stay in the buffer, and rows that are streamed.

A phase walks the chunks of a row with a carry of `[rows, 1]` arrays and ends with results for the phases after it.
Where a row stays, every phase is a loop over chunks that are already there; where it does not, phases and chunks are
axes of the grid, the carry lives in scratch, and every phase reads the row again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from normlib.kernels.machine import Machine
from normlib.kernels.tile import Chunk, Operand, fold, inside, lanes_per_tile, launch, output, rows_per_tile
from normlib.kernels.view import View

Columns = tuple[Array, ...]  # of [rows, 1]


@dataclass(frozen=True)
class Phase:
    """One walk along the row.

    Attributes:
      first: (chunk, refs, results so far) -> carry after the first chunk.
      step: (chunk, refs, carry, results so far) -> carry.
      end: (refs, carry, results so far) -> new results, appended to those so far.
      carried, found: how many arrays the carry and the new results are.
    """

    first: Callable[[Chunk, Any, Columns], Columns]
    step: Callable[[Chunk, Any, Columns, Columns], Columns]
    end: Callable[[Any, Columns, Columns], Columns]
    carried: int
    found: int


@dataclass(frozen=True)
class Tiling:
    """How rows are cut: `rows` per tile, `chunk` lanes at a time, `streamed` where a row does not stay."""

    rows: int
    chunk: int
    streamed: bool


def tiling(
    shape: tuple[int, int, int], machine: Machine, *, moving: int, temporary: int,
    rows: int | None = None, chunk: int | None = None, residency: str | None = None,
) -> Tiling:  # fmt: skip
    """What fits: whole rows with their temporaries, else resident rows in chunks, else streamed rows.

    Args:
      shape: (A, M, L).
      machine: where it runs.
      moving: bytes per element that stay for the row: every operand and output, twice.
      temporary: bytes per element of float32 values in use at once.
      rows, chunk, residency: asked for, or None.
    """
    _, m, l = shape
    if machine.steady:  # tiles, and with them the bits of a row, do not change with the rows beside it
        m = STEADY_ROWS
    least = machine.row_multiple  # not of m either: it decides how a row is cut
    budget = machine.tile_bytes
    if machine.masked:  # a block is a pointer there: nothing has to stay
        lanes = lanes_per_tile(l, chunk or 4096, machine)
        return Tiling(rows_per_tile(m, rows or max(1, 4096 // lanes), machine), lanes, False)
    if residency != "stream":
        if chunk is None and least * l * (moving + temporary) <= budget:
            return Tiling(rows_per_tile(m, rows or _share(m, budget // (l * (moving + temporary))), machine), l, False)
        lanes = lanes_per_tile(l, chunk or 1024, machine)
        padded = pl.cdiv(l, lanes) * lanes
        fit = (budget - least * lanes * temporary) // (padded * moving)
        if fit >= least or residency == "row":
            return Tiling(rows_per_tile(m, rows or min(_share(m, fit), 16), machine), lanes, False)
    lanes = lanes_per_tile(l, chunk or min(4096, budget // (least * (moving + temporary))), machine)
    fit = budget // (lanes * (moving + temporary))
    return Tiling(rows_per_tile(m, rows or min(max(fit, 1), least), machine), lanes, True)


STEADY_ROWS = 48 * 64
CORES = 48  # tiles are made no larger than leaves one for every core


def _share(m: int, fit: int) -> int:
    return max(1, min(fit, pl.cdiv(m, CORES)))


@dataclass(frozen=True)
class Out:
    """An output: an array of the view's shape, or with `columns` so many values per row, side by side."""

    dtype: Any
    columns: int = 0


def run_rows(
    phases: Sequence[Phase], view: View, operands: Sequence[Array], outs: Sequence[Out], tile: Tiling, *, name: str,
    machine: Machine, columns: Callable[[Columns], Columns],
) -> list[Array]:  # fmt: skip
    """Run `phases` over the rows of `view`; outputs as `[A, M, L]` or `[A, M, columns]`.

    `operands` broadcast to [A, M, L]. Phases get the refs of operands, then of outputs that are no columns, as one
    list; `columns(results)` gives the values of the one output of columns, in order.
    """
    a, m, l = view.tile_shape
    blocks = pl.cdiv(m, tile.rows)
    chunks = pl.cdiv(l, tile.chunk)
    width = tile.chunk if tile.streamed else chunks * tile.chunk

    def split(refs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        arrays = list(refs[: len(operands)])
        results = list(refs[len(operands) : len(operands) + len(outs)])
        arrays += [r for r, o in zip(results, outs) if not o.columns]
        return arrays, [r for r, o in zip(results, outs) if o.columns], list(refs[len(operands) + len(outs) :])

    def write_columns(targets: Sequence[Any], done: Columns, rows: Array | None) -> None:
        for ref in targets:
            for i, value in enumerate(columns(done)):
                Chunk(machine, i, 1, None, rows, 1).write(ref, value)

    def within() -> Array | None:
        if not machine.masked or m % tile.rows == 0:
            return None
        return inside(pl.program_id(1) * tile.rows, tile.rows, m, 0)

    def resident(*refs: Any) -> None:
        arrays, targets, _ = split(refs)
        rows = within()
        done: Columns = ()
        for phase in phases:
            seen = done
            carry = fold(
                machine, l, tile.chunk, rows,
                lambda c, carry: phase.step(c, arrays, carry, seen),  # noqa: B023
                lambda c: phase.first(c, arrays, seen),  # noqa: B023
            )  # fmt: skip
            done = done + phase.end(arrays, carry, done)
        write_columns(targets, done, rows)

    def streamed(*refs: Any) -> None:
        arrays, targets, scratch = split(refs)
        p, c = pl.program_id(2), pl.program_id(3)
        most = max([ph.carried for ph in phases] + [1])
        carries, kept = scratch[:most], scratch[most:]
        known = 0
        for number, phase in enumerate(phases):
            first_kept = known

            def walk(phase=phase, number=number, first_kept=first_kept):
                def chunk(masked: bool) -> Chunk:
                    size = l - (chunks - 1) * tile.chunk if masked else tile.chunk
                    lanes = inside(0, tile.chunk, size, 1) if masked else None
                    return Chunk(machine, 0, tile.chunk, lanes, None, size)

                def so_far() -> Columns:
                    return tuple(r[...] for r in kept[:first_kept])

                def keep(carry: Columns) -> None:
                    for ref, value in zip(carries, carry):
                        ref[...] = value

                def begin(masked: bool = False) -> None:
                    keep(phase.first(chunk(masked), arrays, so_far()))

                def go_on(masked: bool) -> None:
                    carry = tuple(r[...] for r in carries[: phase.carried])
                    keep(phase.step(chunk(masked), arrays, carry, so_far()))

                tail = l % tile.chunk != 0
                pl.when(c == 0)(lambda: begin(tail and chunks == 1))
                if chunks > 1:
                    if tail:
                        pl.when((c > 0) & (c < chunks - 1))(lambda: go_on(False))
                        pl.when(c == chunks - 1)(lambda: go_on(True))
                    else:
                        pl.when(c > 0)(lambda: go_on(False))

                @pl.when(c == chunks - 1)
                def _():
                    carry = tuple(r[...] for r in carries[: phase.carried])
                    found = phase.end(arrays, carry, so_far())
                    for ref, value in zip(kept[first_kept:], found):
                        ref[...] = value
                    if number == len(phases) - 1:
                        write_columns(targets, so_far() + found, None)

            pl.when(p == number)(walk)
            known += phase.found

    def operand(t: Array) -> Operand:
        s = tuple(n != 1 for n in t.shape)
        if machine.steady and m == 1:
            s = (s[0], True, s[2])  # a lone row lies in a tile as high as any other
        block = (None, tile.rows if s[1] else 1, width if s[2] else 1)
        if tile.streamed:
            return Operand(t, block, lambda i, j, p, c: (i * s[0], j * s[1], c * s[2]))
        return Operand(t, block, lambda i, j: (i * s[0], j * s[1], 0))

    last = len(phases) - 1

    def out(o: Out) -> Operand:
        block = (None, tile.rows, o.columns or width)
        shape = (a, m, o.columns or l)
        if not tile.streamed:
            return output(shape, o.dtype, block, lambda i, j: (i, j, 0))
        # only the last phase writes: before it the block stays at the first chunk, so that nothing is copied out
        return output(shape, o.dtype, block, lambda i, j, p, c: (i, j, 0 if o.columns else c * lax.div(p, last or 1)))

    options: dict[str, Any] = {"entries": tile.rows * tile.chunk}
    if tile.streamed:
        wide = jnp.float32
        most, found = max([ph.carried for ph in phases] + [1]), sum(ph.found for ph in phases)
        options |= {
            "grid": (a, blocks, len(phases), chunks), "semantics": ("parallel", "parallel", "arbitrary", "arbitrary"),
            "scratch": [pltpu.VMEM((tile.rows, 1), wide) for _ in range(most + found)],
        }  # fmt: skip
    else:
        options |= {"grid": (a, blocks), "semantics": ("parallel", "parallel")}
    return launch(
        streamed if tile.streamed else resident, name, options.pop("grid"), [operand(t) for t in operands],
        [out(o) for o in outs], machine, **options,
    )  # fmt: skip
