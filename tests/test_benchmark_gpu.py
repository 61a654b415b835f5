"""The script for whoever has a GPU: its dry run on CPU."""

import json

import pytest

from benchmarks.cases import Case
from benchmarks.gpu import __main__ as gpu


def test_a_dry_run_checks_and_reports(tmp_path, capsys):
    report = gpu.main(["--dry-run", "--json", str(tmp_path / "gpu.json")])

    assert json.loads((tmp_path / "gpu.json").read_text()) == report
    assert report["dry_run"] and not report["not_reached"]
    assert all(row["ok"] for row in report["correctness"])
    assert {"kernel_us", "xla_us", "copy_us", "gb_per_s", "xla_over_kernel"} <= set(report["speed"][0])
    assert "kernels right" in capsys.readouterr().out


def test_a_dry_run_tries_tilings(capsys):
    report = gpu.main(["--dry-run", "--tune"])
    assert {"kernel", "us", "warp_entries"} <= set(report["tuning"][1]) and "now" in capsys.readouterr().out


def test_a_dry_run_times_peers(capsys):
    report = gpu.main(["--dry-run", "--peers"])
    assert all({"pallas", "xla", "flax"} <= set(row) for row in report["peers"])
    assert {row["norm"].split()[0] for row in report["peers"]} == {
        "layer_norm", "rms_norm", "batch_norm", "group_norm"
    } and "PyTorch us" in capsys.readouterr().out  # fmt: skip


def test_it_refuses_to_measure_on_a_cpu():
    with pytest.raises(SystemExit, match="dry-run"):
        gpu.main([])


def test_a_wrong_kernel_is_reported(capsys):
    case = Case("wrong", lambda machine, x: (x + 1,), (((4,), "float32"),), lambda x: (x,))
    (row,) = gpu.correctness(gpu.MACHINES["cpu"], [case], float("inf"))
    assert not row["ok"] and "WRONG wrong" in capsys.readouterr().out


def test_what_the_time_does_not_reach_is_left_out():
    case = Case("late", lambda machine, x: (x,), (((4,), "float32"),), lambda x: (x,))
    assert gpu.correctness(gpu.MACHINES["cpu"], [case], until=0.0) == []


def test_spread_gives_every_item_once():
    items = list(range(100))
    assert sorted(gpu.spread(items)) == items
