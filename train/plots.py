"""Curves of training as a picture, from the records of a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import ticker
from matplotlib.figure import Figure

from train.display import NAMES

COLOURS = {  # Okabe and Ito's palette, told apart by colour-blind readers too
    "local_bn": "#D55E00",
    "sync_bn": "#0072B2",
    "ghost_bn": "#009E73",
    "group_norm": "#CC79A7",
    "layer_norm": "#E69F00",
}
_MARKS = {"local_bn": "o", "sync_bn": "s", "ghost_bn": "^", "group_norm": "D", "layer_norm": "v"}


def plot_curves(records: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Training loss and test error over the epochs, a line per norm, written to `path` as a picture.

    Args:
      records: of a log. Those with event `epoch` and the fields norm, epoch, train_loss and test_error are drawn; those
        with event `start` tell the rows that share statistics.
    """
    epochs = [record for record in records if record["event"] == "epoch"]
    norms = list(dict.fromkeys(record["norm"] for record in epochs))
    spans = {record["norm"]: record.get("bn_span") for record in records if record["event"] == "start"}
    labels = {norm: NAMES.get(norm, norm) + (f" ({spans[norm]} rows)" if spans.get(norm) else "") for norm in norms}
    style: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")  # a Figure of its own needs no display
        loss_axes, error_axes = figure.subplots(1, 2)
        for axes, key, heading in (
            (loss_axes, "train_loss", "Training loss (mean of the epoch)"),
            (error_axes, "test_error", "Test error, %"),
        ):
            for norm in norms:
                points = [record for record in epochs if record["norm"] == norm and record[key] is not None]
                axes.plot(
                    [record["epoch"] for record in points],
                    [record[key] for record in points],
                    color=COLOURS.get(norm, "black"),
                    marker=_MARKS.get(norm, "o"),
                    markersize=5,
                    linewidth=2,
                    label=labels[norm],
                    clip_on=False,
                )
            axes.set_title(heading, pad=10)
            axes.set_xlabel("epoch")
            values = [record[key] for record in epochs if record[key] is not None]  # null: diverged
            least = min((value for value in values if value > 0), default=1.0)
            if min(values, default=1.0) > 0:
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            else:  # no error at all has no logarithm: linear from 0 to the least error that there is
                axes.set_yscale("symlog", linthresh=least)
                axes.set_ylim(bottom=0)
            axes.yaxis.set_minor_locator(ticker.NullLocator())
            axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
            axes.grid(axis="y", color="#dddddd", linewidth=0.8)
            axes.set_axisbelow(True)
        if len(norms) > 1:
            figure.legend(
                *loss_axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(norms), frameon=False
            )
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.savefig(path)
