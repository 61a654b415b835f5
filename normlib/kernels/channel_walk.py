"""A computation on whole channels in phases: like `normlib.kernels.phases`, but walked along rows.

Every phase walks the rows (or samples) of a tile with a carry of one value per channel. Where all entries of a channel
stay, phases are loops over what is there; where they do not, phases and chunks are axes of the grid, the carry lives in
scratch, and every phase reads the rows again. A Triton program loops over loads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from normlib.kernels.channel_sets import Sets
from normlib.kernels.machine import Machine
from normlib.kernels.phases import Columns, Phase
from normlib.kernels.tile import Operand, launch, load, output, store
from normlib.kernels.tiling import Tiling


@dataclass(frozen=True)
class Rows:
    """Some rows of a tile of channels.

    Attributes:
      machine: where the kernel runs.
      start: the first one's number among all rows; may be traced.
      size: how many, statically.
      count: how many of them are inside the array; may be traced.
      at: where they lie in the block; None for all of it.
      masks: of each axis of the tile, which entries are inside the array, bool of the tile's rank; None for all.
    """

    machine: Machine
    start: Any
    size: int
    count: Any
    at: Any
    masks: tuple[Array | None, ...]

    def read(self, ref: Any) -> Array:
        """These rows of `ref`, in its dtype: anything beyond the array, and 0 where loads are masked."""
        return load(self.machine, ref, *self._at(ref))

    def write(self, ref: Any, value: Array) -> None:
        """Store `value` in these rows of `ref`, rounded to its dtype."""
        store(self.machine, ref, *self._at(ref), jnp.broadcast_to(value, self._shape(ref)))

    def clean(self, value: Array) -> Array:
        """`value`, of the tile's shape, with 0 beyond the array."""
        inside = self._inside(value.shape)
        return value if inside is None else jnp.where(inside, value, jnp.zeros((), value.dtype))

    def _shape(self, ref: Any) -> tuple[int, ...]:
        return (ref.shape[0] if ref.shape[0] == 1 or self.at is None else self.size, *ref.shape[1:])

    def _at(self, ref: Any) -> tuple[Any, Array | None]:
        whole = ref.shape[0] == 1 or self.at is None
        rows = slice(None) if whole else pl.ds(self.at, self.size)
        return (rows, *(slice(None) for _ in ref.shape[1:])), self._inside(self._shape(ref))

    def _inside(self, shape: tuple[int, ...]) -> Array | None:
        found = None
        for side, mask in zip(shape, self.masks):
            if mask is not None and side != 1:
                found = mask if found is None else found & mask
        return None if found is None else jnp.broadcast_to(found, shape)


def run_channels(
    phases: Sequence[Phase], sets: Sets, operands: Sequence[Array], outs: Sequence[Any], tile: Tiling, *, name: str,
    machine: Machine, number: int, columns: Callable[[Columns], Columns],
) -> tuple[list[Array], list[Array]]:  # fmt: skip
    """Run `phases` over whole channels: (outputs of the view's shape in dtypes `outs`, `number` values per channel).

    `operands` broadcast to the view's shape; `columns(results)` gives the values, in float32, `[A, 1, C]` or
    `[1, C, 1]`.
    """
    run = _Channels(phases, sets, operands, outs, tile, machine, number, columns)
    grid: tuple[int, ...] = (run.a, pl.cdiv(run.c, tile.chunk))
    semantics: tuple[str, ...] = ("parallel", "parallel")
    scratch: list[Any] = []
    if tile.streamed:
        grid, semantics = (*grid, len(phases), run.turns), (*semantics, "arbitrary", "arbitrary")
        scratch = run.scratch
    *found, values = launch(
        run.streamed if tile.streamed else run.kept, name, grid, [run.operand(t) for t in operands],
        [run.out(d) for d in outs] + [run.values()], machine, semantics=semantics, scratch=scratch,
        entries=tile.rows * tile.chunk * run.width, columns=not sets.spread,
    )  # fmt: skip
    if sets.spread:
        return found, [values[:, :, i : i + 1] for i in range(number)]
    return found, [values[:, i : i + 1] for i in range(number)]


@dataclass(frozen=True)
class _Guarded:
    """A ref of values per channel, of which none beyond the array are read."""

    rows: Rows
    ref: Any

    def __getitem__(self, index: Any) -> Array:
        assert index is Ellipsis
        return self.rows.read(self.ref)


class _Channels:
    """One call of `run_channels`."""

    def __init__(self, phases, sets, operands, outs, tile, machine, number, columns):
        self.phases, self.sets, self.operands, self.outs = phases, sets, operands, outs
        self.tile, self.machine, self.number, self.columns = tile, machine, number, columns
        self.a, self.m, self.c, self.r = sets.sides
        self.turns = pl.cdiv(self.m, tile.rows)
        self.width = pl.next_power_of_2(self.r) if machine.power_of_two else self.r
        self.dtype = jnp.float64 if any(t.dtype == jnp.float64 for t in operands) else jnp.float32
        self.most = max(phase.carried for phase in phases)

    @property
    def height(self) -> int:
        """Rows of a block."""
        if self.tile.streamed:
            return self.tile.rows
        return self.turns * self.tile.rows if self.machine.masked else self.m

    # What a kernel sees of its tile

    def _mask(self, axis: int, first: Any, size: int, limit: int) -> Array:
        shape = [1, 1, 1] if self.sets.spread else [1, 1]
        shape[axis] = size
        return first + lax.broadcasted_iota(jnp.int32, shape, axis) < limit

    def sides(self) -> tuple[Array | None, ...]:
        """Masks of the axes behind the rows: channels, and their space."""
        if not self.machine.masked:
            return (None, None) if self.sets.spread else (None,)
        first = pl.program_id(1) * self.tile.chunk
        channels = self._mask(1, first, self.tile.chunk, self.c) if self.c % self.tile.chunk else None
        if not self.sets.spread:
            return (channels,)
        return channels, self._mask(2, 0, self.width, self.r) if self.width != self.r else None

    def rows(self, sides, start: Any, size: int, at: Any, *, masked: bool) -> Rows:
        """`size` rows from `start` on."""
        mask = self._mask(0, start, size, self.m) if masked else None
        count = jnp.clip(self.m - start, 0, size) if masked else size
        return Rows(self.machine, start, size, count, at, (mask, *sides))

    def store(self, targets: Any, done: Columns, sides) -> None:
        """The values per channel."""
        for i, value in enumerate(self.columns(done)):
            at = (slice(None), slice(None), pl.ds(i, 1)) if self.sets.spread else (pl.ds(i, 1), slice(None))
            store(self.machine, targets, at, sides[0], value)

    def kept(self, *refs: Any) -> None:
        """The kernel of channels that stay, or that a program loads in a loop."""
        arrays, targets, sides = refs[:-1], refs[-1], self.sides()
        done: Columns = ()
        for phase in self.phases:
            done = done + phase.end(self._guarded(arrays, sides), self._walked(phase, arrays, done, sides), done)
        self.store(targets, done, sides)

    def _guarded(self, arrays: Sequence[Any], sides) -> Sequence[Any]:
        """Refs whose values per channel are read as a whole: where the machine masks, 0 beyond the array."""
        if not self.machine.masked:
            return arrays
        row = self.rows(sides, 0, 1, None, masked=False)
        return [_Guarded(row, ref) for ref in arrays]

    def _walked(self, phase: Phase, arrays: Any, done: Columns, sides) -> Columns:
        size, (full, tail) = self.tile.rows, divmod(self.m, self.tile.rows)
        masked = self.machine.masked and bool(tail)
        full += masked  # a masked machine walks a tail like the rest
        whole = self.tile.rows == self.m and not self.machine.masked
        carry = phase.first(self.rows(sides, 0, size, None if whole else 0, masked=masked and full == 1), arrays, done)
        if full > 1:
            carry = lax.fori_loop(
                1, full,
                lambda i, c: phase.step(self.rows(sides, i * size, size, i * size, masked=masked), arrays, c, done),
                carry,
            )  # fmt: skip
        if tail and not self.machine.masked:
            carry = phase.step(self.rows(sides, full * size, tail, full * size, masked=False), arrays, carry, done)
        return carry

    def streamed(self, *refs: Any) -> None:
        """The kernel of rows that are read once per phase."""
        end = len(self.operands) + len(self.outs)
        arrays, targets, scratch = refs[:end], refs[end], refs[end + 1 :]
        carries, kept = scratch[: self.most], scratch[self.most :]
        here, turn = pl.program_id(2), pl.program_id(3)  # not known inside a branch
        sides = self.sides()
        known = 0
        for number, phase in enumerate(self.phases):
            written = targets if phase is self.phases[-1] else None
            step = functools.partial(self._step, phase, turn, arrays, carries, kept, known, sides, written)
            pl.when(here == number)(step)
            known += phase.found

    def _step(self, phase: Phase, turn, arrays, carries, kept, known: int, sides, targets) -> None:
        size, tail = self.tile.rows, self.m % self.tile.rows
        before = tuple(ref[...] for ref in kept[:known])

        def keep(carry):
            for ref, value in zip(carries, carry):
                ref[...] = jnp.broadcast_to(value, ref.shape)

        def begin(masked):
            keep(phase.first(self.rows(sides, 0, size, None, masked=masked), arrays, before))

        def go_on(masked):
            carry = tuple(ref[...] for ref in carries[: phase.carried])
            keep(phase.step(self.rows(sides, turn * size, size, None, masked=masked), arrays, carry, before))

        def end():
            found = phase.end(arrays, tuple(ref[...] for ref in carries[: phase.carried]), before)
            for ref, value in zip(kept[known:], found):
                ref[...] = jnp.broadcast_to(value, ref.shape)
            if targets is not None:
                self.store(targets, before + found, sides)

        last = self.turns - 1
        pl.when(turn == 0)(lambda: begin(bool(tail) and not last))
        if last and tail:
            pl.when((turn > 0) & (turn < last))(lambda: go_on(False))
            pl.when(turn == last)(lambda: go_on(True))
        elif last:
            pl.when(turn > 0)(lambda: go_on(False))
        pl.when(turn == last)(end)

    @property
    def scratch(self) -> list[Any]:
        """The carry, then the results of all phases."""
        shape = (1, self.tile.chunk, 1) if self.sets.spread else (1, self.tile.chunk)
        return [pltpu.VMEM(shape, self.dtype) for _ in range(self.most + sum(p.found for p in self.phases))]

    # Blocks

    def _block(self, sides: tuple[bool, ...]) -> tuple[int | None, ...]:
        rows, channels = self.height if sides[0] else 1, self.tile.chunk if sides[1] else 1
        return (rows, channels, self.width if sides[2] else 1) if self.sets.spread else (None, rows, channels)

    def operand(self, t: Array) -> Operand:
        """An operand with its block."""
        outer = t.shape[0] != 1
        sides = tuple(n != 1 for n in (t.shape if self.sets.spread else (*t.shape[1:], 1)))

        def index(*steps):
            i, j, *walk = steps
            rows = walk[1] if walk and sides[0] else 0
            channels = j if sides[1] else 0
            return (rows, channels, 0) if self.sets.spread else (i if outer else 0, rows, channels)

        return Operand(t, self._block(sides), index)

    def out(self, dtype: Any) -> Operand:
        """An output of the view's shape."""
        last = max(len(self.phases) - 1, 1)

        def index(*steps):
            i, j, *walk = steps
            # only the last phase writes: before it the block stays at the first chunk, so nothing is copied out
            rows = walk[1] * lax.div(walk[0], last) if walk else 0
            return (rows, j, 0) if self.sets.spread else (i, rows, j)

        return output(self.sets.view.tile_shape, dtype, self._block((True, True, True)), index)

    def values(self) -> Operand:
        """The output of values per channel."""
        n, chunk = self.number, self.tile.chunk
        if self.sets.spread:
            return output((1, self.c, n), self.dtype, (1, chunk, n), lambda i, j, *_: (0, j, 0))
        return output((self.a, n, self.c), self.dtype, (None, n, chunk), lambda i, j, *_: (i, 0, j))
