"""What a person sees: one live line of progress, a line per epoch or run, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from train.loop import EpochReport, Report

NAMES = {
    "local_bn": "local BN",
    "sync_bn": "SyncBN",
    "ghost_bn": "Ghost BN",
    "group_norm": "GroupNorm",
    "layer_norm": "LayerNorm",
}


def say(console: Console, text: str) -> None:
    """Print a line of prose as it is: unbroken, numbers and brackets of paths left alone."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


class Display:
    """Progress of one run after the other. Use as a context manager.

    Args:
      console: where to write. On a terminal the line is live; in a file only the lines per epoch appear.
    """

    def __init__(self, console: Console):
        self.console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description:<9}"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TextColumn("[magenta]{task.fields[speed]:>12}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._loss = self._accuracy = 0.0

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, norm: str, *, steps: int, done: int = 0) -> None:
        """A new line of progress, for `steps` steps of which `done` are done."""
        state = f"{'compiling …':<24}"  # as wide as what follows
        self._task = self._progress.add_task(NAMES.get(norm, norm), total=steps, completed=done, state=state, speed="")
        self._fresh = True

    def step(self, report: Report) -> None:
        """Move the line on. Loss and accuracy are smoothed over about 20 steps, for a batch of 16 rows is noisy."""
        keep = 0.0 if self._fresh else 0.95
        self._fresh = False
        self._loss = keep * self._loss + (1 - keep) * report.loss
        self._accuracy = keep * self._accuracy + (1 - keep) * report.accuracy
        speed = f"{report.rows_per_second:,.0f} rows/s" if report.rows_per_second else ""
        state = f"loss {self._loss:6.3f} accuracy {self._accuracy:4.0%}"
        self._progress.update(self._task, completed=report.step, state=state, speed=speed)

    def epoch(self, report: EpochReport, *, epochs: int) -> None:
        """One line for a finished epoch."""
        say(
            self.console,
            f"epoch {report.epoch:>{len(str(epochs))}}/{epochs}"
            f"   train loss {report.train_loss:.3f}, error {100 * report.train_error:5.2f} %"
            f"   test loss {report.test_loss:.3f}, error {100 * report.test_error:5.2f} %",
        )


def summary_table(rows: Sequence[Mapping], *, title: str) -> Table:
    """The table of a comparison: one row per norm, as in `summary.json`."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    table.add_column("norm")
    for heading in ("test error", "BN span\n(rows)", "statistics\ncollectives\nper step", "time"):
        table.add_column(heading, justify="right")
    best = min(row["test_error"] for row in rows)
    for row in rows:
        error = f"{row['test_error']:.2f} %"
        style = "bold green" if row["test_error"] == best else "red" if row["test_error"] > 10 else ""
        collectives = row["statistics_collectives_per_step"]
        table.add_row(
            NAMES.get(row["norm"], row["norm"]),
            f"[{style}]{error}[/{style}]" if style else error,
            "–" if row["bn_span"] is None else str(row["bn_span"]),
            "–" if collectives is None else str(collectives),
            f"{row['seconds']:.1f} s",
        )
    return table
