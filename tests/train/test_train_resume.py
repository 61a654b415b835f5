"""A run that was stopped or killed continues to the bits and the log of an unbroken run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from tests.train.tiny import write_tiny_data
from train import classify
from train.checkpoint import Checkpoints
from train.config import Classify
from train.display import Display
from train.errors import ConfigError, UserError
from train.log import Log, read

ROOT = Path(__file__).resolve().parents[2]


def settings(tmp_path, name, **options):
    data = write_tiny_data(tmp_path / "data")
    options = {"devices": 8, "epochs": 3, "checkpoint_every": 7, "log_every": 3, "learning_rate": 0.1, **options}
    return Classify(data_dir=data, out=tmp_path / name, **options)


def run(config):
    return classify.run(config, console=Console(quiet=True))


def final_state(config):
    """Leaves of the last checkpoint, and the log's lines without times."""
    job = classify.prepare(config)
    with Checkpoints(config.out / "checkpoints") as checkpoints:
        state, totals = checkpoints.restore(job.fresh_state())
    records = [
        {key: value for key, value in record.items() if key != "rows_per_second"}
        for record in read(config.out / "metrics.jsonl")
    ]
    return jax.tree.leaves(jax.device_get(state)), totals, records


def assert_same_end(one, two):
    (leaves, totals, records), (other_leaves, other_totals, other_records) = final_state(one), final_state(two)
    for a, b in zip(leaves, other_leaves, strict=True):
        np.testing.assert_array_equal(a, b)
    assert totals == other_totals
    assert records == other_records


@pytest.mark.parametrize("norm, mode", [("local_bn", "shard_map"), ("sync_bn", "jit")])
def test_a_stopped_run_continues_to_the_same_bits(tmp_path, monkeypatch, norm, mode):
    whole = settings(tmp_path, "whole", norm=norm, mode=mode)
    run(whole)

    def stop_at_17(self, report):
        if report.step == 17:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Display, "step", stop_at_17)
        with pytest.raises(KeyboardInterrupt):
            run(settings(tmp_path, "broken", norm=norm, mode=mode))
    resumed = settings(tmp_path, "broken", norm=norm, mode=mode, resume=True)
    summary = run(resumed)

    assert_same_end(whole, resumed)
    assert summary["test_error"] == read(whole.out / "metrics.jsonl")[-1]["test_error"]


def test_a_killed_process_continues_to_the_same_bits(tmp_path):
    """SIGKILL after the second epoch is announced; the process also sets up its 8 host devices by itself."""
    whole = settings(tmp_path, "whole", epochs=6)
    run(whole)
    broken = settings(tmp_path, "broken", epochs=6)
    options = f"--devices 8 --epochs 6 --checkpoint-every 7 --log-every 3 --learning-rate 0.1 --out {broken.out}"
    command = [sys.executable, "-m", "train", "classify", *options.split(), "--data-dir", str(broken.data_dir)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("epoch 2/6"):
                process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)

    with Checkpoints(broken.out / "checkpoints") as checkpoints:
        assert 14 <= checkpoints.latest() < 60
    resumed = settings(tmp_path, "broken", epochs=6, resume=True)
    run(resumed)

    assert process.returncode == -signal.SIGKILL
    assert_same_end(whole, resumed)


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    config = settings(tmp_path, "run", epochs=1)
    first = run(config)
    log = (config.out / "metrics.jsonl").read_text()
    again = run(settings(tmp_path, "run", epochs=1, resume=True))

    assert again["test_error"] == first["test_error"]
    assert (config.out / "metrics.jsonl").read_text() == log


def test_resume_with_other_settings_is_refused(tmp_path):
    run(settings(tmp_path, "run", epochs=1))

    with pytest.raises(ConfigError, match="`epochs` was 1 and is now 2"):
        run(settings(tmp_path, "run", epochs=2, resume=True))


def test_a_run_is_not_overwritten_unasked(tmp_path):
    config = settings(tmp_path, "run", epochs=1)
    run(config)
    (config.out / "notes.txt").write_text("mine")

    with pytest.raises(ConfigError, match="--resume"):
        run(config)
    run(settings(tmp_path, "run", epochs=1, norm="layer_norm", overwrite=True))

    assert json.loads((config.out / "summary.json").read_text())["norm"] == "layer_norm"
    assert (config.out / "notes.txt").read_text() == "mine"
    assert (config.out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    config = settings(tmp_path, "run", epochs=1)
    run(config)
    other = classify.prepare(settings(tmp_path, "other", norm="group_norm"))

    with Checkpoints(config.out / "checkpoints") as checkpoints, pytest.raises(UserError, match="step 10"):
        checkpoints.restore(other.fresh_state())


def test_an_empty_directory_has_no_checkpoint(tmp_path):
    job = classify.prepare(settings(tmp_path, "run"))

    with Checkpoints(tmp_path / "none") as checkpoints, pytest.raises(UserError, match="no checkpoint"):
        checkpoints.restore(job.fresh_state())


def test_a_resumed_log_loses_later_records_and_a_line_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Log(path, fixed={"norm": "sync_bn"}) as log:
        log.write("start")
        for step in (3, 6, 9):
            log.write("step", step=step)
    path.write_text(path.read_text() + '{"event": "st')

    with Log(path, resume_step=6) as log:
        log.write("step", step=7)

    assert [(record["event"], record.get("step")) for record in read(path)] == [
        ("start", None),
        ("step", 3),
        ("step", 6),
        ("step", 7),
    ]


def test_a_log_is_json_whatever_the_values_and_names_a_damaged_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Log(path) as log:
        log.write("step", step=1, loss=float("nan"), accuracy=0.5)
    assert read(path) == [{"event": "step", "step": 1, "loss": None, "accuracy": 0.5}]

    path.write_text("{}\n{damaged}\n")
    with pytest.raises(UserError, match="line 2 is not JSON"):
        read(path)
