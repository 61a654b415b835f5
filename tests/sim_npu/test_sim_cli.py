"""The command line."""

import csv
import json

import pytest

from sim_npu.cli import arguments, load, main, parse_shape

ROW_NORM = ["sim_npu.demos:rms_norm", "--shape", "4096x2048", "--dtype", "bf16"]


def test_report_prints_time_and_hints_and_writes_files(capsys, tmp_path):
    code = main(
        ["report", *ROW_NORM, "--depth", "1", "--csv", str(tmp_path / "a.csv"), "--html", str(tmp_path / "a.html")]
    )

    out = capsys.readouterr().out
    assert code == 0 and "rms_norm on 910b2" in out and "queue depth 2 hides" in out
    assert [r["Op Name"] for r in csv.DictReader((tmp_path / "a.csv").open())] == ["rms_norm"]
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "queue depth 2 hides" in page and "utf-8" in page


def test_plans_are_printed_fastest_first(capsys):
    assert main(["plans", *ROW_NORM, "--top", "4", "--chip", "950"]) == 0

    lines = capsys.readouterr().out.splitlines()
    times = [float(line.split()[0]) for line in lines[2:6]]
    assert times == sorted(times)


def test_a_trace_is_written(capsys, tmp_path):
    assert main(["trace", *ROW_NORM, "-o", str(tmp_path / "t.json")]) == 0

    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "perfetto" in capsys.readouterr().out


def test_keywords_and_one_shape_per_argument(capsys):
    shapes = ["--shape", "4x32x256", "--shape", "32", "--shape", "32"]

    assert main(["report", "sim_npu.demos:group_norm", *shapes, "--dtype", "fp16", "--set", "groups=8"]) == 0
    assert "group_norm on 910b2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["report", "sim_npu.demos", "--shape", "8x8"], "must be module:function"),
        (["report", "sim_npu.demos:nothing", "--shape", "8x8"], "has no 'nothing'"),
        (["report", "no_such_module:f", "--shape", "8x8"], "No module named"),
        (["report", "sim_npu.demos:rms_norm", "--shape", "8xa"], "sizes joined by x.*'8xa'"),
        (["report", "sim_npu.demos:rms_norm", "--shape", "8x0"], "sizes joined by x.*'8x0'"),
        (["report", "sim_npu.demos:rms_norm", "--shape", "8x8", "--dtype", "f31"], "`--dtype` must be a dtype"),
        (["report", "sim_npu.demos:rms_norm", "--shape", "8x8", "--set", "eps"], "`--set` must be name=value"),
        (["report", "sim_npu.demos:rms_norm", "--shape", "8x8", "--profile", "fast"], "`profile` must be 'ideal'"),
        (
            ["report", "sim_npu.demos:rms_norm", "--shape", "8x8", "--profile", "as_shipped", "--chip", "310p"],
            "no measurements on 310p",
        ),
        (
            ["report", "sim_npu.demos:rms_norm", "--shape", "9x70000", "--residency", "row", "--rows", "9"],
            "biggest tenants",
        ),
    ],
)
def test_mistakes_are_one_line_on_stderr(argv, message, capsys):
    import re

    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and re.search(message, err)


def test_more_dtypes_than_shapes_are_refused():
    with pytest.raises(ValueError, match="`--dtype` must be given once or once per `--shape`"):
        arguments(load("sim_npu.demos:rms_norm"), ["8x8", "8"], ["bf16", "bf16", "bf16"])


def test_shapes_read_like_the_profilers():
    assert parse_shape("4096X128") == (4096, 128)
