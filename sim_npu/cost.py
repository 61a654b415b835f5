"""Cycles of vector instructions.

    cycles = instructions * head + repeats * (cycles per repeat) * bank factor / issue width

The bank factor is 2 where two operands, or an operand and the result, meet in the unified buffer (`_conflicting`).

A repeat is 256 B: 64 float32 or 128 float16 lanes. An instruction holds at most 255 repeats (`max_repeats`), so a
large tile takes several. Rows that are not packed (a row is not a multiple of 32 B, or an operand repeats along or
across rows) cost whole repeats per row; such an operation is issued row by row or column by column, whichever
takes fewer instructions.

Reductions along rows halve by additions down to one repeat per row, then reduce that repeat in 7 cycles.
Element-wise classes cost per repeat; conversions and slow functions cost per element (64 and 32 a cycle on A2),
whatever the type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sim_npu.chips import ChipSpec
from sim_npu.footprint import Tenant, UbMap
from sim_npu.ir import Copy, CubeOp, Expr, Loop, Stmt, VecOp, When, dtype_bytes

PER_ELEMENT = {"transcendental", "cast", "transpose", "gather", "unknown"}
WIDEN = {"arith", "transcendental", "compare", "reduce", "select"}


@dataclass(frozen=True)
class OpCost:
    """Cost of one operation: instructions, repeats, busy cycles of repeats, cycles lost to bank conflicts."""

    instructions: int
    repeats: int
    busy: float
    conflict: float = 0.0

    def cycles(self, chip: ChipSpec) -> float:
        """Cycles including the head of each instruction."""
        return self.instructions * chip.vec_head + self.busy + self.conflict


def op_cost(op: VecOp, chip: ChipSpec, ub: UbMap | None = None) -> OpCost:
    """Cost of a vector operation.

    >>> from sim_npu.chips import get_chip
    >>> add = VecOp("add", "arith", (4096,), "float16", "z", (4096,), "float16", ("x", "y"))
    >>> op_cost(add, get_chip("910b1"))
    OpCost(instructions=1, repeats=32, busy=32.0, conflict=0.0)
    """
    if op.kind == "view":
        return OpCost(0, 0, 0.0)
    if op.kind == "scalar":
        return OpCost(op.steps, op.steps, float(op.steps))
    cost = _reduce_cost(op, chip) if op.kind == "reduce" else _walk_cost(op, chip, ub)
    width = 1.0 if op.kind == "single" else chip.vector_issue
    return cost if width == 1.0 else OpCost(cost.instructions, cost.repeats, cost.busy / width, cost.conflict / width)


def _walk_cost(op: VecOp, chip: ChipSpec, ub: UbMap | None) -> OpCost:
    """Cost of an operation that walks over all elements, at one repeat a cycle."""
    lanes = max(1, int(chip.repeat_bytes // dtype_bytes(op.dtype if op.dtype != "bool" else "int8")))
    repeats, instructions = _repeats(op, lanes, chip)
    rate = chip.cycles_per_repeat.get(op.kind, chip.cycles_per_repeat["unknown"])
    per_repeat = rate * (lanes / 64) if op.kind in PER_ELEMENT else rate
    busy = repeats * per_repeat
    conflict = op.steps * busy * _conflicting(op, chip, ub)
    if op.broadcast == "minor":  # the column is first spread to one 32 B block per row
        rows = math.prod(op.shape[:-1])
        instructions_extra, repeats_extra = -(-rows // (8 * min(chip.max_repeats, 255))), -(-rows // 8)
    else:
        instructions_extra = repeats_extra = 0
    if op.dtype == "bfloat16" and op.kind in WIDEN and not chip.has_bf16_arith:
        casts = len(op.reads) + (op.out_dtype == "bfloat16")
        cast = math.prod(op.shape) / 64 * chip.cycles_per_repeat["cast"]
        instructions_extra += casts * instructions
        busy += casts * cast
        repeats_extra += casts * repeats
    return OpCost(
        op.steps * instructions + instructions_extra,
        op.steps * repeats + repeats_extra,
        op.steps * busy + repeats_extra * (op.broadcast == "minor"),
        conflict,
    )


def _repeats(op: VecOp, lanes: int, chip: ChipSpec) -> tuple[int, int]:
    """(repeats, instructions) to walk once over the operation's shape."""
    elements = math.prod(op.shape)
    last = op.shape[-1] if op.shape else 1
    rows = elements // last if last else 0
    whole = op.broadcast in ("", "scalar") and (last * dtype_bytes(op.dtype)) % 32 == 0
    packed = whole or rows == 1 or last == 1
    if packed and op.broadcast != "minor":
        repeats = -(-elements // lanes)
        return repeats, -(-repeats // chip.max_repeats)
    across = -(-last // lanes)
    return rows * across, min(_issues(rows, across, chip.max_repeats), _issues(across, rows, chip.max_repeats))


def _issues(outer: int, inner: int, limit: int) -> int:
    return outer * -(-inner // limit)


def _reduce_cost(op: VecOp, chip: ChipSpec) -> OpCost:
    lanes = max(1, int(chip.repeat_bytes // dtype_bytes(op.dtype)))
    reduced = math.prod(op.shape[a] for a in op.axes)
    elements = math.prod(op.shape)
    if elements == 0:
        return OpCost(0, 0, 0.0)
    kept = elements // reduced
    limit = chip.max_repeats
    instructions = repeats = 0
    if len(op.shape) - 1 in op.axes:
        across = -(-reduced // lanes)
        while across > 1:
            half = across // 2
            repeats += kept * half
            instructions += min(_issues(kept, half, limit), _issues(half, kept, limit))
            across -= half
        final = kept * chip.cycles_per_repeat["reduce"]
        return OpCost(instructions + -(-kept // limit), repeats + kept, repeats + final)
    while reduced > 1:
        half = reduced // 2
        part = -(-half * kept // lanes)
        repeats += part
        instructions += -(-part // limit)
        reduced -= half
    return OpCost(max(instructions, 1), max(repeats, 1), float(max(repeats, 1)))


def _conflicting(op: VecOp, chip: ChipSpec, ub: UbMap | None) -> float:
    """Share of the repeats that take twice as long because operands meet in the unified buffer.

    Two reads meet in one bank group, a read and the write in one bank of a group. A repeat that does both still takes
    twice: the 910B4 samples, all of whose tiles lie in one bank, leave no room for a third cycle. An operand that stays
    in place while the other moves on ("minor", "scalar") meets it too seldom to count, a result written over its own
    operand does not meet it, and operands in registers do not meet at all.
    """
    if ub is None or chip.vector_registers or op.kind not in ("arith", "select"):
        return 0.0
    size = math.prod(op.shape) * dtype_bytes(op.dtype)
    reads = [t for t in map(ub.tenant, op.reads) if t is not None]
    if size < chip.repeat_bytes:
        return 0.0
    if len(reads) > 1 and op.broadcast not in ("minor", "scalar") and _one_group(reads[0], reads[1], chip):
        return 1.0
    out = ub.tenant(op.out)
    if out is None:
        return 0.0
    moving = [t for t in reads if t.bytes >= size and t.address != out.address and _one_group(t, out, chip)]
    return max((_one_bank(t.address, out.address, size, chip) for t in moving), default=0.0)


def _one_group(first: Tenant, second: Tenant, chip: ChipSpec) -> bool:
    return ((first.address >> 5) - (second.address >> 5)) % chip.ub_bank_groups == 0


def _one_bank(first: int, second: int, size: float, chip: ChipSpec) -> float:
    """Share of `size` bytes during which two tiles of one group, walked together, are in the same bank."""
    span = chip.ub_bank_groups * chip.ub_bank_bytes
    shared = 0.0
    for bank in range(chip.ub_banks_per_group):
        start = max(0, bank * span - min(first, second))
        end = min(size, (bank + 1) * span - max(first, second))
        shared += max(0.0, end - start)
    return shared / size


@dataclass(frozen=True)
class OpRow:
    """One line of the table of operations: what it is, where, how often in a step, its cost once."""

    op: str
    kind: str
    where: str
    times: int
    cost: OpCost
    branch: str = ""


@dataclass(frozen=True)
class BodyCost:
    """Vector and scalar work of a body for one choice of branches."""

    vector: float
    instructions: int
    repeats: int
    conflict: float
    loops: float
    cube_flops: float
    rows: tuple[OpRow, ...]


def body_cost(
    body: Sequence[Stmt], chip: ChipSpec, ub: UbMap | None, choose: dict[Expr, int] | None = None
) -> BodyCost:
    """Cost of one run of `body`.

    Args:
      body: statements.
      chip: the chip.
      ub: where operands lie, for bank conflicts; None assumes none.
      choose: branch taken per predicate; a predicate that is missing takes the most expensive branch.
    """
    rows: list[OpRow] = []
    loops = 0.0
    flops = 0.0

    def visit(stmts: Sequence[Stmt], times: int) -> None:
        nonlocal loops, flops
        for stmt in stmts:
            if isinstance(stmt, VecOp):
                rows.append(OpRow(stmt.op, stmt.kind, stmt.where, times, op_cost(stmt, chip, ub)))
            elif isinstance(stmt, Loop):
                loops += times * stmt.count * chip.loop_cycles
                visit(stmt.body, times * stmt.count)
            elif isinstance(stmt, When):
                visit(_branch(stmt, chip, ub, choose or {}), times)
            elif isinstance(stmt, CubeOp):
                flops += times * stmt.flops
            elif isinstance(stmt, Copy):
                continue

    visit(body, 1)
    busy = sum(r.times * r.cost.busy for r in rows)
    instructions = sum(r.times * r.cost.instructions for r in rows)
    conflict = sum(r.times * r.cost.conflict for r in rows)
    repeats = sum(r.times * r.cost.repeats for r in rows)
    first = chip.vec_head_first - chip.vec_head if instructions else 0.0
    vector = instructions * chip.vec_head + first + busy + conflict
    return BodyCost(vector, instructions, repeats, conflict, loops, flops, tuple(rows))


def _branch(stmt: When, chip: ChipSpec, ub: UbMap | None, choose: dict[Expr, int]) -> Sequence[Stmt]:
    if stmt.predicate in choose:
        number = min(max(int(choose[stmt.predicate]), 0), len(stmt.branches) - 1)
        return stmt.branches[number]
    return max(stmt.branches, key=lambda b: body_cost(b, chip, ub).vector)
