"""The job `classify`: data, model, loop, log, checkpoints and curves put together."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh
from rich.console import Console

from normlib.collectives import count_collectives
from train.batches import Batches
from train.checkpoint import Checkpoints
from train.config import Classify
from train.data import Dataset, load
from train.display import Display, say
from train.errors import ConfigError
from train.log import Log, read, write_atomically
from train.loop import NO_TOTALS, EpochReport, Report, Totals, fit, make_evaluate
from train.models import NormChoice, build, single_value_norms
from train.parallel import State, Step, axis_name, init_state, make_mesh, make_place, make_step
from train.plots import plot_curves

_OUTPUTS = ("config.json", "metrics.jsonl", "summary.json", "curves.png", "checkpoints")


@dataclass(frozen=True)
class Job:
    """All that a run needs, built and checked before anything is written."""

    config: Classify
    data: Dataset
    mesh: Mesh
    choice: NormChoice
    model: nn.Module
    batches: Batches
    optimizer: optax.GradientTransformation
    step: Step

    @property
    def total_steps(self) -> int:
        return self.config.epochs * self.batches.steps_per_epoch

    def fresh_state(self) -> State:
        sample = np.zeros((1, *self.data.image_shape), np.float32)
        return init_state(
            self.model, self.optimizer, sample, mesh=self.mesh, mode=self.config.mode, seed=self.config.seed
        )

    def summary(self, *, test_error: float, seconds: float, collectives: int | None) -> dict[str, Any]:
        """One record of `summary.json`; `test_error` is a share and becomes per cent."""
        return {
            "norm": self.config.norm,
            "rows_per_device": self.config.rows_per_device,
            "bn_span": self.choice.span,
            "test_error": round(100 * test_error, 4),
            "statistics_collectives_per_step": collectives,
            "seconds": round(seconds, 2),
        }


def prepare(config: Classify, *, data: Dataset | None = None) -> Job:
    """Everything that a run needs.

    Args:
      data: already read; None to read what `config` names.

    Raises:
      UserError: settings, devices or files that cannot be used.
    """
    mesh = make_mesh(config.devices)
    data = load(config.data_dir) if data is None else data
    choice = NormChoice(
        config.norm,
        rows_per_device=config.rows_per_device,
        devices=mesh.size,
        axis_name=axis_name(config.mode),
        virtual_batch_size=config.virtual_batch_size,
        momentum=config.norm_momentum,
    )
    size = config.rows_per_device * mesh.size
    if size > len(data.train_labels):
        raise ConfigError(
            f"`rows_per_device` is {config.rows_per_device} on {mesh.size} device(s), {size} rows per step; "
            f"{data.name} has {len(data.train_labels)} training rows."
        )
    batches = Batches(
        data.train_images,
        data.train_labels,
        size=size,
        seed=config.seed,
        peak=data.peak,
        shard=jax.process_index(),
        shards=jax.process_count(),
    )
    schedule = optax.cosine_decay_schedule(config.learning_rate, config.epochs * batches.steps_per_epoch)
    optimizer = optax.sgd(schedule, momentum=config.momentum)
    model = build(config.model, choice, classes=data.classes)
    step = make_step(model, optimizer, mesh=mesh, mode=config.mode)
    return Job(config, data, mesh, choice, model, batches, optimizer, step)


def statistics_collectives(job: Job, state: State) -> int | None:
    """Collectives per step for the statistics of all norm layers, forward and backward, run in every step.

    None in mode `jit`: there the compiler makes the collectives and may serve statistics and gradients by one.
    """
    if job.config.mode == "jit":
        return None
    place = make_place(job.mesh, job.config.mode)
    images, labels = (place(part) for part in next(job.batches.between(0, 1)))
    text = job.step.lower(state, images, labels).as_text()  # type: ignore[attr-defined]
    return count_collectives(text, parameters=state.params).statistics


def train(
    job: Job,
    state: State,
    log: Log,
    display: Display,
    *,
    totals: Totals = NO_TOTALS,
    on_save: Callable[[State, Totals], None] = lambda state, totals: None,
    epoch_lines: bool = True,
) -> float:
    """Run a job to its end; returns the last epoch's share of test errors."""
    config, data = job.config, job.data
    evaluate = make_evaluate(job.model, data.test_images, data.test_labels, peak=data.peak, mesh=job.mesh)
    test_error = float("nan")
    display.begin(config.norm, steps=job.total_steps, done=int(state.step))

    def on_step(report: Report):
        display.step(report)
        if report.step % config.log_every == 0:
            log.write("step", **asdict(report))

    def on_epoch(report: EpochReport):
        nonlocal test_error
        test_error = report.test_error
        values = asdict(report)
        percent = {name: round(100 * values[name], 4) for name in ("train_error", "test_error")}
        log.write("epoch", **{**values, **percent})
        if epoch_lines:
            display.epoch(report, epochs=config.epochs)

    fit(
        job.step,
        state,
        job.batches,
        mesh=job.mesh,
        mode=config.mode,
        epochs=config.epochs,
        evaluate=evaluate,
        totals=totals,
        in_flight=config.steps_in_flight,
        save_every=config.checkpoint_every,
        on_step=on_step,
        on_epoch=on_epoch,
        on_save=on_save,
    )
    return test_error


def run(config: Classify, *, console: Console) -> dict[str, Any]:
    """Train, and write config.json, metrics.jsonl, checkpoints, summary.json and curves.png under `config.out`.

    Returns:
      The record of summary.json.

    Raises:
      UserError: before anything is written.
    """
    job = prepare(config)
    claim(config)
    started = time.perf_counter()
    state, totals = job.fresh_state(), Totals()
    collectives = statistics_collectives(job, state)
    log_path = config.out / "metrics.jsonl"
    with Checkpoints(config.out / "checkpoints") as checkpoints:
        resumed = checkpoints.latest()
        if resumed is not None:
            state, totals = checkpoints.restore(state)
            say(console, f"Continuing {config.out} after step {resumed} of {job.total_steps}.")
        say(console, describe(job))
        warn(job, console)
        with Log(log_path, fixed={"norm": config.norm}, resume_step=resumed) as log, Display(console) as display:
            if resumed is None:
                log.write("start", **header(job, collectives))
            test_error = train(job, state, log, display, totals=totals, on_save=checkpoints.save)
    records = read(log_path)
    if resumed == job.total_steps:  # it was complete: nothing ran now
        test_error = [record for record in records if record["event"] == "epoch"][-1]["test_error"] / 100
    summary = job.summary(test_error=test_error, seconds=time.perf_counter() - started, collectives=collectives)
    write_atomically(config.out / "summary.json", json.dumps(summary, indent=2) + "\n")
    plot_curves(records, config.out / "curves.png", title=f"{job.data.name}, {describe(job)}")
    return summary


def warn(job: Job, console: Console) -> None:
    """Say before training what would train in silence without learning: batch norms of one value per channel."""
    norms = single_value_norms(job.model, job.choice, job.data.image_shape)
    if norms:
        say(
            console,
            f"Warning: {', '.join(norms)} of {job.config.norm} would train on one value per channel "
            f"(`rows_per_device` is {job.config.rows_per_device}, BN span {job.choice.span}): the variance is 0 and "
            "the output is the bias, whatever the image. Give more `--rows-per-device`, `--norm sync_bn` to share "
            "statistics over devices, or `--norm group_norm`, which needs no other row.",
        )


def claim(config: Classify) -> None:
    """Make `config.out` ready: empty, or holding the run to continue; write config.json.

    Raises:
      ConfigError: it holds a run, and neither `resume` nor `overwrite` is set; it holds one with other settings; or it
        is not a directory.
    """
    out, settings = config.out, config.out / "config.json"
    make_directory(out)
    if settings.exists():
        if config.resume:
            config.check_same_run(settings.read_text(encoding="utf-8"), source=settings)
        elif not config.overwrite:
            raise ConfigError(f"`out`: {out} holds an earlier run; give `--resume`, `--overwrite` or another `--out`.")
    if not config.resume:
        clear(out)
    write_atomically(settings, config.to_json())


def make_directory(out: Path) -> None:
    """Create `out` and its parents.

    Raises:
      ConfigError: it, or a parent, is a file or cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"`out`: {out} cannot be made a directory: {error}.") from error


def clear(out: Path, names: tuple[str, ...] = _OUTPUTS) -> None:
    """Remove what a run writes, and nothing else that may lie in `out`."""
    for name in names:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def header(job: Job, collectives: int | None) -> dict[str, Any]:
    """The first record of a log: what is trained, and on what."""
    return {
        "data": job.data.name,
        "model": job.config.model,
        "mode": job.config.mode,
        "devices": job.mesh.size,
        "platform": job.mesh.devices.flat[0].platform,
        "rows_per_device": job.config.rows_per_device,
        "bn_span": job.choice.span,
        "statistics_collectives_per_step": collectives,
        "steps": job.total_steps,
        "jax": jax.__version__,
    }


def describe(job: Job) -> str:
    """One line on the run, for a person."""
    platform = job.mesh.devices.flat[0].platform
    kind = "simulated host device" if platform == "cpu" and job.mesh.size > 1 else f"{platform} device"
    many = "s" if job.mesh.size > 1 else ""
    span = "" if job.choice.span is None else f", BN span {job.choice.span} rows"
    return f"{job.config.norm}, {job.mesh.size} {kind}{many} × {job.config.rows_per_device} rows{span}"
