"""Claims about batch norm's kernels: one against six, and how channels are split over cores."""

from __future__ import annotations

import contextlib
import itertools
import math

import sim_npu
from benchmarks.claims.channel_kernels import batch_norm, batch_norm_in_six
from benchmarks.claims.registry import Figure, Outcome, claim, faster, less
from normlib import kernels
from normlib.kernels.machine import MACHINES
from sim_npu import CapacityError, ChipSpec, TilePlan, get_chip

LAST = ((32 * 56 * 56, 256), (32 * 28 * 28, 512), (32 * 7 * 7, 2048))  # [rows, C] of ResNet-50's stages, 32 images


@claim("one-kernel", "batch norm as one fused kernel instead of six separate ones", basis="model", seconds=2)
def one_kernel() -> Outcome:
    lines = ["| rows × C | six: µs | MB | fused: µs | MB | time | traffic |", "|---|---|---|---|---|---|---|"]
    time, traffic = [], []
    for shape in LAST:
        vector = (shape[1:], "float32")
        six, one = (sim_npu.simulate(fn, (shape, "float16"), vector, vector) for fn in (batch_norm_in_six, batch_norm))
        time.append(faster(six.total_us, one.total_us))
        traffic.append(less(six.bytes, one.bytes))
        lines.append(
            f"| {shape[0]} × {shape[1]} | {six.total_us:.0f} | {six.bytes / 1e6:.0f} | {one.total_us:.0f} | "
            f"{one.bytes / 1e6:.0f} | −{less(six.total_us, one.total_us):.0f} % | −{traffic[-1]:.0f} % |"
        )
    return Outcome(
        "Training forward of three of ResNet-50's batch norms, 32 images, float16, channels last: six operators (mean, "
        "centre, variance, rstd, multiply, scale and shift; 8 launches) against one pass for the sums and one to apply "
        "(3 launches).",
        (
            Figure("faster, least", min(time), asked=1, threshold=True),
            Figure("faster, most", max(time)),
            Figure("less traffic, least", min(traffic), asked=1, threshold=True),
        ),
        note="The source gives no figure: any gain everywhere counts. One kernel on many cores is not possible without "
        "a barrier among them, hence three launches.",
        detail="\n".join(lines),
    )


# [N, C, R]: small and large batches of ResNet-50's stages, and few channels
MAP = (
    *((2, c, hw * hw) for c, hw in ((64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7))),
    *((32, c, hw * hw) for c, hw in ((64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7))),
    (8, 48, 2048),
    (8, 8, 2048),
    (8, 2, 6272),
    (64, 4, 64),
)
BUFFERS = (128, 192, 248, 1024)  # KiB


# The two ways of normlib's kernel: tiles of 1 to 64 whole channels, each read once, or moments of every sample and
# channel, merged, and a map of tiles of so many entries
WAYS = {
    "split": [TilePlan(chunk=n, residency="row") for n in (1, 2, 4, 8, 16, 32, 64)],
    "scans": [TilePlan(chunk=n) for n in (512, 2048, 8192)],
}


def fastest(way: str, shape: tuple[int, ...], chip: ChipSpec) -> float:
    """µs of normlib's batch norm at the fastest plan of a way that fits; infinite where none does."""
    vector = (shape[1:2], "float32")
    machine = MACHINES["npu"].replace(tile_bytes=chip.ub_bytes * 15 // 16)
    times = [math.inf]
    for plan, depth in itertools.product(WAYS[way], (1, 2)):
        with contextlib.suppress(CapacityError, ValueError):  # the latter from a plan that no channel fits
            report = sim_npu.simulate(
                kernels.batch_norm, (shape, "float16"), vector, vector, chip=chip, machine=machine,
                plan=plan.replace(queue_depth=depth), explain_capacity=False,
            )  # fmt: skip
            times.append(report.total_us)
    return min(times)


@claim("split", "channel split or two scans: the better one depends on shape and buffer", basis="model", seconds=8)
def split() -> Outcome:
    chips = [get_chip("910b2").replace(name=f"{kib} KiB", ub_bytes=kib * 1024) for kib in BUFFERS]
    lines = [
        "Time of two scans over that of the channel split: above 1 the split is faster; “no” where not one channel "
        "fits.",
        "",
        "| N × C × R | KiB of a channel | " + " | ".join(f"UB {kib} KiB" for kib in BUFFERS) + " |",
        "|---|---|" + "---|" * len(BUFFERS),
    ]
    ratios: dict[tuple, list[float]] = {}
    for shape in MAP:
        ratios[shape] = []
        for chip in chips:
            ratios[shape].append(fastest("scans", shape, chip) / fastest("split", shape, chip))
        cells = " | ".join("no" if ratio == 0 else f"{ratio:.2f}" for ratio in ratios[shape])
        kib = shape[0] * shape[2] * 2 / 1024
        lines.append(f"| {' × '.join(map(str, shape))} | {kib:.3g} | {cells} |")
    flat = [ratio for row in ratios.values() for ratio in row]
    by_shape = sum(ratio > 1 for ratio in flat), sum(ratio < 1 for ratio in flat)
    by_buffer = sum(any(r > 1 for r in row) and any(r < 1 for r in row) for row in ratios.values())
    fits = sum(0 < ratio < 1 for ratio in flat)
    return Outcome(
        f"normlib's batch norm in training, float16, channels first, {len(MAP)} shapes × {len(BUFFERS)} sizes of the "
        "unified buffer: whole channels in one kernel against moments, merged, and a map, each way at its fastest tile "
        "and queue depth.",
        (
            Figure("cases where the split wins", by_shape[0], asked=1, unit="", threshold=True),
            Figure("cases where two scans win", by_shape[1], asked=1, unit="", threshold=True),
            Figure("shapes where the buffer decides", by_buffer, asked=1, unit="", threshold=True),
        ),
        note="Two scans win where the samples of one channel do not fit a core, and in "
        f"{fits} cases where they do: in the model it is the fit that decides, and the shape as far as it does.",
        detail="\n".join(lines),
    )
