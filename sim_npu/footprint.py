"""What lives in the unified buffer: blocks times queue depth, scratch, and slots for temporaries.

Temporaries are placed by liveness. A slot is free once its value has been read for the last time; with
`in_place` an element-wise result may take the slot of an operand that dies in the same instruction. Slots are
static, as in a real kernel: a slot is as large as its largest tenant, and the sum of all slots is reserved.

Tiles start on 32 B, and with `bank_pad` every second one is moved by half a bank row, so that two operands of one
instruction seldom lie in the same bank group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sim_npu.chips import ChipSpec
from sim_npu.ir import BlockUse, CubeOp, Loop, Stmt, TileProgram, VecOp, When, tile_bytes
from sim_npu.plan import TilePlan

_IN_PLACE = {"arith", "transcendental", "cast", "select", "scalar", "unknown"}


class CapacityError(ValueError):
    """A plan does not fit the unified buffer; the text names the biggest tenants and a plan that fits."""


@dataclass(frozen=True)
class Tenant:
    """A reserved piece of the unified buffer: `copies` tiles of `bytes` each from `address`; `holds` names values."""

    name: str
    kind: str
    bytes: int
    copies: int
    address: int
    holds: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of all copies."""
        return self.bytes * self.copies


@dataclass(frozen=True)
class UbMap:
    """Where everything lies in one core's unified buffer.

    Attributes:
      capacity: bytes of the buffer.
      tenants: in order of address.
      slots: slot of each temporary, by name.
    """

    capacity: int
    tenants: tuple[Tenant, ...]
    slots: dict[str, str]

    @property
    def used(self) -> int:
        """Bytes up to the end of the last tenant."""
        return max((t.address + t.total for t in self.tenants), default=0)

    @property
    def fits(self) -> bool:
        """Whether everything lies inside the buffer."""
        return self.used <= self.capacity

    def biggest(self, n: int = 3) -> tuple[Tenant, ...]:
        """The `n` largest tenants."""
        return tuple(sorted(self.tenants, key=lambda t: -t.total)[:n])

    def tenant(self, value: str) -> Tenant | None:
        """The piece that holds a value, or None for one that is not in the buffer."""
        wanted = self.slots.get(value, value)
        return next((t for t in self.tenants if t.name == wanted), None)

    def complaint(self) -> str:
        """What is too big, in one sentence."""
        names = ", ".join(f"{t.name} ({t.kind}, {t.copies} x {t.bytes:,} B)" for t in self.biggest())
        return f"needs {self.used:,} B of {self.capacity:,} B unified buffer; the biggest tenants are {names}"


@dataclass
class _Value:
    name: str
    bytes: int
    start: int
    end: int
    in_place: bool


def ub_map(program: TileProgram, chip: ChipSpec, plan: TilePlan) -> UbMap:
    """The unified buffer of `program` under `plan`; check `.fits`."""
    pieces: list[tuple[str, str, int, int, tuple[str, ...]]] = []
    depths = queue_depths(program, chip, plan)
    for block in program.blocks:
        if block.space == "ub":
            size = tile_bytes(block.block_shape, block.dtype)
            pieces.append((block.name, block.role, size, depths.get(block.name, 1), ()))
    for queue in program.queues:
        pieces.append((queue.name, f"queue {queue.role}", tile_bytes(queue.shape, queue.dtype), queue.depth, ()))
    for scratch in program.scratch:
        pieces.append((scratch.name, "scratch", tile_bytes(scratch.shape, scratch.dtype), 1, ()))
    slots, sizes, holds = _place(temporaries(program), plan.in_place)
    pieces += [(f"slot{i}", "temporary", size, 1, tuple(names)) for i, (size, names) in enumerate(zip(sizes, holds))]
    work = 0 if program.queues else reduction_work(program)  # a builder program declares all its buffers
    if work:
        pieces.append(("reduce_work", "temporary", work, 1, ()))
    tenants, address = [], 0
    row = 32 * chip.ub_bank_groups  # bytes after which bank groups repeat
    for i, (name, kind, size, copies, names) in enumerate(pieces):
        if plan.bank_pad and size >= row:
            address += (row // 2 * (i % 2) - address) % row
        tenants.append(Tenant(name, kind, size, copies, address, names))
        address += size * copies
    return UbMap(chip.ub_bytes, tuple(tenants), {v: f"slot{i}" for v, i in slots.items()})


def queue_depths(program: TileProgram, chip: ChipSpec, plan: TilePlan) -> dict[str, int]:
    """Buffers of each moving block's queue: the plan's depth, within the buffers a queue position has.

    A position (all inputs, or all outputs) has `max_queue_depth` buffers in hardware, and a pair of units `event_ids`
    flags to hand them over; beyond, the smallest tiles give theirs up first, since a small copy hides least.
    """
    depths: dict[str, int] = {}
    for role in ("in", "out"):
        mine = [b for b in program.blocks if b.role == role and b.space == "ub" and moves(b, program.grid)]
        mine.sort(key=lambda b: tile_bytes(b.block_shape, b.dtype))
        depth = dict.fromkeys((b.name for b in mine), plan.queue_depth)
        limit = min(chip.max_queue_depth, chip.event_ids)
        while sum(depth.values()) > limit and max(depth.values()) > 1:
            name = next(n for n, d in depth.items() if d > 1)
            depth[name] -= 1
        depths |= depth
    return depths | {q.name: q.depth for q in program.queues}


def clipped(depths: dict[str, int], program: TileProgram, chip: ChipSpec, plan: TilePlan) -> str:
    """What to say of blocks that get fewer buffers than the plan wants; empty if none does."""
    wanted = plan.queue_depth
    fewer = [f"{b.name} has {depths[b.name]}" for b in program.blocks if depths.get(b.name, wanted) < wanted]
    limit = min(chip.max_queue_depth, chip.event_ids)
    return f"Queue depth {wanted} is more than a position's {limit} buffers allow: {', '.join(fewer)}." if fewer else ""


def moves(block: BlockUse, grid: Sequence[int]) -> bool:
    """Whether the block's index changes along a grid axis of more than one step."""
    return any(grid[a] > 1 for a in block.axes) or any(e == ("unknown",) for e in block.index)


def reduction_work(program: TileProgram) -> int:
    """Bytes for the partial sums of a reduction along rows: one 256 B repeat per row, of the largest."""
    rows = [
        math.prod(n for i, n in enumerate(op.shape) if i not in op.axes)
        for op in _vec_ops(program.body)
        if op.kind == "reduce" and len(op.shape) - 1 in op.axes
    ]
    return 256 * max(rows, default=0)


def temporaries(program: TileProgram) -> list[_Value]:
    """Every temporary with the first and last position at which it is needed, in order of definition."""
    fixed = {b.name for b in program.blocks} | {s.name for s in program.scratch} | {q.name for q in program.queues}
    values: dict[str, _Value] = {}
    clock = 0

    def visit(body: Iterable[Stmt], turns: int) -> None:
        nonlocal clock
        for stmt in body:
            if isinstance(stmt, Loop):
                before, start = set(values), clock
                visit(stmt.body, turns * stmt.count)
                for name in before:  # needed in any turn: needed until the last
                    if values[name].end >= start:
                        values[name].end = clock
                for name in stmt.carry:
                    if name in values:
                        values[name].end = max(values[name].end, clock)
            elif isinstance(stmt, When):
                for branch in stmt.branches:
                    visit(branch, turns)
            elif isinstance(stmt, (VecOp, CubeOp)):
                clock += 1
                for name in stmt.reads:
                    if name in values:
                        values[name].end = clock
                if stmt.out in fixed or not stmt.out:
                    continue
                size = _bytes(stmt) * (turns if stmt.out.startswith("y") else 1)
                reuse = isinstance(stmt, VecOp) and stmt.kind in _IN_PLACE
                if stmt.out in values:
                    values[stmt.out].end = clock
                    values[stmt.out].bytes = max(values[stmt.out].bytes, size)
                else:
                    values[stmt.out] = _Value(stmt.out, size, clock, clock, reuse)

    visit(program.body, 1)
    return sorted(values.values(), key=lambda v: v.start)


def _bytes(stmt: VecOp | CubeOp) -> int:
    if stmt.out_dtype == "bool":  # a mask holds one bit per element
        return tile_bytes((*stmt.out_shape[:-1], -(-(stmt.out_shape or (1,))[-1] // 8)), "int8")
    shape = stmt.out_shape
    if len(shape) > 1 and shape[-1] == 1:  # a column is stored packed
        shape = (math.prod(shape),)
    return tile_bytes(shape, stmt.out_dtype)


def _place(values: list[_Value], in_place: bool) -> tuple[dict[str, int], list[int], list[list[str]]]:
    """Slot of each value, bytes of each slot, names each slot holds over time."""
    slots: dict[str, int] = {}
    sizes: list[int] = []
    holds: list[list[str]] = []
    ends: list[int] = []
    for value in values:
        # A slot whose value is last read by the very instruction that defines this one is free only in place.
        free = [
            i for i, end in enumerate(ends) if end < value.start or (in_place and value.in_place and end == value.start)
        ]
        enough = [i for i in free if sizes[i] >= value.bytes]
        if enough:
            slot = min(enough, key=lambda i: sizes[i])
        elif free:
            slot = max(free, key=lambda i: sizes[i])
            sizes[slot] = value.bytes
        else:
            slot = len(sizes)
            sizes.append(value.bytes)
            ends.append(0)
            holds.append([])
        slots[value.name] = slot
        ends[slot] = value.end
        holds[slot].append(value.name)
    return slots, sizes, holds


def _vec_ops(body: Iterable[Stmt]) -> Iterable[VecOp]:
    for stmt in body:
        if isinstance(stmt, VecOp):
            yield stmt
        elif isinstance(stmt, Loop):
            yield from _vec_ops(stmt.body)
        elif isinstance(stmt, When):
            for branch in stmt.branches:
                yield from _vec_ops(branch)
