"""The job `demo`: the same small model with four norms, at few rows per device, in one table and one picture."""

from __future__ import annotations

import json
import time
from typing import Any

from rich.console import Console

from train.checkpoint import Checkpoints
from train.classify import claim, clear, header, make_directory, prepare, statistics_collectives, train, warn
from train.config import Demo
from train.data import load_digits
from train.display import Display, say, summary_table
from train.log import Log, read, write_atomically
from train.plots import plot_curves


def run(config: Demo, *, console: Console) -> list[dict[str, Any]]:
    """Train with every norm; write metrics.jsonl, summary.json, curves.png and checkpoints under `config.out`.

    Returns:
      The records of summary.json, in the order of the table.

    Raises:
      UserError: before anything is written.
    """
    data = load_digits()
    jobs = [prepare(settings, data=data) for settings in config.runs()]
    make_directory(config.out)
    clear(config.out, ("metrics.jsonl", "summary.json", "curves.png"))
    where = f"{config.devices} devices × {config.rows_per_device} rows"
    say(
        console,
        f"Digits on {where}: {config.epochs} epochs of {jobs[0].batches.steps_per_epoch} steps, with four norms.",
    )
    summaries: list[dict[str, Any]] = []
    log_path = config.out / "metrics.jsonl"
    with Display(console) as display:
        for job in jobs:
            started = time.perf_counter()
            claim(job.config)
            warn(job, console)
            state = job.fresh_state()
            collectives = statistics_collectives(job, state)
            resume = None if job is jobs[0] else job.total_steps  # one log for all: the first run begins it
            with (
                Log(log_path, fixed={"norm": job.config.norm}, resume_step=resume) as log,
                Checkpoints(job.config.out / "checkpoints", keep=1) as checkpoints,
            ):
                log.write("start", **header(job, collectives))
                error = train(job, state, log, display, on_save=checkpoints.save, epoch_lines=False)
            seconds = time.perf_counter() - started
            summaries.append(job.summary(test_error=error, seconds=seconds, collectives=collectives))
    write_atomically(config.out / "summary.json", json.dumps(summaries, indent=2) + "\n")
    title = f"Digits, 3×128 MLP, {where}, {config.epochs} epochs"
    plot_curves(read(log_path), config.out / "curves.png", title=title)
    console.print(summary_table(summaries, title=title))
    say(console, f"Written to {config.out}: summary.json, metrics.jsonl, curves.png.")
    return summaries
