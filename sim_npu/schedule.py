"""Which core runs which steps, what each step copies, and which branches it takes: all with NumPy, no loop over steps.

Steps of parallel axes are dealt to cores in contiguous runs, the first cores taking one more where they do not
divide. A core walks the sequential axes inside each of its parallel positions. A block is copied in when its index
differs from the step before on the same core, and copied out when it differs from the step after.
Steps that copy the same sizes and take the same branches are one *kind* of step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from sim_npu.chips import ChipSpec
from sim_npu.ir import BlockUse, Expr, TileProgram, When, blocks_beyond, dtype_bytes, evaluate, is_known, walk
from sim_npu.plan import TilePlan

MOST_STEPS = 1 << 26  # arrays of some hundred bytes per step


@dataclass(frozen=True)
class Transfer:
    """One copy of a step: queue (the block's name), contiguous pieces, bytes of all of them and between two."""

    queue: str
    bursts: int
    bytes: int
    gap: int = 0


@dataclass(frozen=True)
class StepKind:
    """What all steps of one kind do.

    Attributes:
      copies_in, copies_out: transfers before and after the body.
      opens: output blocks that start a new tile.
      closes: input blocks whose tile is not needed after this step.
      choose: branch taken per predicate.
    """

    copies_in: tuple[Transfer, ...]
    copies_out: tuple[Transfer, ...]
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    choose: dict[Expr, int]


@dataclass(frozen=True)
class Schedule:
    """The steps of the core with the most work, and totals of all cores.

    Attributes:
      cores: cores used.
      kinds: kinds of steps.
      codes: `[parallel positions, sequential steps]`, the kind of each step of that core.
      counts: steps of each kind on that core.
      bytes_in, bytes_out: global memory traffic of all cores.
      copies_in, copies_out: copy instructions of all cores.
      core_bytes_in, core_bytes_out: traffic of that core.
      beyond: steps, of all cores, at which an input block begins behind the end of its array.
    """

    cores: int
    kinds: tuple[StepKind, ...]
    codes: np.ndarray
    counts: np.ndarray
    bytes_in: int
    bytes_out: int
    copies_in: int
    copies_out: int
    core_bytes_in: int
    core_bytes_out: int
    beyond: dict[str, int] = field(default_factory=dict)


def schedule(program: TileProgram, chip: ChipSpec, plan: TilePlan) -> Schedule:
    """Deal the steps of `program` to cores and classify them.

    Raises:
      ValueError: for more than `MOST_STEPS` steps, or a block outside of its array.
    """
    steps = math.prod(program.grid)
    if steps > MOST_STEPS:
        raise ValueError(
            f"`fn`: the grid {program.grid} of kernel `{program.name}` has {steps:,} steps; at most {MOST_STEPS:,} are "
            "laid out. Use larger blocks."
        )
    parallel = [a for a, p in enumerate(program.parallel) if p]
    positions = math.prod(program.grid[a] for a in parallel)
    cores = max(1, min(chip.cores, plan.cores or chip.cores, positions))
    # Every core: totals. Then the first core, which has the most steps: its kinds.
    share, extra = divmod(positions, cores)
    first = share + (extra > 0)
    starts = np.arange(cores) * share + np.minimum(np.arange(cores), extra)
    everything = _Steps(program, np.arange(positions), starts)
    mine = _Steps(program, np.arange(first), np.zeros(1, dtype=np.int64))
    kinds, codes = mine.kinds()
    return Schedule(
        cores=cores,
        kinds=kinds,
        codes=codes.reshape(first, -1),
        counts=np.bincount(codes, minlength=len(kinds)),
        bytes_in=everything.total("in"),
        bytes_out=everything.total("out"),
        copies_in=everything.copies("in"),
        copies_out=everything.copies("out"),
        core_bytes_in=mine.total("in"),
        core_bytes_out=mine.total("out"),
        beyond=everything.beyond,
    )


class _Steps:
    """Copies and branches of the steps at `positions` (flat indices over the parallel axes)."""

    def __init__(self, program: TileProgram, positions: np.ndarray, starts: np.ndarray) -> None:
        self.program = program
        grid = program.grid
        parallel = [a for a, p in enumerate(program.parallel) if p]
        sequential = [a for a, p in enumerate(program.parallel) if not p]
        inner = math.prod(grid[a] for a in sequential)
        self.steps = len(positions) * inner
        axes: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(grid)
        if parallel:
            for a, index in zip(parallel, np.unravel_index(positions, [grid[a] for a in parallel])):
                axes[a] = np.repeat(index, inner)
        if sequential:
            for a, index in zip(sequential, np.unravel_index(np.arange(inner), [grid[a] for a in sequential])):
                axes[a] = np.tile(index, len(positions))
        self.axes = axes if grid else [np.zeros(1, dtype=np.int64)]
        self.begins = np.zeros(self.steps, dtype=bool)  # first step of a core
        self.begins[starts * inner] = True
        self.ends = np.roll(self.begins, -1)
        self.blocks = [b for b in program.blocks if b.space == "ub"]
        self.beyond: dict[str, int] = {}  # steps at which an input block lies behind its array's end
        self.moves = [self._moves(b) for b in self.blocks]

    def _moves(self, block: BlockUse) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(tile is new at this step, tile is last used at this step, pieces, bytes) per step."""
        new, last = self.begins.copy(), self.ends.copy()
        size = np.full(self.steps, dtype_bytes(block.dtype))
        extents = []
        for axis, (expression, tile, length) in enumerate(zip(block.index, block.block_shape, block.array_shape)):
            if is_known(expression):
                index = np.asarray(evaluate(expression, self.axes))
            else:  # unknown: assumed to move at every step, and to stay inside
                index = np.arange(self.steps) % max(1, length // tile)
            index = np.broadcast_to(index, (self.steps,))
            number, of = (index, tile) if block.unit == "block" else (index, 1)
            if steps := blocks_beyond(block.name, block.role, number, axis, of, length):
                self.beyond[block.name] = steps
            if self.steps > 1:
                changed = index[1:] != index[:-1]
                new[1:] |= changed
                last[:-1] |= changed
            start = index * tile if block.unit == "block" else index
            extent = np.clip(length - start, 0, tile)
            extents.append(extent)
            size = size * extent
        if not extents:
            return new, last, np.ones(self.steps, dtype=np.int64), size.astype(np.int64)
        # Rows that are whole in global memory and packed in the buffer are one contiguous piece.
        axis = len(extents) - 1
        if (extents[-1][0] * dtype_bytes(block.dtype)) % 32 == 0:
            while axis > 0 and block.block_shape[axis] >= block.array_shape[axis]:
                axis -= 1
        pieces = np.ones(self.steps, dtype=np.int64)
        for extent in extents[:axis]:
            pieces = pieces * extent
        return new, last, pieces, np.ceil(size).astype(np.int64)

    def _active(self, role: str) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(m[0] if role == "in" else m[1], m[3]) for b, m in zip(self.blocks, self.moves) if b.role == role]

    def total(self, role: str) -> int:
        return int(sum(size[active].sum() for active, size in self._active(role)))

    def copies(self, role: str) -> int:
        return int(sum(np.count_nonzero(active & (size > 0)) for active, size in self._active(role)))

    def kinds(self) -> tuple[tuple[StepKind, ...], np.ndarray]:
        predicates = [s.predicate for s in walk(self.program.body) if isinstance(s, When) and is_known(s.predicate)]
        predicates = list(dict.fromkeys(predicates))
        columns: list[np.ndarray] = []
        for new, last, pieces, size in self.moves:
            columns += [new, last, pieces, size]
        columns += [np.broadcast_to(evaluate(p, self.axes), (self.steps,)) for p in predicates]
        table = np.stack([c.astype(np.int64) for c in columns], axis=1) if columns else np.zeros((self.steps, 1))
        rows, codes = _unique_rows(table)
        kinds = []
        for row in rows:
            copies_in, copies_out, opens, closes = [], [], [], []
            for i, block in enumerate(self.blocks):
                starts, ends, bursts, moved = (int(v) for v in row[4 * i : 4 * i + 4])
                transfer = Transfer(block.name, bursts, moved, _gap(block) if bursts > 1 else 0)
                if block.role == "in":
                    if starts:
                        copies_in.append(transfer)
                    if ends:
                        closes.append(block.name)
                else:
                    if starts:
                        opens.append(block.name)
                    if ends:
                        copies_out.append(transfer)
            choose = {p: int(v) for p, v in zip(predicates, row[4 * len(self.blocks) :])}
            kinds.append(StepKind(tuple(copies_in), tuple(copies_out), tuple(opens), tuple(closes), choose))
        return tuple(kinds), codes


def _gap(block: BlockUse) -> int:
    """Bytes of global memory between two pieces of a block; pieces are what `_Steps._moves` counts."""
    tile, array, size = block.block_shape, block.array_shape, dtype_bytes(block.dtype)
    axis = len(tile) - 1
    if (min(tile[-1], array[-1]) * size) % 32 == 0:
        while axis > 0 and tile[axis] >= array[axis]:
            axis -= 1
    return max(0, math.ceil((math.prod(array[axis:]) - math.prod(tile[axis:])) * size))


def _unique_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows and, per row of `table`, its number; column by column, which is faster than np.unique(axis=0)."""
    codes = np.zeros(len(table), dtype=np.int64)
    for column in table.T:
        if (column == column[0]).all():
            continue
        _, value = np.unique(column, return_inverse=True)
        _, codes = np.unique(codes * (int(value.max()) + 1) + value.reshape(-1), return_inverse=True)
        codes = codes.reshape(-1)
    _, first = np.unique(codes, return_index=True)
    return table[first], codes
