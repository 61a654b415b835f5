"""The package as a whole: what it imports, what it costs, chips and plans of one's own."""

import ast
import time
from pathlib import Path

import jax
import pytest

import sim_npu
from sim_npu import ChipSpec, TilePlan, demos, get_chip, rank_plans, simulate, simulate_step
from sim_npu.plan import enumerate_plans
from sim_npu.simulate import programs_of

FILES = sorted(Path(sim_npu.__file__).parent.rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (n.name for n in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_nothing_but_jax_and_its_companions_is_imported_and_nothing_private(path):
    allowed = {"jax", "jaxlib", "jaxtyping", "numpy", "sim_npu", "ml_dtypes", ""} | set(
        __import__("sys").stdlib_module_names
    )

    for name in imported(path):
        assert name.split(".")[0] in allowed, name
        assert "._src" not in name, name


def test_pallas_structures_are_read_in_one_file_only():
    words = ("grid_mapping", "block_mappings", "ft_in", "index_map_jaxpr", "num_index_operands")

    for path in FILES:
        if path.name != "pallas_adapter.py":
            assert not [w for w in words if w in path.read_text()], path.name


def test_the_public_names_are_exported():
    for name in (
        "simulate",
        "best_plan",
        "explain",
        "compare",
        "simulate_step",
        "hints",
        "get_chip",
        "ChipSpec",
        "TilePlan",
    ):
        assert hasattr(sim_npu, name)


def seconds(call, repeats=3):
    """Processor time of the best of a few runs: others may use the machine as well."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def test_a_plan_costs_less_than_50_ms():
    def call():
        sim_npu.simulate.__globals__["_trace_cached"].cache_clear()
        simulate(demos.rms_norm, ((4096, 8192), "bfloat16"), ((8192,), "bfloat16"))

    assert seconds(call) < 0.05


def test_a_hundred_plans_cost_less_than_two_seconds():
    args = ((4096, 8192), "bfloat16"), ((8192,), "bfloat16")
    tilings = [t for t in programs_plans(args) if t.queue_depth == 2]
    plans = (tilings * 10)[:50] + [t.replace(queue_depth=1) for t in (tilings * 10)[:50]]

    def call():
        sim_npu.simulate.__globals__["_trace_cached"].cache_clear()
        rank_plans(demos.rms_norm, *args, plans=plans)

    assert len(plans) == 100 and seconds(call, 2) < 2.0


def programs_plans(args):
    return enumerate_plans(demos.rms_norm, *(jax.ShapeDtypeStruct(s, d) for s, d in args))


def test_python_work_does_not_grow_with_rows():
    plan = TilePlan(rows=1, chunk=1024, residency="row")
    few, many = (
        simulate(demos.rms_norm, ((n, 8192), "bfloat16"), ((8192,), "bfloat16"), plan=plan).kernels[0]
        for n in (16384, 65536)
    )

    assert many.timeline.steps == 65536 // 48 + 1
    assert many.timeline.simulated_steps <= few.timeline.simulated_steps + 5


def test_a_chip_of_ones_own_goes_through_the_same_calls():
    args = ((8192, 4096), "float32"), ((4096,), "float32")
    base = get_chip("910b2")
    stacked = base.replace(name="stacked memory", chip_gbps=4 * base.chip_gbps)
    more = base.replace(name="96 cores", cores=96)
    large = base.replace(name="large buffer", ub_bytes=1 << 20)

    times = {c.name: simulate(demos.rms_norm, *args, chip=c, cache="cold").total_us for c in (base, stacked, more)}
    assert times["stacked memory"] < times["910b2"]
    assert times["96 cores"] < times["910b2"]
    big = TilePlan(rows=8, residency="row")
    with pytest.raises(sim_npu.CapacityError):
        simulate(demos.rms_norm, *args, chip=base, plan=big)
    assert simulate(demos.rms_norm, *args, chip=large, plan=big).kernels[0].ub.fits
    assert stacked.provenance("chip_gbps").source == "user"
    assert base.provenance("cores").confidence == "documented"


def test_a_whole_chip_can_be_described_from_nothing():
    tiny = ChipSpec("tiny", 2, 1, 500.0, 64 * 1024, 1 << 20, 1 << 30, chip_gbps=50.0, l2_gbps=100.0)

    report = simulate(demos.channel_stats, ((4096, 64), "float32"), chip=tiny)
    assert report.kernels[0].schedule.cores == 2 and "tiny" in str(report)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_chip("910z"), "`chip` must be one of 910b1, .*'910z'"),
        (lambda: get_chip("910b2").replace(core=3), "`core` is not a field of ChipSpec; the fields are name, cores"),
        (lambda: get_chip("910b2").replace(cores=0), "`cores` of a ChipSpec must be a positive whole number; got 0"),
        (lambda: TilePlan(rows=0), "`rows` of a TilePlan must be a whole number of at least 1, or None; got 0"),
        (lambda: TilePlan(queue_depth=0), "`queue_depth` of a TilePlan must be a whole number of at least 1; got 0"),
        (lambda: TilePlan(residency="both"), "`residency` of a TilePlan must be one of.*'both'"),
        (lambda: simulate_step(lambda x: x, ((4,), "float32"), formats="nz"), "`formats` must be one of.*'nz'"),
    ],
)
def test_mistakes_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_traced_tiling_is_shared_by_plans_of_other_depths():
    args = ((64, 512), "float32"), ((512,), "float32")

    a, b = (programs_of(demos.rms_norm, *args, plan=TilePlan(rows=2, queue_depth=d)) for d in (1, 2))
    assert a is b


def test_python_work_does_not_grow_with_the_chunks_of_a_row():
    plan = TilePlan(rows=1, chunk=4096, residency="stream")

    def call():
        simulate(demos.rms_norm, ((4, 10**8), "float16"), ((10**8,), "float16"), plan=plan)

    call()  # traced
    assert seconds(call) < 0.5
