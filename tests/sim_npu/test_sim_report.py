"""What a person or another tool reads: text, HTML, pictures, CSV, traces, hints, comparisons."""

import csv
import io
import json
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from sim_npu import TilePlan, best_plan, compare, demos, explain, hints, rank_plans, simulate
from sim_npu.export import OP_SUMMARY, THREADS, op_summary_csv, trace_json
from sim_npu.pictures import lanes_svg, roofline_svg, ub_svg

ARGS = ((4096, 4096), "bfloat16"), ((4096,), "bfloat16")


@pytest.fixture(scope="module")
def report():
    return simulate(demos.rms_norm, *ARGS)


def test_the_text_says_it_is_a_model_and_carries_profiler_columns_and_sources(report):
    text = str(report)

    assert "a model, not a measurement" in text
    assert all(
        c in text for c in ("Task Duration(us)", "Block Dim", "aiv_mte2_time(us)", "aiv_vec_ratio", "aiv_mte3_ratio")
    )
    assert f"{report.kernels[0].fraction:.0%} of the vector bound" in text and "bound by V" in text
    assert all(word in text for word in ("documented", "fitted", "assumed", "issue efficiency", "stall"))


def test_shares_of_operations_add_up_to_the_vector_time(report):
    from sim_npu.report import operation_rows

    k = report.kernels[0]
    assert sum(r[4] for r in operation_rows(k)) == pytest.approx(k.busy_us["V"], rel=0.02)


class _Balanced(HTMLParser):
    void = {"br", "hr", "img", "wbr"}

    def __init__(self):
        super().__init__()
        self.open, self.tables = [], 0

    def handle_starttag(self, tag, attrs):
        self.tables += tag == "table"
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass


def test_the_html_is_balanced_and_holds_the_pictures(report):
    page = report._repr_html_()
    parser = _Balanced()

    parser.feed(page)

    assert parser.open == [] and parser.tables == 1
    assert page.count("<svg") == 3


@pytest.mark.parametrize(
    "draw", [lambda r: lanes_svg(r.kernels[0], 1800.0, max_us=8.0), lambda r: ub_svg(r.kernels[0]), roofline_svg]
)
def test_pictures_are_well_formed_and_stay_inside_their_frame(report, draw):
    root = ElementTree.fromstring(draw(report))
    width, height = float(root.get("width")), float(root.get("height"))

    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.get("x", 0)) + float(box.get("width")) <= width + 1
        assert float(box.get("y", 0)) + float(box.get("height")) <= height + 1
    assert len(list(root)) > 10


def test_boxes_of_the_buffer_picture_are_the_tenants(report):
    root = ElementTree.fromstring(ub_svg(report.kernels[0]))
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]

    assert len(titles) == sum(t.copies for t in report.kernels[0].ub.tenants)


def test_csv_has_op_summarys_columns_and_one_row_per_kernel():
    report = simulate(demos.channel_stats, ((4096, 256), "bfloat16"))
    rows = list(csv.DictReader(io.StringIO(op_summary_csv(report))))

    assert len(OP_SUMMARY) == 46 and OP_SUMMARY[4] == "Op Name" and OP_SUMMARY[-1] == "cube_utilization(%)"
    assert [r["Op Name"] for r in rows] == ["channel_partials", "channel_merge"]
    assert float(rows[1]["Task Start Time(us)"]) == pytest.approx(report.kernels[0].total_us, abs=1e-3)
    assert rows[0]["Input Shapes"] == "4096,256" and rows[0]["Input Data Types"] == "DT_BF16"


def test_the_trace_keeps_to_the_trace_event_format(report):
    trace = json.loads(trace_json(report))
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}

    assert {e["ph"] for e in trace["traceEvents"]} == {"X", "M"}
    assert {names[t] for t in THREADS.values()} == {"S", "MTE2", "V", "MTE3"}
    assert len(complete) > 100
    for e in complete:
        assert e["ts"] >= 0 and e["dur"] > 0 and isinstance(e["pid"], int) and e["tid"] in names
    for tid in THREADS.values():  # a unit does one thing at a time
        mine = sorted((e["ts"], e["dur"]) for e in complete if e["tid"] == tid)
        assert all(a[0] + a[1] <= b[0] + 1e-3 for a, b in zip(mine, mine[1:]))


def test_hints_are_simulated_ranked_and_come_true():
    plan = TilePlan(queue_depth=1, bank_pad=False, cores=24)
    slow = simulate(demos.rms_norm, *ARGS, plan=plan)

    found = hints(demos.rms_norm, *ARGS, plan=plan, report=slow)

    gains = [h.gain_us for h in found]
    assert gains == sorted(gains, reverse=True) and gains[0] > 0
    assert next(h.knob for h in found if "queue depth" in h.text) == "enable_double_buffer"
    assert next(h.knob for h in found if "all cores" in h.text) == "scheduler_policy=balanced"
    assert "[enable_double_buffer]" in " ".join(map(str, found))
    assert any("queue depth 2 hides" in h.text for h in found) and any("all cores" in h.text for h in found)
    for hint in found:
        if hint.plan is not None:
            assert slow.total_us - simulate(demos.rms_norm, *ARGS, plan=hint.plan).total_us == pytest.approx(
                hint.gain_us
            )


def test_a_chip_without_datacopypad_is_warned_about_odd_rows():
    args = ((64, 1001), "float16"), ((1001,), "float16")

    assert any("no DataCopyPad" in h.text for h in hints(demos.rms_norm, *args, chip="310p"))
    assert not any("no DataCopyPad" in h.text for h in hints(demos.rms_norm, *args, chip="910b2"))


def test_the_best_plan_is_the_fastest_of_all_that_fit():
    search = rank_plans(demos.rms_norm, *ARGS)
    totals = [r.total_us for r in search.reports]

    assert totals == sorted(totals) and search.rejected
    assert best_plan(demos.rms_norm, *ARGS) == search.best.plan
    assert search.table(3).count("\n") == 4


def test_explain_and_compare_name_the_bound_and_the_change(report):
    slow = simulate(demos.rms_norm, *ARGS, plan=TilePlan(queue_depth=1))

    assert "speed of light" in explain(demos.rms_norm, *ARGS) and "mostly in0 32 KiB" in explain(demos.rms_norm, *ARGS)
    assert f"{report.total_us / slow.total_us - 1:+.1%}" in compare([slow, report])
    with pytest.raises(ValueError, match="`reports` must be a list of reports, at least one"):
        compare([])


def test_a_steps_picture_has_one_box_per_kernel():
    from sim_npu import simulate_step
    from sim_npu.pictures import step_svg

    step = simulate_step(lambda x, w: (x @ w).sum(), ((64, 64), "float16"), ((64, 64), "float16"))
    root = ElementTree.fromstring(step_svg(step))

    assert len(list(root.iter("{http://www.w3.org/2000/svg}title"))) == len(step.ops) > 2
    assert step._repr_html_().startswith("<div><svg")
