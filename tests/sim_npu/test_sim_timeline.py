"""Units in time: hand schedules, queue depth, and jumps that change nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim_npu import TilePlan, demos, simulate
from sim_npu.timeline import run_core

CYCLES = st.floats(1.0, 500.0)


def step(read, work, write):
    return [("in", "x", read), ("open", "y"), ("vec", work), ("free", "x"), ("out", "y", write)]


def by_hand(codes, events, depth, setup=0.0, scalar=0.0):
    """The same rules written as plain recurrences over every step, without jumps."""
    s, mte2, v, mte3, v_before = setup, 0.0, 0.0, 0.0, 0.0
    free = {"x": [0.0] * depth, "y": [0.0] * depth}
    for code in codes:
        s = max(s, v_before) + scalar
        v_before = v
        ready = wait = 0.0
        for event in events[code]:
            if event[0] == "in":
                s = max(s, free["x"].pop(0))
                mte2 = ready = max(mte2, s) + event[2]
            elif event[0] == "open":
                wait = free["y"].pop(0)
            elif event[0] == "vec":
                v = max(v, s, ready, wait) + event[1]
            elif event[0] == "free":
                free["x"].append(v)
            elif event[0] == "out":
                mte3 = max(mte3, v) + event[2]
                free["y"].append(mte3)
    return max(s, mte2, v, mte3)


@pytest.mark.parametrize(
    ("depth", "period"),
    [(1, 100 + 60), (2, 100), (3, 100)],  # one buffer: read then work; two: the longest unit
)
def test_queue_depth_overlaps_units(depth, period):
    result = run_core(np.zeros((1, 200), int), [step(100.0, 60.0, 50.0)], {"x": depth, "y": depth})

    assert result.cycles == pytest.approx(200 * period + (50 if depth == 1 else 110), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.tuples(CYCLES, CYCLES, CYCLES), min_size=1, max_size=3),
    pattern=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=6),
    rows=st.integers(1, 12),
    depth=st.integers(1, 3),
    setup=st.floats(0.0, 900.0),
    scalar=st.floats(0.0, 60.0),
)
def test_jumping_over_equal_steps_changes_no_time(kinds, pattern, rows, depth, setup, scalar):
    row = [c % len(kinds) for c, n in pattern for _ in range(n)]
    codes = np.array([row] * rows)
    events = [step(*k) for k in kinds]

    fast = run_core(codes, events, {"x": depth, "y": depth}, setup=setup, scalar_step=scalar).cycles

    assert fast == pytest.approx(by_hand(codes.reshape(-1), events, depth, setup, scalar), rel=1e-9)


def test_a_million_equal_steps_cost_a_dozen():
    result = run_core(np.zeros((1000, 1000), int), [step(90.0, 60.0, 50.0)], {"x": 2, "y": 2})

    assert result.steps == 1_000_000 and result.simulated_steps < 100


def test_recorded_intervals_do_not_overlap_on_a_unit():
    result = run_core(np.zeros((1, 100), int), [step(90.0, 120.0, 50.0)], {"x": 2, "y": 2}, setup=30.0, record=200)

    assert len(result.intervals) == 200
    for unit in ("MTE2", "V", "MTE3", "S"):
        mine = [i for i in result.intervals if i.unit == unit]
        assert all(a.end <= b.start + 1e-9 for a, b in zip(mine, mine[1:]))


def test_sync_drains_every_unit():
    events = [[("in", "x", 10.0), ("vec", 5.0), ("free", "x"), ("sync", 100.0), ("vec", 1.0)]]

    assert run_core(np.zeros((1, 1), int), events, {}).cycles == 10 + 5 + 100 + 1


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 5000),
    d=st.integers(1, 12_000),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    chip=st.sampled_from(["910b1", "910b2", "910b4", "310p", "950", "generic"]),
    depth=st.integers(1, 2),
    cache=st.sampled_from(["warm", "cold"]),
)
def test_the_timeline_never_beats_the_roofline(n, d, dtype, chip, depth, cache):
    plan = TilePlan(queue_depth=depth)
    (k,) = simulate(demos.rms_norm, ((n, d), dtype), ((d,), dtype), chip=chip, plan=plan, cache=cache).kernels

    assert k.total_us > k.traffic.bound_us
    assert k.core_us >= max(k.busy_us.values()) * (1 - 1e-9)
    assert k.fraction <= 1.0


@pytest.mark.parametrize("name", ["rms_norm", "channel_stats"])
def test_two_buffers_are_never_slower_than_one(name):
    fn = getattr(demos, name)
    args = fn.example_arrays((8192, 1024), "float32")
    one, two = (simulate(fn, *args, plan=TilePlan(queue_depth=d)).total_us for d in (1, 2))

    assert two < one
