"""A computation on rows in phases, in two tilings: rows that stay in the buffer, and rows that are streamed.

A phase walks the chunks of a row with a carry of `[rows, 1]` arrays and ends with results for the phases after it.
Where a row stays, every phase is a loop over chunks that are already there; where it does not, phases and chunks are
axes of the grid, the carry lives in scratch, and every phase reads the row again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    """How rows are cut: `rows` per tile, `chunk` lanes at a time, `streamed` where a row does not stay.

    `others` are further tilings that fit, for a tuner to choose from.
    """

    rows: int
    chunk: int
    streamed: bool
    others: tuple[Tiling, ...] = ()


CORES = 48  # a tile is no larger than leaves one for every core
CHUNKS = (4096, 2048, 1024)
STREAMED = (2048, 4096, 1024)  # several rows of 2048 beat one of 4096 on the simulator


def tiling(
    shape: tuple[int, int, int], machine: Machine, *, moving: int, temporary: int, fixed: int = 0,
    rows: int | None = None, chunk: int | None = None, residency: str | None = None,
) -> Tiling:  # fmt: skip
    """What fits: whole rows with their temporaries, else resident rows in chunks, else streamed rows.

    Args:
      shape: (A, M, L).
      machine: where it runs.
      moving: bytes per element that stay for the row: operands and outputs of the full shape, twice.
      temporary: bytes per element of float32 values in use at once.
      fixed: bytes per lane that a tile holds once: operands of one row, twice.
      rows, chunk, residency: asked for, or None.
    """
    _, m, l = shape
    if machine.masked:  # a block is a pointer there: nothing has to stay
        lanes = lanes_per_tile(l, chunk or 4096, machine)
        return Tiling(rows_per_tile(m, rows or max(1, 4096 // lanes), machine), lanes, False)
    if rows is not None and chunk is None and residency == "row":
        return Tiling(rows_per_tile(m, rows, machine), l, False)
    cuts = _Cuts(m, l, machine, moving, temporary, fixed)
    chunks = [chunk] if chunk is not None else list(CHUNKS)
    found: list[Tiling] = []
    if residency != "stream":
        if chunk is None:
            found += cuts.whole()
        found += [t for c in chunks for t in cuts.resident(c, force=residency == "row")]
    if residency == "stream" or not found or (machine.tuner is not None and residency is None):
        found += [t for c in (chunks if chunk is not None else STREAMED) for t in cuts.streamed(c)]
    if not found:
        found = [Tiling(rows_per_tile(m, 1, machine), lanes_per_tile(l, min(chunks), machine), True)]
    if rows is not None:
        found = [replace(found[0], rows=rows_per_tile(m, rows, machine))]
    return replace(found[0], others=tuple(found[1:]))


@dataclass(frozen=True)
class _Cuts:
    """Tilings of rows of length l that fit a machine, the best guess of each kind first."""

    m: int
    l: int
    machine: Machine
    moving: int
    temporary: int
    fixed: int

    def _tilings(self, chunk: int, bytes_per_row: int, fixed: int, streamed: bool, most: int) -> list[Tiling]:
        least = rows_per_tile(self.m, 1, self.machine)
        fit = (self.machine.tile_bytes - fixed) // (bytes_per_row + self.machine.row_bytes)
        if fit < least:
            return []
        share = min(fit, max(1, pl.cdiv(self.m, CORES)), most)
        counts = dict.fromkeys(rows_per_tile(self.m, n, self.machine) for n in (share, share // 2, share // 4) if n)
        return [Tiling(n, chunk, streamed) for n in counts if n <= max(fit, least)]

    def _padded(self, n: int) -> int:
        return pl.cdiv(n, self.machine.lane_multiple) * self.machine.lane_multiple

    def whole(self) -> list[Tiling]:
        """A row and its temporaries at once."""
        width = self._padded(self.l)
        return self._tilings(self.l, width * (self.moving + self.temporary), width * self.fixed, False, 4096)

    def resident(self, chunk: int, force: bool) -> list[Tiling]:
        """A row stays, temporaries are of a chunk."""
        lanes = lanes_per_tile(self.l, chunk, self.machine)
        width = pl.cdiv(self.l, lanes) * lanes
        found = self._tilings(lanes, width * self.moving + lanes * self.temporary, width * self.fixed, False, 16)
        return found or ([Tiling(rows_per_tile(self.m, 1, self.machine), lanes, False)] if force else [])

    def streamed(self, chunk: int) -> list[Tiling]:
        """Chunks of a row come and go."""
        lanes = lanes_per_tile(self.l, chunk, self.machine)
        size = lanes * (self.moving + self.temporary)
        return self._tilings(lanes, size, lanes * self.fixed, True, max(1, 8192 // lanes))


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
    if machine.tuner is not None and tile.others:

        def build(choice: Tiling, *arrays: Array) -> list[Array]:
            untuned = machine.replace(tuner=None)
            return run_rows(phases, view, arrays, outs, choice, name=name, machine=untuned, columns=columns)

        tile = machine.tuner(name, operands, (tile, *tile.others), build)
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
