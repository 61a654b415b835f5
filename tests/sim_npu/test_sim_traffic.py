"""Bytes against hand counts, how steps are dealt to cores, and where bytes come from."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim_npu import TilePlan, demos, get_chip, programs_of, simulate
from sim_npu.ir import BlockUse, TileProgram, VecOp
from sim_npu.memory import copy_cycles, core_rates, split_traffic
from sim_npu.schedule import schedule

CHIP = get_chip("910b2")


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 700), d=st.integers(1, 5000), cores=st.integers(1, 48))
def test_a_row_norm_reads_and_writes_x_once_and_the_scale_once_per_core(n, d, cores):
    plan = TilePlan(rows=2, residency="row", cores=cores)
    (k,) = simulate(demos.rms_norm, ((n, d), "float16"), ((d,), "float16"), plan=plan).kernels

    used = min(cores, -(-n // 2))
    assert k.schedule.cores == used
    assert (k.traffic.reads, k.traffic.writes) == (2 * n * d + 2 * d * used, 2 * n * d)


@pytest.mark.parametrize("d", [8192, 70000])
def test_a_streamed_row_norm_reads_x_twice_and_the_scale_once_per_row(d):
    n, chunk = 96, 4096
    (k,) = simulate(demos.rms_norm_stream, ((n, d), "float32"), ((d,), "float32")).kernels

    # In the first phase the scale's block stays at chunk 0, which is then the second phase's first chunk.
    assert k.traffic.reads == 4 * (2 * n * d + n * d)
    assert k.traffic.writes == 4 * n * d
    assert -(-d // chunk) * 2 * (n // 48) == k.timeline.steps


def test_channel_statistics_read_x_once_and_pass_partials_through_memory():
    n, c = 10_000, 96
    partials, merge = simulate(demos.channel_stats, ((n, c), "bfloat16")).kernels
    parts = partials.program.blocks[1].array_shape[0]

    assert (partials.traffic.reads, partials.traffic.writes) == (2 * n * c, 2 * 4 * parts * c)
    assert (merge.traffic.reads, merge.traffic.writes) == (2 * 4 * parts * c, 2 * 4 * c)


def program(grid, parallel, index, block=(2,), array=(100,)):
    x = BlockUse("x", "in", array, "float32", block, index)
    return TileProgram("p", grid, parallel, (x,), (), ())


def test_a_block_whose_index_stays_is_copied_once():
    sched = schedule(program((10, 5), (True, False), (("axis", 0),)), CHIP, TilePlan(cores=1))

    assert sched.copies_in == 10 and sched.bytes_in == 10 * 2 * 4


def test_each_core_copies_a_constant_block_itself():
    assert schedule(program((10,), (True,), (0,)), CHIP, TilePlan(cores=4)).copies_in == 4


def test_steps_are_dealt_in_runs_and_the_first_cores_take_one_more():
    sched = schedule(program((11,), (True,), (("axis", 0),)), CHIP, TilePlan(cores=4))

    assert sched.codes.shape == (3, 1)  # 3, 3, 3, 2
    assert sched.bytes_in == 11 * 8


def test_blocks_are_clipped_at_the_edge_of_the_array():
    sched = schedule(program((7,), (True,), (("axis", 0),), block=(16,)), CHIP, TilePlan())

    assert sched.bytes_in == 100 * 4


def test_sequential_axes_stay_on_one_core():
    sched = schedule(program((4, 6), (False, True), (("axis", 0),)), CHIP, TilePlan())

    assert sched.cores == 6 and sched.codes.shape == (1, 4) and sched.copies_in == 24


def test_an_output_that_an_axis_does_not_move_makes_that_axis_sequential():
    def fn(x):
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl

        def kernel(x_ref, y_ref):
            y_ref[...] = x_ref[...]

        out = pl.BlockSpec((8, 128), lambda i, j: (i, 0))
        spec = pl.BlockSpec((8, 128), lambda i, j: (i, j))
        shape = jax.ShapeDtypeStruct((32, 128), jnp.float32)
        return pl.pallas_call(kernel, grid=(4, 3), in_specs=[spec], out_specs=out, out_shape=shape)(x)

    (p,) = programs_of(fn, ((32, 384), "float32"))
    assert p.parallel == (True, False)


def split(unique, cache, chip=CHIP, reads=None):
    return split_traffic(reads or unique, unique, unique, unique, 0.0, chip, cache)


def test_what_fits_l2_is_read_from_it_when_warm_and_from_hbm_when_cold():
    warm, cold = split(10 << 20, "warm"), split(10 << 20, "cold")

    assert warm.l2_hit == 1.0 and warm.chip_gbps == CHIP.l2_gbps
    assert cold.hbm_reads == 10 << 20 and cold.hbm_writes == 0
    assert cold.chip_gbps == pytest.approx(2 * CHIP.chip_gbps)


@given(st.integers(1, 1 << 31))
def test_more_bytes_never_hit_more_often(unique):
    small, large = split(unique, "warm"), split(unique + (1 << 24), "warm")

    assert large.l2_hit <= small.l2_hit + 1e-12
    assert large.bound_us >= small.bound_us


def test_beyond_twice_l2_everything_comes_from_hbm():
    t = split(2 * CHIP.l2_bytes, "warm")

    assert t.l2_hit == 0.0 and t.chip_gbps == CHIP.chip_gbps


def test_a_second_read_soon_after_the_first_hits_l2():
    t = split(1 << 30, "cold", reads=2 << 30)

    assert t.hbm_reads == 1 << 30


def test_bypassing_inputs_leave_l2_to_the_outputs():
    t = split(150 << 20, "bypass")

    assert t.hbm_reads == 150 << 20 and t.hbm_writes == 0


def test_an_unknown_cache_state_is_refused():
    with pytest.raises(ValueError, match="`cache` must be one of.*'hot'"):
        simulate(demos.rms_norm, ((64, 64), "float32"), ((64,), "float32"), cache="hot")


def test_a_core_alone_reads_and_writes_l2_faster_than_hbm_and_mixes_by_share():
    chip = CHIP.replace(
        mte2_bytes_per_cycle=30.0,
        mte3_bytes_per_cycle=20.0,
        l2_read_bytes_per_cycle=60.0,
        l2_write_bytes_per_cycle=40.0,
        l2_gbps=1e6,
        chip_gbps=1e6,
    )

    def rates(unique, cache, chip=chip):
        return core_rates(split(unique, cache, chip), 1, (1.0, 1.0), chip)

    assert rates(chip.l2_bytes // 4, "warm") == (60.0, 40.0)
    assert rates(chip.l2_bytes // 4, "cold") == (30.0, 40.0)  # first reads from HBM, writes into L2
    assert rates(chip.l2_bytes, "warm") == (30.0, 20.0)  # in and out are twice L2: nothing hits
    half = rates(chip.l2_bytes * 3 // 4, "warm")  # in and out are 1.5 L2: half hits
    assert half == pytest.approx((1 / (0.5 / 30 + 0.5 / 60), 1 / (0.5 / 20 + 0.5 / 40)))
    plain = chip.replace(l2_read_bytes_per_cycle=None, l2_write_bytes_per_cycle=None)
    assert rates(chip.l2_bytes // 4, "warm", plain) == (30.0, 20.0)


def test_a_streamed_group_norm_reads_x_twice_and_the_affine_pair_once_per_core():
    args = demos.group_norm.example_arrays((4, 64, 100_000), "float16")
    plan = TilePlan(chunk=8192, residency="stream")
    (k,) = simulate(demos.group_norm, *args, groups=16, plan=plan).kernels

    x = 2 * 4 * 64 * 100_000
    assert k.traffic.reads == 2 * x + 48 * 2 * 4 * 64 and k.traffic.writes == x


def test_a_copy_costs_its_head_its_pieces_and_whole_blocks():
    chip = CHIP.replace(burst_cycles=2.0)

    assert copy_cycles(1, 1000, 100.0, 32.0, chip) == 100 + 1024 / 32
    assert copy_cycles(10, 1000, 100.0, 32.0, chip) == 100 + 9 * 2 + 10 * 128 / 32
    assert copy_cycles(3, 0, 100.0, 32.0, chip) == 0.0


def test_results_do_not_depend_on_the_number_of_cores_beyond_shares():
    args = ((4800, 1024), "float32"), ((1024,), "float32")
    one, many = (simulate(demos.rms_norm, *args, plan=TilePlan(rows=4, residency="row", cores=c)) for c in (1, 48))
    k1, k48 = one.kernels[0], many.kernels[0]

    assert k1.traffic.writes == k48.traffic.writes
    assert k1.instructions == pytest.approx(48 * k48.instructions, rel=1e-2)
    assert np.isclose(k1.vector_us, 48 * k48.vector_us, rtol=1e-2)


def test_reads_from_l2_have_a_limit_of_their_own_where_the_chip_has_one():
    chip = get_chip("950")
    free = chip.replace(l2_read_gbps=None)
    reads, writes = 2 << 24, 1 << 24
    t, plain = (split_traffic(reads, writes, reads, writes, 0.0, c, "warm") for c in (chip, free))

    assert t.read_gbps == chip.l2_read_gbps and plain.read_gbps == math.inf
    assert t.bound_us == pytest.approx(max(3 * 2**24 / chip.l2_gbps, reads / chip.l2_read_gbps) / 1e3)
    per_cycle = chip.l2_read_gbps * 1e3 / chip.clock_mhz / 64
    assert core_rates(t, 64, (1.0, 1.0), chip)[0] == pytest.approx(per_cycle)
    assert core_rates(plain, 64, (1.0, 1.0), free)[0] == pytest.approx(chip.l2_gbps * 2 / 3 * 1e3 / chip.clock_mhz / 64)
    # As many reads as writes, their share of the whole is less than the limit.
    even = split_traffic(writes, writes, writes, writes, 0.0, chip, "warm")
    assert core_rates(even, 64, (1.0, 1.0), chip)[0] == pytest.approx(chip.l2_gbps / 2 * 1e3 / chip.clock_mhz / 64)


def test_reads_that_miss_l2_do_not_count_against_its_limit():
    chip = get_chip("950")
    half = split_traffic(chip.l2_bytes, chip.l2_bytes // 2, chip.l2_bytes, chip.l2_bytes // 2, 0.0, chip, "warm")
    cold = split_traffic(1 << 20, 0, 1 << 20, 0, 0.0, chip, "cold")

    assert half.read_gbps == pytest.approx(chip.l2_read_gbps / (1 - half.hbm_reads / half.reads))
    assert cold.read_gbps == math.inf


@pytest.mark.parametrize(
    ("tile", "array", "gap"),
    [
        ((8, 64), (100, 1023), 2 * (1023 - 64)),  # part of each row
        ((8, 1023), (100, 1023), 0),  # whole rows, one piece each for they are no multiple of 32 B, but side by side
        ((8, 1024), (100, 1024), 0),  # one piece
        ((2, 3, 64), (9, 10, 64), 2 * 7 * 64),  # a run of rows from each of two
    ],
)
def test_the_gap_between_pieces_is_what_the_block_leaves_out(tile, array, gap):
    program = TileProgram(
        "p",
        (1,),
        (True,),
        (BlockUse("x", "in", array, "float16", tile, (0,) * len(tile)),),
        (),
        (VecOp("add", "arith", tile, "float16", "x", tile, "float16", ("x",)),),
    )
    (kind,) = schedule(program, get_chip("950"), TilePlan()).kinds

    assert kind.copies_in[0].gap == gap
