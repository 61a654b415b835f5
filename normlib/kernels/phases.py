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
from normlib.kernels.tile import Band, Chunk, Operand, fold, guarded, inside, launch, output
from normlib.kernels.tiling import CORES, Tiling, titled
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
      flat_carry, flat: whether the carry, and how many of the new results, the first ones, are `[1, 1]`.
    """

    first: Callable[[Any, Any, Columns], Columns]
    step: Callable[[Any, Any, Columns, Columns], Columns]
    end: Callable[[Any, Columns, Columns], Columns]
    carried: int
    found: int
    flat_carry: bool = False
    flat: int = 0


@dataclass(frozen=True)
class Out:
    """An output: an array of the view's shape, or with `columns` so many values per row, side by side.

    With `summed` what `Chunk.add` collects, `[A, parts, 1, L]`: sums over the rows of each part. Columns that are
    `single` are one for all rows, `[A, 1, columns]`.
    """

    dtype: Any
    columns: int = 0
    summed: bool = False
    single: bool = False


def run_rows(
    phases: Sequence[Phase], view: View, operands: Sequence[Array], outs: Sequence[Out], tile: Tiling, *, name: str,
    machine: Machine, columns: Callable[[Columns], Columns],
) -> list[Array]:  # fmt: skip
    """Run `phases` over the rows of `view`; outputs as `[A, M, L]`, `[A, M, columns]` or `[A, parts, 1, L]`.

    `operands` broadcast to [A, M, L], or repeat along A (`View.array(periodic=True)`). Phases get the refs of operands,
    then of outputs that are no columns, as one list; `columns(results)` gives the values of the one output of columns,
    in order.
    """
    if machine.tuner is not None and tile.others:

        def build(choice: Tiling, *arrays: Array) -> list[Array]:
            untuned = machine.replace(tuner=None)
            return run_rows(phases, view, arrays, outs, choice, name=name, machine=untuned, columns=columns)

        written = [o.dtype for o in outs if not o.columns and not o.summed]
        title = titled(name, operands[0].dtype, written, sum(o.summed for o in outs))
        tile = machine.tuner(title, operands, (tile, *tile.others), build)
    run = _Rows(phases, view, operands, outs, tile, machine, columns)
    options: dict[str, Any] = {"entries": tile.rows * tile.chunk}
    grid: tuple[int, ...] = (run.a, run.parts, run.turns)
    semantics: tuple[str, ...] = ("parallel", "parallel", "arbitrary")
    if not run.summed or not machine.sequential:
        grid, semantics = (run.a, run.parts), ("parallel", "parallel")
    if tile.streamed:
        grid, semantics = (*grid, len(phases), run.chunks), (*semantics, "arbitrary", "arbitrary")
        options["scratch"] = run.scratch
    kernel = run.resident
    if tile.streamed:
        kernel = run.streamed
    elif run.summed and not machine.sequential:
        kernel = run.walked
    return launch(
        kernel, name, grid, [run.operand(t) for t in operands], [run.out(o) for o in outs], machine,
        semantics=semantics, **options,
    )  # fmt: skip


class _Rows:
    """One call of `run_rows`."""

    def __init__(self, phases, view, operands, outs, tile, machine, columns):
        self.phases, self.outs, self.tile, self.machine, self.columns = phases, outs, tile, machine, columns
        self.operands = operands
        self.a, self.m, self.l = view.tile_shape
        self.blocks, self.chunks = pl.cdiv(self.m, tile.rows), pl.cdiv(self.l, tile.chunk)
        self.width = tile.chunk if tile.streamed else self.chunks * tile.chunk
        self.summed = any(o.summed for o in outs)
        most = CORES if machine.sequential else machine.parts
        self.turns = pl.cdiv(self.blocks, min(most, self.blocks)) if self.summed else 1
        self.parts = pl.cdiv(self.blocks, self.turns)
        self.most = max([phase.carried for phase in phases] + [1])
        # where steps run in order, tiles of a part are steps of the grid; elsewhere a program walks them
        self.walk = 1 if machine.sequential else self.turns

    def split(self, refs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """(operands and outputs that are no columns, columns and whether they are single, scratch)."""
        given, end = len(self.operands), len(self.operands) + len(self.outs)
        results = list(zip(refs[given:end], self.outs))
        arrays = [*refs[:given], *(r for r, o in results if not o.columns)]
        return arrays, [(r, o.single) for r, o in results if o.columns], list(refs[end:])

    def write_columns(self, targets: Sequence[Any], done: Columns, rows: Array | None) -> None:
        """Store the columns."""
        for ref, single in targets:
            for i, value in enumerate(self.columns(done)):
                Chunk(self.machine, i, 1, None, None if single else rows, 1).write(ref, value)

    def resident(self, *refs: Any) -> None:
        """The kernel of rows that stay."""
        arrays, targets, _ = self.split(refs)
        tile, machine = self.tile, self.machine
        step = pl.program_id(1) * self.turns + pl.program_id(2) if self.summed else pl.program_id(1)
        whole = self.m == self.parts * self.turns * tile.rows if self.summed else self.m % tile.rows == 0
        real = None if whole else inside(step * tile.rows, tile.rows, self.m, 0)
        rows = real if machine.masked else None
        if self.summed:

            @pl.when(pl.program_id(2) == 0)
            def _():
                for ref, out in zip(refs[len(self.operands) :], self.outs):
                    if out.summed:
                        ref[...] = jnp.zeros(ref.shape, ref.dtype)

        done: Columns = ()
        for phase in self.phases:
            seen = done
            carry = fold(
                machine, self.l, tile.chunk, rows,
                lambda c, carry: phase.step(c, arrays, carry, seen),  # noqa: B023
                lambda c: phase.first(c, arrays, seen), real,  # noqa: B023
            )  # fmt: skip
            done = done + phase.end(guarded(arrays, machine, rows), carry, done)
        self.write_columns(targets, done, rows)

    def walked(self, *refs: Any) -> None:
        """The kernel of rows that stay where programs run at once: sums over its rows stay with a program."""
        given, tile, machine = len(self.operands), self.tile, self.machine
        first = pl.program_id(1) * self.turns * tile.rows
        lanes = None if self.l == tile.chunk else inside(0, tile.chunk, self.l, 1)
        exact = self.m == self.parts * self.turns * tile.rows

        def turn(i: Any, carry: Columns) -> Columns:
            real = None if exact else inside(first + i * tile.rows, tile.rows, self.m, 0)
            bands = [Band(ref, i * tile.rows, tile.rows) if ref.shape[0] != 1 else ref for ref in refs]
            arrays, targets, _ = self.split(bands)
            part = Chunk(machine, 0, tile.chunk, lanes, real, self.l, real=real, kept=[])
            done: Columns = ()
            for phase in self.phases:
                done = done + phase.end(guarded(arrays, machine, real), phase.first(part, arrays, done), done)
            self.write_columns(targets, done, real)
            return tuple(a + b for a, b in zip(carry, part.kept or ()))

        into = [ref for ref, out in zip(refs[given:], self.outs) if out.summed]
        # tiles are added entry by entry and over their rows once, at the end: that takes an exchange between threads
        zero = tuple(jnp.zeros((tile.rows, tile.chunk), ref.dtype) for ref in into)
        for ref, value in zip(into, lax.fori_loop(0, self.turns, turn, zero)):
            Chunk(machine, 0, tile.chunk, lanes, None, self.l).write(ref, jnp.sum(value, 0, keepdims=True))

    def streamed(self, *refs: Any) -> None:
        """The kernel of rows that are read once per phase."""
        arrays, targets, scratch = self.split(refs)
        carries, kept = scratch[: self.most], scratch[self.most :]
        known = 0
        here, c = pl.program_id(2), pl.program_id(3)  # not known inside a branch
        for number, phase in enumerate(self.phases):
            last = number == len(self.phases) - 1
            walk = _Walk(self, c, phase, arrays, targets, carries, kept[:known], kept[known:], last)
            pl.when(here == number)(walk)
            known += phase.found

    @property
    def scratch(self) -> list[Any]:
        """Of streamed rows: the carry, then the results of all phases."""
        carries = [1 if self.phases[0].flat_carry else self.tile.rows] * self.most
        kept = [1 if i < phase.flat else self.tile.rows for phase in self.phases for i in range(phase.found)]
        return [pltpu.VMEM((rows, 1), jnp.float32) for rows in carries + kept]

    def block(self, i, j, *rest):
        """(outer index, block of rows) at a grid step."""
        if not self.summed or self.walk == self.turns:
            return i, j
        # the last part may have fewer blocks than turns: it stays at the last block, whose rows count once
        at = j * self.turns + rest[0]
        return i, at if self.parts * self.turns == self.blocks else jnp.minimum(at, self.blocks - 1)

    def operand(self, t: Array) -> Operand:
        """An operand with its block."""
        period, *s = t.shape[0], t.shape[1] != 1, t.shape[2] != 1
        if self.machine.steady and self.m == 1:
            s[0] = True  # a lone row lies in a tile as high as any other
        block = (None, self.tile.rows * self.walk if s[0] else 1, self.width if s[1] else 1)

        def index(*steps):
            i, j = self.block(*steps)
            i = 0 if period == 1 else i if period == self.a else lax.rem(i, period)
            return i, j if s[0] else 0, steps[3] if self.tile.streamed and s[1] else 0

        return Operand(t, block, index)

    def out(self, o: Out) -> Operand:
        """An output with its block."""
        if o.summed:
            shape = (self.a, self.parts, 1, self.l)
            return output(shape, o.dtype, (None, None, 1, self.width), lambda i, p, *t: (i, p, 0, 0))
        block = (None, 1 if o.single else self.tile.rows * self.walk, o.columns or self.width)
        whole = (self.a, 1 if o.single else self.m, o.columns or self.l)
        last = len(self.phases) - 1

        def index(*steps):
            i, j = self.block(*steps)
            if not self.tile.streamed:
                return i, j, 0
            # only the last phase writes: before it the block stays at the first chunk, so nothing is copied out
            return i, j, 0 if o.columns else steps[3] * lax.div(steps[2], last or 1)

        return output(whole, o.dtype, block, index)


class _Walk:
    """One phase of streamed rows: what happens at each of its chunks."""

    def __init__(self, run: _Rows, c, phase: Phase, arrays, targets, carries, known, found, last: bool):
        self.c, self.run, self.phase, self.arrays, self.targets = c, run, phase, arrays, targets
        self.carries, self.known, self.found, self.last = carries, known, found, last

    def __call__(self) -> None:
        c, chunks = self.c, self.run.chunks
        tail = self.run.l % self.run.tile.chunk != 0
        pl.when(c == 0)(lambda: self.begin(tail and chunks == 1))
        if chunks > 1 and tail:
            pl.when((c > 0) & (c < chunks - 1))(lambda: self.go_on(False))
            pl.when(c == chunks - 1)(lambda: self.go_on(True))
        elif chunks > 1:
            pl.when(c > 0)(lambda: self.go_on(False))
        pl.when(c == chunks - 1)(self.end)

    def chunk(self, masked: bool) -> Chunk:
        """The chunk of this step, the last one `masked`."""
        run = self.run
        size = run.l - (run.chunks - 1) * run.tile.chunk if masked else run.tile.chunk
        lanes = inside(0, run.tile.chunk, size, 1) if masked else None
        return Chunk(run.machine, 0, run.tile.chunk, lanes, None, size)

    def so_far(self) -> Columns:
        """Results of earlier phases."""
        return tuple(r[...] for r in self.known)

    def carry(self) -> Columns:
        """What earlier chunks left."""
        return tuple(r[...] for r in self.carries[: self.phase.carried])

    def keep(self, carry: Columns) -> None:
        """Leave a carry for the next chunk."""
        for ref, value in zip(self.carries, carry):
            ref[...] = value

    def begin(self, masked: bool) -> None:
        """The first chunk."""
        self.keep(self.phase.first(self.chunk(masked), self.arrays, self.so_far()))

    def go_on(self, masked: bool) -> None:
        """A later chunk."""
        carry = self.carry()
        self.keep(self.phase.step(self.chunk(masked), self.arrays, carry, self.so_far()))

    def end(self) -> None:
        """Behind the last chunk."""
        found = self.phase.end(self.arrays, self.carry(), self.so_far())
        for ref, value in zip(self.found, found):
            ref[...] = jnp.broadcast_to(value, ref.shape)
        if self.last:
            self.run.write_columns(self.targets, self.so_far() + found, None)
