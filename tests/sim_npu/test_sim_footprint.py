"""The unified buffer: what fits by the map fits in fact, no tiles overlap, no row length is left without a plan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim_npu import CapacityError, TilePlan, demos, get_chip, programs_of, simulate
from sim_npu.demos.rows import default_plan
from sim_npu.footprint import queue_depths, temporaries, ub_map
from sim_npu.ir import CubeOp, Loop, VecOp, When, tile_bytes

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "int8"]


def allocate(program, ub, plan):
    """Replay the program with an allocator of its own: every tile at its address, nothing twice at the same time."""
    places = {t.name: (t.address, t.address + t.total) for t in ub.tenants}
    for block in program.blocks:
        if block.space == "ub":
            start, end = places[block.name]
            assert end - start >= tile_bytes(block.block_shape, block.dtype)
    spans = sorted(places.values())
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])), "tiles overlap"
    assert all(start % 32 == 0 for start, _ in spans)
    return max(end for _, end in spans)


def live_values(body, reads_after):
    """(operation, values needed after it) in program order; a loop's body is walked twice, so carried values count."""
    order = []

    def flatten(stmts):
        for s in stmts:
            if isinstance(s, Loop):
                flatten(s.body)
                flatten(s.body)
            elif isinstance(s, When):
                for branch in s.branches:
                    flatten(branch)
            elif isinstance(s, (VecOp, CubeOp)):
                order.append(s)

    flatten(body)
    needed = set(reads_after)
    for s in reversed(order):
        yield s, frozenset(needed)
        needed.discard(s.out)
        needed |= set(s.reads)


@settings(max_examples=40, deadline=None)
@given(d=st.integers(1, 70_000), dtype=st.sampled_from(DTYPES), chip=st.sampled_from(["910b2", "950", "310p"]))
def test_every_row_length_has_a_plan_that_fits_and_allocates_inside_the_buffer(d, dtype, chip):  # CASES: D10
    spec, plan = get_chip(chip), TilePlan()
    (program,) = programs_of(demos.rms_norm, ((96, d), dtype), ((d,), dtype), plan=plan)

    ub = ub_map(program, spec, plan)

    assert ub.fits, ub.complaint()
    assert allocate(program, ub, plan) == ub.used <= spec.ub_bytes


@pytest.mark.parametrize(
    ("n", "dtype"), [*((96, d) for d in DTYPES), (1 << 20, "float32"), (1 << 20, "float16"), (1 << 20, "int8")]
)
def test_no_row_length_to_70000_is_left_out_between_resident_and_streamed(n, dtype):  # CASES: D10
    """One plan serves a run of lengths, in which the buffer only fills up: every run's last length fits, so all do."""
    spec, plan = get_chip("910b2"), TilePlan()
    tilings = [default_plan((n, d), dtype) for d in range(1, 70_001)]
    ends = [d for d in range(1, 70_001) if d == 70_000 or tilings[d] != tilings[d - 1]]  # tilings[d - 1] is of length d
    starts = [1, *(d + 1 for d in ends[:-1])]
    kinds = {(t.residency, t.chunk is None) for t in tilings}
    assert kinds == {("row", True), ("row", False), ("stream", False)}  # whole rows, chunks of them, streamed

    def used(d):
        (program,) = programs_of(demos.rms_norm, ((n, d), dtype), ((d,), dtype), plan=plan)
        ub = ub_map(program, spec, plan)
        assert ub.fits and allocate(program, ub, plan) == ub.used <= spec.ub_bytes, (d, ub.complaint())
        return ub.used

    for i, (start, end) in enumerate(zip(starts, ends)):
        if end in (*ends[-4:], *ends[:2]) or i % 8 == 0:  # the long runs and some of the short ones: it only fills up
            inside = [used(d) for d in sorted({start, (start + end) // 2, end})]
            assert inside == sorted(inside)
        else:
            used(end)


@settings(max_examples=25, deadline=None)
@given(d=st.integers(1, 20_000), rows=st.integers(1, 32), depth=st.integers(1, 4), dtype=st.sampled_from(DTYPES))
def test_the_map_says_fits_exactly_when_the_allocation_stays_inside(d, rows, depth, dtype):  # CASES: D10
    spec, plan = get_chip("910b2"), TilePlan(rows=rows, residency="row", queue_depth=depth)
    (program,) = programs_of(demos.rms_norm, ((64, d), dtype), ((d,), dtype), plan=plan)

    ub = ub_map(program, spec, plan)

    assert ub.fits == (allocate(program, ub, plan) <= spec.ub_bytes)


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_chunked", "rms_norm_stream", "channel_stats"])
@pytest.mark.parametrize("in_place", [True, False])
def test_no_slot_holds_two_values_that_are_both_needed(name, in_place):
    fn = getattr(demos, name)
    for program in programs_of(fn, *fn.example_arrays((64, 3000), "float16")):
        slots = ub_map(program, get_chip("910b2"), TilePlan(in_place=in_place)).slots
        for stmt, needed in live_values(program.body, ()):
            alive = [slots[v] for v in needed if v in slots]
            assert len(alive) == len(set(alive)), f"after {stmt.op}: {sorted(needed)}"
            if not in_place and stmt.out in slots:
                assert slots[stmt.out] not in {slots[r] for r in stmt.reads if r in slots and r != stmt.out}


def test_in_place_operations_save_buffer():
    args = ((64, 4096), "bfloat16"), ((4096,), "bfloat16")
    (program,) = programs_of(demos.rms_norm, *args, plan=TilePlan(rows=2, residency="row"))
    used = [ub_map(program, get_chip("910b2"), TilePlan(in_place=p)).used for p in (True, False)]

    assert used[0] < used[1]


def test_depth_multiplies_moving_blocks_only():
    (program,) = programs_of(demos.rms_norm, ((4096, 1024), "float32"), ((1024,), "float32"))
    copies = {t.name: t.copies for t in ub_map(program, get_chip("910b2"), TilePlan(queue_depth=3)).tenants}

    assert (copies["in0"], copies["in1"], copies["out0"]) == (3, 1, 3)


def test_a_value_made_before_a_loop_and_read_inside_lives_to_its_end():
    (program,) = programs_of(demos.rms_norm_chunked, ((64, 4096), "float16"), ((4096,), "float16"))
    values = {v.name: v for v in temporaries(program)}
    loop = [s for s in program.body if isinstance(s, Loop)][-1]
    rstd = next(r for s in loop.body for r in s.reads if r in values and r not in {b.out for b in loop.body})

    assert values[rstd].end >= max(values[s.out].end for s in loop.body if s.out in values)


def test_a_plan_too_large_names_tenants_and_the_nearest_plan_that_fits():
    with pytest.raises(CapacityError) as error:
        simulate(
            demos.rms_norm, ((4096, 4096), "float32"), ((4096,), "float32"), plan=TilePlan(rows=64, residency="row")
        )

    text = str(error.value)
    assert "biggest tenants are" in text and "in0" in text and "196,352 B" in text
    assert "The nearest plan that fits: rows 2, depth 2" in text
    simulate(demos.rms_norm, ((4096, 4096), "float32"), ((4096,), "float32"), plan=TilePlan(rows=2, residency="row"))


def test_a_kernel_without_tilings_is_told_to_use_smaller_blocks():
    def fn(x, s):
        return demos.rms_norm(x, s, plan=TilePlan(rows=64, residency="row"))

    with pytest.raises(CapacityError, match="use smaller blocks"):
        simulate(fn, ((4096, 4096), "float32"), ((4096,), "float32"))


def test_a_queue_position_has_eight_buffers_and_small_tiles_give_theirs_up():
    args = demos.channel_grad.example_arrays((4, 256, 2000), "float32")
    (program,) = programs_of(demos.channel_grad, *args)
    depths = queue_depths(program, get_chip("910b2"), TilePlan(queue_depth=2))

    inputs = {n: d for n, d in depths.items() if n.startswith("in")}
    assert sum(inputs.values()) == 8 and inputs["in0"] == inputs["in1"] == 2  # dy and x keep two buffers
    assert "fewer buffers than the plan's depth" in str(simulate(demos.channel_grad, *args))
