"""Claims about kernels merged into one, and about the copies that overlap them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import sim_npu
from benchmarks.claims import row_kernels as kernels
from benchmarks.claims.registry import Figure, Outcome, change, claim, faster, less
from normlib.kernels import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from sim_npu import SimReport, TilePlan

SHAPES = ((32, 4096), (4096, 4096), (16384, 1024))  # decoding, and two of training; [rows, D]
DTYPE = "bfloat16"


PLANS = tuple(
    TilePlan(rows=rows, residency=None if rows is None else "row", queue_depth=depth)
    for rows in (None, 1, 2, 4, 8, 16, 32, 64)
    for depth in (1, 2)
)


def best(kernel: Callable, *args: Any, depth: int | None = None) -> SimReport:
    """The kernel at the fastest of `PLANS` (with `depth`, of those of that queue depth)."""
    plans = [plan for plan in PLANS if depth in (None, plan.queue_depth)]
    return sim_npu.rank_plans(kernel, *args, plans=plans).best


def _chains(shape: tuple[int, int], *, quantised: bool) -> dict[str, tuple[SimReport, ...]]:
    """Separate kernels and fused ones of one shape, each at its fastest plan."""
    array, vector = (shape, DTYPE), (shape[1:], "float32")
    add = best(kernels.add, array, array)
    if quantised:
        parts = add, best(kernels.rms_norm, array, vector), best(kernels.quantise, array)
        return {
            "add, rms_norm, quantise": parts,
            "add_rms_norm_quant": (best(kernels.add_rms_norm_quant, array, array, vector),),
        }
    return {
        "add, rms_norm": (add, best(rms_norm, array, vector)),
        "add_rms_norm": (best(add_rms_norm, array, array, vector),),
        "add, layer_norm": (add, best(layer_norm, array, vector, vector)),
        "add_layer_norm": (best(add_layer_norm, array, array, vector, vector),),
    }


def _table(pairs: tuple[tuple[str, str], ...]) -> tuple[str, list[tuple[float, float]]]:
    """Markdown of separate against fused for every shape, and (traffic saved, speed gained) of each in per cent."""
    lines = ["| shape | kernels | µs | MB | fused µs | MB | traffic | time | speed |", "|---" * 9 + "|"]
    gains = []
    for shape in SHAPES:
        chains = _chains(shape, quantised="quantise" in pairs[0][0])
        for separate, fused in pairs:
            us, moved = (sum(r.total_us for r in chains[separate]), sum(r.bytes for r in chains[separate]))
            fused_us, fused_moved = chains[fused][0].total_us, chains[fused][0].bytes
            gains.append((less(moved, fused_moved), faster(us, fused_us)))
            lines.append(
                f"| {shape[0]} × {shape[1]} | {separate} | {us:.1f} | {moved / 1e6:.1f} | {fused_us:.1f} | "
                f"{fused_moved / 1e6:.1f} | {change(moved, fused_moved)} | {change(us, fused_us)} | "
                f"{change(fused_us, us)} |"
            )
    return "\n".join(lines), gains


@claim("add-norm", "add and norm fused: about 30 % less traffic, 20–25 % faster", basis="model", seconds=3)
def add_norm() -> Outcome:
    detail, gains = _table((("add, rms_norm", "add_rms_norm"), ("add, layer_norm", "add_layer_norm")))
    return Outcome(
        "An add kernel followed by normlib's norm kernel, against its kernel that writes the norm and the sum; RMS and "
        f"layer norm, {DTYPE}, {len(SHAPES)} shapes, every kernel at its fastest plan; the median is compared.",
        (
            Figure("less traffic, median", statistics.median(g[0] for g in gains), asked=30),
            Figure("faster, median", statistics.median(g[1] for g in gains), asked=20),
            Figure("faster, least", min(g[1] for g in gains)),
            Figure("faster, most", max(g[1] for g in gains)),
        ),
        note="The sum is kept (the residual stream needs it): 5 passes over an array become 4. Where nobody needs it, "
        "3 are left: 40 % less. On long arrays these kernels are bound by the vector unit, not by bytes.",
        detail=detail,
    )


@claim("add-norm-quant", "add, norm and quantisation fused: up to 40 % faster", basis="model", seconds=2)
def add_norm_quant() -> Outcome:
    detail, gains = _table((("add, rms_norm, quantise", "add_rms_norm_quant"),))
    return Outcome(
        f"Three plain kernels (add, RMS norm, dynamic int8) against one, {DTYPE}, {len(SHAPES)} shapes; the best is "
        "compared.",
        (
            Figure("faster, most", max(g[1] for g in gains), asked=40),
            Figure("faster, least", min(g[1] for g in gains)),
            Figure("less traffic, least", min(g[0] for g in gains)),
        ),
        note="The best case is the short array, where two launches less are most of the gain.",
        detail=detail,
    )


@claim("double-buffer", "double buffering: 60–70 % less waiting for memory", basis="model", seconds=1)
def double_buffer() -> Outcome:
    """Waiting is the time of a core in which its vector unit does nothing."""
    lines = ["| kernel | shape | 1 buffer: µs | waiting | 2 buffers: µs | waiting | less |", "|---" * 7 + "|"]
    gains = []
    for shape in SHAPES[1:]:
        vector = (shape[1:], "float32")
        for kernel, vectors in ((rms_norm, 1), (layer_norm, 2)):
            deep = best(kernel, (shape, DTYPE), *[vector] * vectors, depth=2).plan
            times, waits = [], []
            for depth in (1, 2):
                plan = deep.replace(queue_depth=depth)
                (k,) = sim_npu.simulate(kernel, (shape, DTYPE), *[vector] * vectors, plan=plan).kernels
                times.append(k.core_us)
                waits.append(k.core_us - k.busy_us["V"])
            gains.append(less(*waits))
            lines.append(
                f"| {kernel.__name__} | {shape[0]} × {shape[1]} | {times[0]:.1f} | {waits[0]:.1f} | {times[1]:.1f} | "
                f"{waits[1]:.1f} | {change(*waits)} |"
            )
    return Outcome(
        f"normlib's RMS and layer norm kernels, {DTYPE}, two shapes, queues of one and of two buffers with the same "
        "rows per tile: time of a core in which its vector unit does nothing.",
        (Figure("less waiting, least", min(gains), asked=60), Figure("less waiting, most", max(gains))),
        note="What is left is the first copy in, the last one out and the start of the core.",
        detail="\n".join(lines),
    )
