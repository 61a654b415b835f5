"""Published kernels of 950: which template, bytes and cycles by hand, and what the fit rows say of them."""

import math

import numpy as np
import pytest

from sim_npu import TilePlan, get_chip, simulate
from sim_npu import calibration as cal
from sim_npu.builder import Builder, Tile
from sim_npu.cost import op_cost
from sim_npu.demos import published, published_grad, published_group
from sim_npu.fitting import choose_strength, leave_one_out
from sim_npu.footprint import ub_map
from sim_npu.ir import Copy, walk
from sim_npu.measured import OPERATORS
from sim_npu.profiles import core_and_bytes

CHIP = get_chip("950")
ROWS = [c for c in OPERATORS if c.chip == "950" and c.op != "rms_norm"]
PLAN = TilePlan(bank_pad=False)


def kernel(program):
    return simulate(program, chip=CHIP, plan=PLAN).kernels[0]


@pytest.mark.parametrize("case", ROWS, ids=lambda c: f"{c.op}-{c.case}")
def test_every_measured_shape_has_a_program_that_fits_and_moves_its_arrays(case):
    program = cal.published_program(case)
    k = kernel(program)

    assert ub_map(program, CHIP, PLAN).fits
    one = math.prod(case.shape) * {"float32": 4, "float16": 2, "bfloat16": 2}[case.dtype]
    reads = {
        "group_norm_two_pass": 1,
        "group_norm_welford": 2,
        "channel_grad_full_load": 2,
        "channel_grad_split_r0": 4,
        "channel_scale": 1,
        "channel_scale_last": 1,
    }[program.name]
    # A last tile or core may have less to do than the first, on which all are modelled.
    assert reads * one <= k.traffic.reads < 1.13 * reads * one
    assert one <= k.traffic.writes < 1.13 * one


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (published_group.group_norm((8, 32, 64, 64), "float16", CHIP, groups=8), "group_norm_two_pass"),
        (published_group.group_norm((8, 32, 64, 64), "float16", CHIP, groups=4), "group_norm_welford"),
        (published_group.group_norm((8, 32, 64, 64), "float32", CHIP, groups=8), "group_norm_welford"),
        (published_grad.channel_grad((2, 8, 32, 32), "float16", CHIP), "channel_grad_full_load"),
        (published_grad.channel_grad((1, 16, 32, 32, 32), "float32", CHIP), "channel_grad_split_r0"),
        (published_grad.channel_scale((2048, 1023), "float32", CHIP), "channel_scale_last"),
        (published_grad.channel_scale((32, 128, 509), "float16", CHIP), "channel_scale"),
    ],
)
def test_templates_follow_the_librarys_rule(program, name):
    assert program.name == name


def test_a_channel_of_a_million_is_summed_in_64_tiles_and_a_rest():
    # 61,568 B are a quarter of the buffer without 7.5 KiB: 15,392 float32. 2^20 = 64 x 15,392 + 63,488, and the rest
    # is 4 tiles and 1,920: nine half tiles with a piece added, one without, and 59 whole tiles; then 69 for dx.
    program = published_grad.channel_grad((1, 1, 1024, 1024), "float16", CHIP)
    (outer,) = program.body

    def count(body, times=1):
        total = {}
        for stmt in body:
            inner = {stmt.queue: times} if isinstance(stmt, Copy) and stmt.direction == "in" else {}
            if hasattr(stmt, "body"):
                inner = count(stmt.body, times * stmt.count)
            total = {q: total.get(q, 0) + inner.get(q, 0) for q in total | inner}
        return total

    assert count(outer.body) == {"stats": 3, "dy": 9 * 2 + 1 + 59 + 69, "x": 9 * 2 + 1 + 59 + 69}
    longest = max(s.burst_bytes for s in walk(program.body) if isinstance(s, Copy))
    assert longest == 2 * 15392
    k = kernel(program)
    assert k.traffic.reads == 4 * 2 * 2**20 + 12 and k.traffic.writes == 2 * 2**20 + 8


def test_registers_two_instructions_start_in_a_cycle_but_stores_and_reductions_have_one_to_themselves():
    b = Builder("p", grid=(1,))
    tile = b.buffer("t", (6400,), "float32")
    published.walk(b, tile, 6400, "Load Mask Add Store Reduce")
    costs = [op_cost(op, CHIP) for op in b.build().body]

    assert [c.busy for c in costs] == [50, 50, 50, 100, 100]  # 100 registers
    assert {c.instructions for c in costs} == {1}


def test_a_sum_folds_halves_then_reduces_registers_then_their_sums():
    b = Builder("p", grid=(1,))
    published.add_up(b, b.buffer("t", (15392,), "float16"), b.buffer("s", (128,), "float32"), 15392)
    lanes = [(op.op, math.prod(op.shape)) for op in b.build().body]

    assert lanes == [
        ("UpdateMask", 7200),
        ("Add", 7200),
        ("Reduce", 8192),
        ("StoreAlign", 8192),
        *(("LoadAlign", 64), ("LoadAlign", 64), ("Add", 64), ("StoreAlign", 64)),  # 128 sums
        *(("LoadAlign", 64), ("Reduce", 64), ("StoreAlign", 64)),
    ]


def test_short_rows_with_channels_last_pay_for_the_gaps_between_pieces():
    # 247 samples of 64 channels a tile: pieces of 256 B, 4092 - 256 B apart.
    program = published_grad.channel_scale((2048, 1023), "float32", CHIP)
    alone = CHIP.replace(l2_gbps=1e6, l2_read_gbps=None)  # cores do not share rates, which change as they are busier
    with_gaps, without = (simulate(program, chip=c, plan=PLAN).kernels[0] for c in (alone, alone.replace(**NO_GAPS)))

    assert with_gaps.schedule.cores == 48
    assert {(s.bursts, s.burst_bytes, s.gap) for s in walk(program.body) if isinstance(s, Copy) and s.bursts > 1} == {
        (247, 256, 3836)
    }
    gain = 3 * 246 * 3836 / CHIP.clock_mhz
    assert with_gaps.busy_us["MTE2"] - without.busy_us["MTE2"] == pytest.approx(0.005 * gain)
    assert with_gaps.busy_us["MTE3"] - without.busy_us["MTE3"] == pytest.approx(0.0385 * gain)


NO_GAPS = {"gap_read_cycles": 0.0, "gap_write_cycles": 0.0}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: published_group.group_norm((1, 8192, 4), "float16", CHIP, groups=2), "at most 4096 channels.*8192"),
        (lambda: published_group.group_norm((1, 10, 4), "float16", CHIP, groups=3), "must divide the 10 channels.*3"),
        (lambda: published_grad.channel_grad((64, 32), "float16", CHIP), "gets neither"),
        (lambda: published_grad.channel_grad((64, 64, 56, 56), "float16", CHIP), "gets neither.*demos.channel_grad"),
        (lambda: published_grad.channel_grad((128, 3, 224, 224), "float16", CHIP), "gets neither"),
    ],
)
def test_shapes_of_other_templates_are_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_many_small_channels_share_a_step():
    program = published_grad.channel_grad((2, 640, 4, 4), "float32", CHIP)

    assert program.name == "channel_grad_full_load" and program.grid == (64,)
    assert kernel(program).traffic.reads == 2 * 4 * 2 * 640 * 16 + 3 * 4 * 640


def left_out(op, use):
    """Leave-one-out error on the fit rows of an operator on 950, with the programs that `use` gives."""
    x, y = [], []
    for case in (c for c in ROWS if c.op == op and cal.is_fit(c)):
        program = use(case)
        report = cal.ideal_report(case) if program is None else simulate(program, chip=CHIP, plan=PLAN)
        core, moved = core_and_bytes(report.kernels)
        x.append([1.0, core, moved / 1e6])
        y.append(case.us)
    prior = cal.shipped_prior("950")
    x, y = np.array(x), np.array(y)
    return leave_one_out(x, y, prior, choose_strength(x, y, prior))


@pytest.mark.parametrize("op", ["group_norm", "batch_norm_grad_v3"])
def test_the_programs_that_stand_are_those_the_fit_rows_do_not_speak_against(op):
    chosen, all_published, none = (
        left_out(op, use) for use in (cal.shipped_program, cal.published_program, lambda case: None)
    )

    assert chosen <= none + 1e-9
    assert chosen < all_published


def test_a_program_stands_for_training_and_channels_last_alone():
    stands = {(c.op, c.case) for c in ROWS if cal.shipped_program(c) is not None}

    assert stands == {("batch_norm_grad_v3", case) for case in (1, 7, 11, 15)}
    assert all(cal.published_program(c) is None for c in OPERATORS if c.op == "rms_norm" or c.chip != "950")


def test_buffers_of_small_arrays_hold_a_tile_of_channels():
    tile = Tile("stats", (3, 16), "float32")
    program = published_grad.channel_grad((1, 1024, 2, 8), "float16", CHIP)

    assert next(q.shape for q in program.queues if q.name == tile.name) == tile.shape
