"""Which steps of a grid run side by side, and which part of each array every step works on.

An axis of the grid is parallel if the block written tells the index along it, for every output, and nothing else is
kept between steps (or the kernel says so itself). Steps along parallel axes are lanes, the others turns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sim_npu.arithmetic import Arithmetic
from sim_npu.crosscore import arrival_order
from sim_npu.evaluate import Evaluator
from sim_npu.ir import blocks_beyond
from sim_npu.pallas_adapter import BlockMapping, KernelCall
from sim_npu.precision import PrecisionPolicy
from sim_npu.values import Value, is_float


@dataclasses.dataclass(frozen=True)
class Steps:
    """The grid as lanes (parallel axes) times turns (the others), each in row-major order."""

    lanes: np.ndarray  # [L, axes]: grid indices, 0 on the other axes
    turns: np.ndarray  # [T, axes]

    @staticmethod
    def of(grid: tuple[int, ...], parallel: tuple[int, ...]) -> Steps:
        """The grid with these axes as lanes."""

        def indices(axes: Sequence[int]) -> np.ndarray:
            shape = [g if a in axes else 1 for a, g in enumerate(grid)]
            return np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), -1) if grid else np.zeros((1, 0), int)

        rest = tuple(a for a in range(len(grid)) if a not in parallel)
        return Steps(indices(parallel), indices(rest))


@dataclasses.dataclass(frozen=True)
class Operand:
    """How the blocks of one input or output lie over lanes and turns.

    Attributes:
      starts: `[L, T, axes]` first element of each block; None if it depends on prefetched scalars.
      lane_axes: array axes cut into one block per lane; elsewhere a block is sliced out at run time.
    """

    mapping: BlockMapping
    starts: np.ndarray | None
    lane_axes: tuple[int, ...]

    @property
    def block(self) -> tuple[int, ...]:
        return self.mapping.full_block_shape

    def blocks_along(self, axis: int) -> int:
        return -(-self.mapping.array_shape[axis] // self.block[axis])

    def lane_order(self) -> np.ndarray:
        """Number of each lane's block among all blocks of the lane axes."""
        assert self.starts is not None
        counts = [self.blocks_along(a) for a in self.lane_axes]
        index = [self.starts[:, 0, a] // self.block[a] for a in self.lane_axes]
        return np.ravel_multi_index(index, counts) if counts else np.zeros(1, int)

    def local_starts(self) -> np.ndarray | None:
        """`[L, T, axes]` first element of each block within its lane's part."""
        if self.starts is None:
            return None
        cut = np.isin(np.arange(self.starts.shape[-1]), self.lane_axes)
        return np.where(cut, 0, self.starts).astype(np.int32)

    def split(self, array: Any) -> Any:
        """`[L, ...]`: each lane's part, unwritten elements behind the array's end; without lane axes all of it."""
        if array.shape:
            array = _extended(array, [self._reach(a) for a in range(array.ndim)])
        if not self.lane_axes:
            return array
        shape, front, back = self._split_shape(array.shape)
        cut = array.reshape(shape).transpose(front + back)
        cut = cut.reshape((-1, *cut.shape[len(front) :]))
        order = self.lane_order()
        return cut if np.array_equal(order, np.arange(cut.shape[0])) else cut[order]

    def join(self, lanes: Any, before: Any) -> Any:
        """The array made of the lanes' parts; blocks nobody wrote are as in `before`."""
        if not self.lane_axes:
            return lanes[tuple(slice(0, n) for n in self.mapping.array_shape)]
        whole = [self._reach(a) for a in range(len(self.block))]
        shape, front, back = self._split_shape(whole)
        order = self.lane_order()
        count = math.prod(self.blocks_along(a) for a in self.lane_axes)
        if not np.array_equal(order, np.arange(count)):
            cut = _extended(before, whole).reshape(shape).transpose(front + back)
            lanes = cut.reshape((count, *cut.shape[len(front) :])).at[order].set(lanes)
        cut = lanes.reshape([shape[i] for i in front + back])
        array = cut.transpose(np.argsort(front + back)).reshape(whole)
        return array[tuple(slice(0, n) for n in self.mapping.array_shape)]

    def _reach(self, axis: int) -> int:
        """Elements along `axis` that blocks reach to."""
        length = self.mapping.array_shape[axis]
        if axis in self.lane_axes:
            return self.blocks_along(axis) * self.block[axis]
        if self.starts is None:
            return max(length, self.blocks_along(axis) * self.block[axis])
        return max(length, int(self.starts[..., axis].max()) + self.block[axis])

    def _split_shape(self, shape: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Shape with lane axes cut in two, the positions of block numbers, and the positions of the rest."""
        cut: list[int] = []
        front: list[int] = []
        back: list[int] = []
        for axis, length in enumerate(shape):
            if axis in self.lane_axes:
                front.append(len(cut))
                cut += [length // self.block[axis], self.block[axis]]
            else:
                cut.append(length)
            back.append(len(cut) - 1)
        return cut, front, back


def _extended(array: Any, lengths: Sequence[int]) -> Any:
    grow = [(0, n - have) for n, have in zip(lengths, array.shape)]
    if not any(g for _, g in grow):
        return array
    return jnp.pad(array, grow, constant_values=jnp.nan if is_float(array.dtype) else 0)


def layout(call: KernelCall, seed: int | None) -> tuple[Steps, list[Operand]]:
    """The most parallel axes for which every output is one block, or one row of blocks, per lane.

    With a seed, turns in an order drawn from it.
    """
    tables = [_starts(b, call) for b in call.blocks]
    parallel = _parallel_axes(call, tables)
    while True:
        steps = Steps.of(call.grid, parallel)
        if seed is not None:
            steps = Steps(steps.lanes, steps.turns[arrival_order(len(steps.turns), seed)])
        operands = [_operand(b, t, steps, call.grid) for b, t in zip(call.blocks, tables)]
        outputs = operands[len(call.inputs) :]
        mixed = any(_mixed_axes(o) or (len(steps.lanes) > 1 and not o.lane_axes) for o in outputs)
        if not mixed or not parallel:
            return steps, operands
        parallel = parallel[:-1]


def _starts(block: BlockMapping, call: KernelCall) -> np.ndarray | None:
    """`[*grid, axes]`: first element of the block at each step; None with prefetched scalars."""
    if call.num_prefetch:
        return None
    shape = (*call.grid, len(block.block_shape))
    if not block.block_shape:
        return np.zeros(shape, int)
    index = block.index_map
    with jax.ensure_compile_time_eval():
        steps = [jnp.asarray(a.ravel(), jnp.int32) for a in np.indices(call.grid)]

        def at(*ids: Any) -> list[Any]:
            evaluator = Evaluator(Arithmetic(PrecisionPolicy(), None), call.grid, ())
            found = evaluator.run(index.jaxpr, index.consts, [Value(i) for i in ids])
            return [jnp.asarray(v.x) for v in found if isinstance(v, Value)]

        rows = jax.vmap(at)(*steps) if steps else at()
        table = np.stack([np.asarray(r).astype(int) for r in rows], -1).reshape(shape)
    for axis, (tile, length) in enumerate(zip(block.full_block_shape, block.array_shape)):
        blocks_beyond(block.name, block.role, table[..., axis], axis, tile if block.unit == "block" else 1, length)
    return table * np.asarray(block.full_block_shape) if block.unit == "block" else table


def _parallel_axes(call: KernelCall, tables: Sequence[np.ndarray | None]) -> tuple[int, ...]:
    outputs = list(zip(call.outputs, tables[len(call.inputs) :]))
    if any(t is None or b.unit != "block" for b, t in outputs) or not outputs:
        return ()
    axes = []
    for axis, extent in enumerate(call.grid):
        said = call.semantics is not None and call.semantics[axis] == "parallel"
        if extent > 1 and (said or not call.scratch) and all(_tells(t, axis) for _, t in outputs):
            axes.append(axis)
    return tuple(axes)


def _tells(table: np.ndarray | None, axis: int) -> bool:
    """Whether the block determines the grid index along `axis`."""
    assert table is not None
    coordinate = np.indices(table.shape[:-1])[axis].ravel()
    blocks, number = np.unique(table.reshape(-1, table.shape[-1]), axis=0, return_inverse=True)
    lowest = np.full(len(blocks), table.shape[axis])
    highest = np.zeros(len(blocks), int)
    np.minimum.at(lowest, number.ravel(), coordinate)
    np.maximum.at(highest, number.ravel(), coordinate)
    return bool((lowest == highest).all())


def _operand(block: BlockMapping, table: np.ndarray | None, steps: Steps, grid: tuple[int, ...]) -> Operand:
    if table is None:
        return Operand(block, None, ())
    at = steps.lanes[:, None, :] + steps.turns[None, :, :]
    starts = table[tuple(np.moveaxis(at, -1, 0))] if grid else table.reshape(1, 1, -1)
    lane_axes = tuple(
        axis
        for axis in range(len(block.block_shape))
        if block.unit == "block"
        and (
            starts[..., axis] < block.array_shape[axis]
        ).all()  # a block behind the end is sliced out of what is not there
        and (starts[:, :1, axis] == starts[:, :, axis]).all()
        and (starts[..., axis] != starts[0, 0, axis]).any()
    )
    return Operand(block, starts, lane_axes)


def _mixed_axes(operand: Operand) -> bool:
    """Whether a block slides along some axis with lanes and turns alike."""
    if operand.starts is None:
        return False
    return any(
        (operand.starts[:1, :, a] != operand.starts[:, :, a]).any()
        for a in range(operand.starts.shape[-1])
        if a not in operand.lane_axes
    )
