"""The explicit front end: AI-Core programs written queue by queue, for what Pallas cannot say.

Names follow AscendC: queues with a depth, DataCopy (32 B units) and DataCopyPad (bytes), vector instructions,
SyncAll, atomic adds. `Builder.build` gives a `TileProgram`, which `simulate` takes in place of a function.

>>> b = Builder("add", grid=(64,))
>>> x = b.queue_in("x", (4096,), "float16", depth=2, array=(64 * 4096,))
>>> y = b.queue_in("y", (4096,), "float16", depth=2, array=(64 * 4096,))
>>> z = b.queue_out("z", (4096,), "float16", depth=2, array=(64 * 4096,))
>>> b.data_copy(x), b.data_copy(y), b.vector("Add", z, x, y), b.data_copy(z)
(None, None, None, None)
>>> b.build().steps
64
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from sim_npu.ir import BlockUse, Copy, CrossCore, Loop, Queue, Scratch, Stmt, TileProgram, VecOp, dtype_bytes

MAX_DEPTH = 8  # buffers per queue position, AscendC manual

# AscendC instruction -> (cost class, instructions)
INSTRUCTIONS: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Max", "Min", "Adds", "Muls", "Maxs", "Mins", "Abs", "Relu"), ("arith", 1)),
    **dict.fromkeys(("And", "Or", "Not", "Axpy", "MulAddDst"), ("arith", 1)),
    **dict.fromkeys(("Exp", "Ln", "Sqrt", "Div"), ("transcendental", 1)),
    # one approximate instruction each; exact forms are Sqrt and Div
    **dict.fromkeys(("Rsqrt", "Reciprocal"), ("arith", 1)),
    "Cast": ("cast", 1),
    "Compare": ("compare", 1),
    "Select": ("select", 1),
    "Duplicate": ("fill", 1),
    "DataCopy": ("move", 1),
    "Transpose": ("transpose", 1),
    **dict.fromkeys(("ReduceSum", "ReduceMax", "ReduceMin"), ("reduce", 1)),
    # of registers (950): a store, and the reduction of each register to one number, never two in a cycle
    **dict.fromkeys(("LoadAlign", "UpdateMask", "Move"), ("move", 1)),
    **dict.fromkeys(("StoreAlign", "Reduce"), ("single", 1)),
}


@dataclass(frozen=True)
class Tile:
    """A handle to a queue's current tile or to a buffer: name, shape, dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Builder:
    """Collects one program; every core runs the same steps of `grid`, dealt out along its parallel axes."""

    def __init__(self, name: str, *, grid: tuple[int, ...], parallel: tuple[bool, ...] | None = None) -> None:
        if not grid or any(g < 1 for g in grid):
            raise ValueError(f"`grid` must hold positive sizes; got {grid}.")
        self.name, self.grid = name, grid
        self.parallel = parallel if parallel is not None else (True,) * len(grid)
        if len(self.parallel) != len(grid):
            raise ValueError(f"`parallel` must have one entry per grid axis ({len(grid)}); got {len(self.parallel)}.")
        self._queues: dict[str, Queue] = {}
        self._arrays: list[BlockUse] = []
        self._scratch: list[Scratch] = []
        self._bodies: list[list[Stmt]] = [[]]

    def queue_in(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        *,
        depth: int = 1,
        array: tuple[int, ...] | None = None,
        back: tuple[int, ...] | None = None,
    ) -> Tile:
        """A queue from MTE2 to V with `depth` tiles; `array` is the shape of what it reads in global memory.

        `back` is the shape of what `copy_back` writes from its tiles, for kernels that compute in place.
        """
        tile = self._queue(name, "in", shape, dtype, depth, array)
        if back is not None:
            self._array(f"{name}_back", "out", back, dtype)
        return tile

    def queue_out(
        self, name: str, shape: tuple[int, ...], dtype: str, *, depth: int = 1, array: tuple[int, ...] | None = None
    ) -> Tile:
        """A queue from V to MTE3 with `depth` tiles."""
        return self._queue(name, "out", shape, dtype, depth, array)

    def _queue(
        self, name: str, role: str, shape: tuple[int, ...], dtype: str, depth: int, array: tuple[int, ...] | None
    ) -> Tile:
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"`depth` of queue {name} must be 1 to {MAX_DEPTH}, the hardware's buffers; got {depth}.")
        if name in self._queues:
            raise ValueError(f"`name` of a queue must be new; {name} exists.")
        self._queues[name] = Queue(name, role, shape, dtype, depth)
        if array is not None:
            self._array(f"{name}_gm", role, array, dtype)
        return Tile(name, shape, dtype)

    def _array(self, name: str, role: str, shape: tuple[int, ...], dtype: str) -> None:
        """Declare an array in global memory, so that its bytes are known."""
        self._arrays.append(BlockUse(name, role, shape, dtype, (1,) * len(shape), (0,) * len(shape), space="global"))

    def buffer(self, name: str, shape: tuple[int, ...], dtype: str) -> Tile:
        """A tile of unified buffer that lives through the program (TBuf)."""
        self._scratch.append(Scratch(name, shape, dtype))
        return Tile(name, shape, dtype)

    def data_copy(self, tile: Tile, *, bursts: int = 1, burst_bytes: int | None = None) -> None:
        """DataCopy between global memory and a queue's tile, in units of 32 B.

        Raises:
          ValueError: if a piece is not a multiple of 32 B, which the hardware would round down.
        """
        size = self._piece(tile, bursts, burst_bytes)
        if size % 32:
            raise ValueError(
                f"`burst_bytes` of a DataCopy must be a multiple of 32; got {size}, of which the hardware copies "
                f"{size // 32 * 32}. Use `data_copy_pad`."
            )
        self._bodies[-1].append(Copy(tile.name, self._role(tile), bursts, size, pad=False))

    def data_copy_pad(
        self, tile: Tile, *, bursts: int = 1, burst_bytes: int | None = None, more: bool = False, gap: int = 0
    ) -> None:
        """DataCopyPad: the same in units of one byte (absent on 310P), pieces `gap` bytes apart in global memory.

        With `more`, it adds a piece to the input tile that the copy before began to fill, and takes no buffer.

        Raises:
          ValueError: for `more` with a tile of an output queue.
        """
        size, role = self._piece(tile, bursts, burst_bytes), self._role(tile)
        if more and role != "in":
            raise ValueError(f"`more` is for tiles of input queues; {tile.name} is an output.")
        self._bodies[-1].append(Copy(tile.name, role, bursts, size, pad=True, more=more, gap=gap))

    def copy_back(self, tile: Tile, *, bursts: int = 1, burst_bytes: int | None = None, gap: int = 0) -> None:
        """DataCopyPad of an input queue's tile to global memory, after work in place; frees the tile when it ends.

        Raises:
          ValueError: for a tile of an output queue, which `data_copy_pad` copies.
        """
        if self._role(tile) != "in":
            raise ValueError(f"`tile` of a copy back must belong to an input queue; {tile.name} is an output.")
        size = self._piece(tile, bursts, burst_bytes)
        self._bodies[-1].append(Copy(tile.name, "out", bursts, size, pad=True, gap=gap))

    def atomic_add(self, tile: Tile, *, bursts: int = 1, burst_bytes: int | None = None) -> None:
        """A copy out that adds into global memory; the order of cores is not determined.

        Raises:
          ValueError: for a tile of an input queue.
        """
        if self._role(tile) != "out":
            raise ValueError(f"`tile` of an atomic add must belong to an output queue; {tile.name} is an input.")
        size = self._piece(tile, bursts, burst_bytes)
        self._bodies[-1].append(Copy(tile.name, "out", bursts, size, pad=True, atomic=True))

    def _role(self, tile: Tile) -> str:
        if tile.name not in self._queues:
            raise ValueError(f"`tile` must belong to a queue of this program; {tile.name} does not.")
        return self._queues[tile.name].role

    def _piece(self, tile: Tile, bursts: int, burst_bytes: int | None) -> int:
        whole = math.ceil(math.prod(tile.shape) * dtype_bytes(tile.dtype))
        size = whole // bursts if burst_bytes is None else burst_bytes
        if size * bursts > whole:
            raise ValueError(f"`burst_bytes` x `bursts` = {size * bursts} B exceeds tile {tile.name} of {whole} B.")
        return size

    def vector(
        self,
        instruction: str,
        out: Tile,
        *operands: Tile,
        axes: tuple[int, ...] = (),
        broadcast: str = "",
        dtype: str | None = None,
    ) -> None:
        """A vector instruction over whole tiles; more than 255 repeats become several.

        Args:
          instruction: AscendC name, a key of `INSTRUCTIONS`.
          out, operands: tiles.
          axes: reduced axes of a reduction.
          broadcast: "minor", "major" or "scalar" if an operand is repeated along the last axis, along leading axes, or
            is a single element.
          dtype: type computed in; the widest operand's by default.

        Raises:
          ValueError: for an instruction without a rule.
        """
        if instruction not in INSTRUCTIONS:
            raise ValueError(f"`instruction` must be one of {', '.join(INSTRUCTIONS)}; got {instruction!r}.")
        kind, steps = INSTRUCTIONS[instruction]
        shape = operands[0].shape if kind == "reduce" else out.shape
        wide = dtype or max((t.dtype for t in (*operands, out)), key=dtype_bytes)
        reads = tuple(t.name for t in operands)
        self._bodies[-1].append(
            VecOp(instruction, kind, shape, wide, out.name, out.shape, out.dtype, reads, axes, broadcast, steps)
        )

    def sync_all(self) -> None:
        """SyncAll: every core waits for all (in hardware, or through global memory on 310P)."""
        self._bodies[-1].append(CrossCore("sync"))

    def barrier(self) -> None:
        """PipeBarrier: this core's units wait for one another."""
        self._bodies[-1].append(CrossCore("barrier"))

    @contextlib.contextmanager
    def loop(self, count: int) -> Iterator[None]:
        """Repeat the statements inside `count` times.

        Raises:
          ValueError: for a negative count.
        """
        if count < 0:
            raise ValueError(f"`count` must not be negative; got {count}.")
        self._bodies.append([])
        yield
        body = self._bodies.pop()
        self._bodies[-1].append(Loop(count, tuple(body)))

    def build(self) -> TileProgram:
        """The program."""
        return TileProgram(
            self.name,
            self.grid,
            self.parallel,
            tuple(self._arrays),
            tuple(self._scratch),
            tuple(self._bodies[0]),
            tuple(self._queues.values()),
        )
