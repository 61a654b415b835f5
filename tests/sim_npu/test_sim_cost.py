"""Cycles of vector instructions against hand counts."""

import dataclasses

import pytest

from sim_npu import get_chip
from sim_npu.cost import body_cost, op_cost
from sim_npu.footprint import Tenant, UbMap
from sim_npu.ir import Loop, VecOp, When

CHIP = get_chip("910b2").replace(vec_head=20.0, vec_head_first=36.0)


def op(kind, shape, dtype="float32", out_dtype=None, **kwargs):
    return VecOp(kind, kind, shape, dtype, "z", shape, out_dtype or dtype, ("x", "y"), **kwargs)


@pytest.mark.parametrize(
    ("operation", "instructions", "busy"),
    [
        (op("arith", (64,)), 1, 1),  # one repeat of 64 float32 lanes
        (op("arith", (4096,), "float16"), 1, 32),  # 128 lanes of float16
        (op("arith", (65,)), 1, 2),  # a started repeat is a repeat
        (op("arith", (256 * 64,)), 2, 256),  # at most 255 repeats an instruction
        (op("transcendental", (4096,), "float16"), 1, 128),  # 32 elements a cycle, whatever the type
        (op("transcendental", (4096,)), 1, 128),
        (op("cast", (4096,), "float32", "float16"), 1, 64),  # 64 elements a cycle
        (op("arith", (8, 100)), 2, 16),  # 400 B is not whole 32 B blocks: 2 repeats a row, issued column by column
        (op("arith", (8, 128)), 1, 16),  # packed rows are one run
        (op("arith", (8, 128), broadcast="major"), 2, 16),  # column by column: 2 instructions of 8 repeats
        (op("arith", (300, 64), broadcast="major"), 2, 300),  # 300 rows exceed 255 repeats
        (op("arith", (4096,), steps=3), 3, 192),
        (op("arith", (0,)), 0, 0),
    ],
)
def test_instructions_and_repeats(operation, instructions, busy):
    cost = op_cost(operation, CHIP)

    assert (cost.instructions, cost.busy) == (instructions, busy)
    assert cost.cycles(CHIP) == 20 * instructions + busy


def test_a_column_operand_is_spread_first():
    plain, spread = op_cost(op("arith", (16, 64)), CHIP), op_cost(op("arith", (16, 64), broadcast="minor"), CHIP)

    assert spread.instructions == plain.instructions + 1  # one instruction spreads 16 scalars, 8 a repeat
    assert spread.busy == plain.busy + 2


def test_a_row_reduction_halves_then_reduces_one_repeat_per_row_in_seven_cycles():
    cost = op_cost(VecOp("sum", "reduce", (4, 512), "float32", "s", (4,), "float32", ("x",), axes=(1,)), CHIP)

    assert cost.busy == 4 * (4 + 2 + 1) + 4 * 7  # 8 repeats a row: 4, 2, 1 additions
    assert cost.instructions == 4 + 2 + 1 + 1  # each halving by row or by column, whichever is fewer; one reduction


def test_a_column_reduction_halves_rows():
    cost = op_cost(VecOp("sum", "reduce", (8, 64), "float32", "s", (64,), "float32", ("x",), axes=(0,)), CHIP)

    assert (cost.instructions, cost.busy) == (3, 4 + 2 + 1)


def test_bf16_arithmetic_is_widened_where_the_chip_has_none():
    operation = op("arith", (4096,), "bfloat16")
    a2, a5 = op_cost(operation, CHIP), op_cost(operation, get_chip("950"))

    assert a5.busy == 32 / 2 and a5.instructions == 1  # 950 issues two a cycle
    assert a2.busy == 32 + 3 * 64 and a2.instructions == 4  # two operands and the result are converted


@pytest.mark.parametrize(("second", "conflict"), [(512, 64), (512 + 256, 0), (4096 * 4, 64)])
def test_operands_in_one_bank_group_cost_every_repeat_twice(second, conflict):
    tenants = (Tenant("x", "in", 16384, 1, 0), Tenant("y", "in", 16384, 1, second))

    assert op_cost(op("arith", (4096,)), CHIP, UbMap(196608, tenants, {})).conflict == conflict


SPAN = 16 * 4096  # bytes after which the next bank of every group begins


@pytest.mark.parametrize(
    ("x", "z", "share"),
    [
        (0, 16384, 1),  # same group, same bank: the write waits for the read
        (0, 16384 + 256, 0),  # half a row of groups apart
        (0, SPAN, 0),  # next bank of the same group
        (SPAN - 8192, SPAN + 8192, 0.5),  # the read reaches that bank half-way
        (16384, 0, 1),  # whichever comes first
        (512, 512, 0),  # in place: read before it is written
    ],
)
def test_a_write_into_the_bank_that_is_read_costs_the_repeat_twice(x, z, share):
    tenants = (Tenant("x", "in", 16384, 1, x), Tenant("z", "out", 16384, 1, z))
    copy = VecOp("neg", "arith", (4096,), "float32", "z", (4096,), "float32", ("x",))

    cost = op_cost(copy, CHIP, UbMap(196608, tenants, {}))
    assert (cost.busy, cost.conflict) == (64, 64 * share)
    assert op_cost(copy, get_chip("950"), UbMap(196608, tenants, {})).conflict == 0  # operands in registers


def test_a_repeat_with_both_kinds_of_conflict_takes_twice_and_a_small_operand_none():
    tenants = tuple(Tenant(n, "in", 16384, 1, a) for n, a in (("x", 0), ("y", 16384), ("z", 32768)))
    assert op_cost(op("arith", (4096,)), CHIP, UbMap(196608, tenants, {})).conflict == 64

    row = (tenants[0], Tenant("y", "in", 256, 1, 16384 + 256), Tenant("z", "out", 16384, 1, 32768 + 256))
    spread = op("arith", (64, 64), broadcast="minor")  # y and z share a group, x and z do not; y stays where it is
    assert op_cost(spread, CHIP, UbMap(196608, row, {})).conflict == 0


@pytest.mark.parametrize(("broadcast", "conflict"), [("", 64), ("major", 64), ("scalar", 0), ("minor", 0)])
def test_an_operand_that_stays_in_place_does_not_collide(broadcast, conflict):
    tenants = (Tenant("x", "in", 16384, 1, 0), Tenant("y", "in", 16384, 1, 512))
    add = dataclasses.replace(op("arith", (4096,)), broadcast=broadcast)

    assert op_cost(add, CHIP, UbMap(196608, tenants, {})).conflict == conflict
    assert op_cost(add, get_chip("950"), UbMap(196608, tenants, {})).conflict == 0  # operands in registers


def test_a_single_element_does_not_unpack_a_tile():
    packed, scalar = (op_cost(dataclasses.replace(op("arith", (16, 64)), broadcast=b), CHIP) for b in ("", "scalar"))

    assert scalar == packed and (scalar.instructions, scalar.repeats) == (1, 16)


def test_loops_multiply_and_only_the_branch_taken_costs():
    add = op("arith", (64,))
    when = When(("eq", ("axis", 0), 0), ((), (add, add)))
    body = (Loop(5, (add,)), when)

    taken = body_cost(body, CHIP, None, {when.predicate: 1})
    skipped = body_cost(body, CHIP, None, {when.predicate: 0})
    unknown = body_cost(body, CHIP, None)

    assert (taken.instructions, skipped.instructions, unknown.instructions) == (7, 5, 7)
    assert skipped.vector == 16 + 5 * 21 and skipped.loops == 5 * CHIP.loop_cycles
