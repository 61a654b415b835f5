"""The command line: the demo's effect on a short run, and what bad arguments say before anything is written."""

import json

import pytest
from rich.console import Console

from tests.train.tiny import write_tiny_data
from train import demo
from train.__main__ import main
from train.config import Classify, Demo
from train.errors import ConfigError
from train.log import read
from train.models import NormChoice, build, single_value_norms
from train.plots import plot_curves

FIELDS = {"norm", "rows_per_device", "bn_span", "test_error", "statistics_collectives_per_step", "seconds"}


def test_local_batch_norm_collapses_at_two_rows_and_the_others_do_not(tmp_path, capsys):
    demo.run(Demo(epochs=2, out=tmp_path / "demo"), console=Console(width=80))

    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    by_norm = {record["norm"]: record for record in summary}
    assert list(by_norm) == ["local_bn", "sync_bn", "ghost_bn", "group_norm"]
    assert all(set(record) == FIELDS for record in summary)
    assert by_norm["local_bn"]["test_error"] > 20
    assert max(by_norm[norm]["test_error"] for norm in ("sync_bn", "ghost_bn", "group_norm")) < 10
    assert [record["bn_span"] for record in summary] == [2, 16, 8, None]
    # three layers, one collective forward and one backward each
    assert [record["statistics_collectives_per_step"] for record in summary] == [0, 6, 6, 0]
    table = capsys.readouterr().out
    assert all(name in table for name in ("local BN", "SyncBN", "Ghost BN", "GroupNorm", "BN span"))
    assert (tmp_path / "demo" / "curves.png").read_bytes().startswith(b"\x89PNG")
    records = read(tmp_path / "demo" / "metrics.jsonl")
    ends = [
        (record["norm"], record["test_error"])
        for record in records
        if record.get("epoch") == 2 and "test_error" in record
    ]
    assert ends == [(record["norm"], record["test_error"]) for record in summary]


@pytest.mark.parametrize(("norm", "devices", "rows", "warned"), [
    ("local_bn", 2, 1, True), ("local_bn", 2, 2, False), ("sync_bn", 2, 1, False), ("sync_bn", 1, 1, True),
    ("group_norm", 1, 1, False),
])  # fmt: skip
def test_norms_of_one_value_are_warned_of_once_before_training(norm, devices, rows, warned, tmp_path, capsys):
    data = write_tiny_data(tmp_path / "data", train_rows=devices * rows * 2, test_rows=3)
    command = f"classify --devices {devices} --rows-per-device {rows} --norm {norm} --epochs 1"

    assert main(f"{command} --data-dir {data} --out {tmp_path / 'out'}".split()) == 0

    printed = capsys.readouterr().out
    assert printed.count("Warning") == warned
    if warned:
        before, _, after = printed.partition("Warning: BatchNorm_0, BatchNorm_1, BatchNorm_2 of " + norm)
        assert "one value per channel (`rows_per_device` is 1, BN span 1)" in after and "--rows-per-device" in after
        assert "epoch 1/1" not in before and "epoch 1/1" in after


def test_the_resnet_s_norms_are_warned_of_where_a_picture_shrinks_to_one_pixel():
    choice = NormChoice("local_bn", rows_per_device=1, devices=2)
    norms = single_value_norms(build("resnet", choice, classes=3), choice, (4, 4, 1))
    assert norms == ["Block_2/BatchNorm_0", "Block_2/BatchNorm_1", "Block_2/BatchNorm_2"]
    assert single_value_norms(build("resnet", choice, classes=3), choice, (8, 8, 1)) == []


def test_classify_writes_its_files_and_says_so(tmp_path, capsys):
    data, out = write_tiny_data(tmp_path / "data"), tmp_path / "out"

    status = main(f"classify --devices 8 --norm ghost_bn --epochs 2 --data-dir {data} --out {out}".split())

    assert status == 0
    printed = capsys.readouterr().out
    assert "8 simulated host devices × 2 rows, BN span 8 rows" in printed
    assert "epoch 2/2" in printed
    start, *rest = read(out / "metrics.jsonl")
    assert (start["event"], start["bn_span"], start["steps"], start["devices"]) == ("start", 8, 20, 8)
    assert [record["step"] for record in rest if record["event"] == "step"] == [10, 20]
    assert all(0 < record["rows_per_second"] for record in rest if record["event"] == "step")
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "summary.json",
        "curves.png",
        "checkpoints",
    }


BAD_ARGUMENTS = {
    "--epochs 0": "`epochs` is 0; expected at least 1",
    "--rows-per-device 0": "`rows_per_device` is 0",
    "--steps-in-flight 0": "`steps_in_flight` is 0",
    "--learning-rate -1": "`learning_rate` is -1.0",
    "--learning-rate nan": "`learning_rate` is nan",
    "--momentum 1": "`momentum` is 1.0; expected 0 to below 1",
    "--seed -1": "`seed` is -1",
    "--resume --overwrite": "`resume` continues an earlier run",
    "--devices 9": "`devices` is 9, but JAX has already started with 8",
    "--devices 8 --rows-per-device 21": "168 rows per step; data has 160 training rows",
    "--devices 8 --norm ghost_bn --virtual-batch-size 5": "`virtual_batch_size` is 5 rows",
    "--data-dir /nonexistent": "/nonexistent is not a directory",
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_bad_arguments_are_named_before_anything_is_written(tmp_path, capsys, arguments):
    data, out = write_tiny_data(tmp_path / "data"), tmp_path / "out"

    status = main(f"classify --data-dir {data} --out {out} {arguments}".split())

    assert status == 2
    assert BAD_ARGUMENTS[arguments] in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments", ["classify --norm batch", "classify --mode vmap", "classify --epochs ten", "train"]
)
def test_words_that_are_not_choices_are_refused_by_the_parser(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2


@pytest.mark.parametrize("name", ["file", "file/below"])
@pytest.mark.parametrize("command", ["classify", "demo"])
def test_out_must_be_a_directory(tmp_path, capsys, command, name):
    (tmp_path / "file").write_text("mine")

    assert main([command, "--out", str(tmp_path / name), "--devices", "8"]) == 2
    assert f"`out`: {tmp_path / name} cannot be made a directory" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_an_interrupt_says_how_to_continue(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("train.classify.run", interrupted)

    assert main(["classify"]) == 130
    assert "--resume" in capsys.readouterr().err


def test_a_damaged_config_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON"):
        Classify(resume=True).check_same_run("{", source=tmp_path / "config.json")


@pytest.mark.parametrize("loss, error", [(1.0, 2.0), (1.0, 0.0), (None, 90.0)])
def test_curves_are_drawn_of_any_norm_and_of_zeros_and_divergence(tmp_path, loss, error):
    records = [{"event": "epoch", "norm": "other", "epoch": 1, "train_loss": loss, "test_error": error}]

    plot_curves(records, tmp_path / "curves.png", title="")

    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_config_and_choice_agree_on_the_default_ghost_batch():
    assert NormChoice("ghost_bn", Demo().rows_per_device, Demo().devices).span == 8
