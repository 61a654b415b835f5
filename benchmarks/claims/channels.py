"""Claims about batch norm's kernels: one against six, and how channels are split over cores."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import sim_npu
from benchmarks.claims.channel_kernels import batch_norm, batch_norm_in_six
from benchmarks.claims.registry import Figure, Outcome, claim, faster, less
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


def channel_split(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, channels: int, eps: float = 1e-5, interpret: bool = False
) -> jax.Array:
    """Training batch norm of `[N, C, R]`, a core holding whole channels: each is read once and written once."""
    n, c, r = x.shape
    inverse = 1.0 / (n * r)

    def kernel(x_ref, scale_ref, bias_ref, y_ref):
        v = x_ref[...].astype(jnp.float32)
        centred = v - jnp.sum(v, axis=(0, 2), keepdims=True) * inverse
        var = jnp.sum(centred * centred, axis=(0, 2), keepdims=True) * inverse
        y_ref[...] = (centred * (scale_ref[...] / jnp.sqrt(var + eps)) + bias_ref[...]).astype(y_ref.dtype)

    block = pl.BlockSpec((n, channels, r), lambda j: (0, j, 0))
    vector = pl.BlockSpec((1, channels, 1), lambda j: (0, j, 0))
    return pl.pallas_call(
        kernel,
        name="channel_split",
        grid=(pl.cdiv(c, channels),),
        in_specs=[block, vector, vector],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(x, scale.reshape(1, c, 1), bias.reshape(1, c, 1))


def two_scan(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, tile: int = 8 * 1024, eps: float = 1e-5, interpret: bool = False
) -> jax.Array:
    """The same in two scans over all samples and channels: sums per sample and channel, then the affine map."""
    n, c, r = x.shape
    elements = min(r, tile)
    channels = max(1, min(c, tile // elements))
    turns = pl.cdiv(r, elements)

    def sums(x_ref, s_ref, q_ref):
        t = pl.program_id(2)

        @pl.when(t == 0)
        def _():
            s_ref[...] = jnp.zeros_like(s_ref)
            q_ref[...] = jnp.zeros_like(q_ref)

        v = x_ref[...].astype(jnp.float32)
        if r % elements:
            inside = jax.lax.broadcasted_iota(jnp.int32, (channels, elements), 1) < r - t * elements
            v = jnp.where(inside, v, 0.0)
        s_ref[...] += jnp.sum(v, axis=-1, keepdims=True)
        q_ref[...] += jnp.sum(v * v, axis=-1, keepdims=True)

    def apply(x_ref, a_ref, b_ref, y_ref):
        y_ref[...] = (x_ref[...].astype(jnp.float32) * a_ref[...] + b_ref[...]).astype(y_ref.dtype)

    grid = (n, pl.cdiv(c, channels), turns)
    block = pl.BlockSpec((None, channels, elements), lambda i, j, t: (i, j, t))
    partial = pl.BlockSpec((None, channels, 1), lambda i, j, t: (i, j, 0))
    vector = pl.BlockSpec((channels, 1), lambda i, j, t: (j, 0))
    moving = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))
    out = jax.ShapeDtypeStruct((n, c, 1), jnp.float32)
    s, q = pl.pallas_call(
        sums,
        name="scan_sums",
        grid=grid,
        in_specs=[block],
        out_specs=[partial, partial],
        out_shape=[out, out],
        compiler_params=moving,
        interpret=interpret,
    )(x)
    factor, offset = _merge_samples(s.reshape(n, c), q.reshape(n, c), scale, bias, 1.0 / (n * r), eps, interpret)
    return pl.pallas_call(
        apply,
        name="scan_apply",
        grid=grid,
        in_specs=[block, vector, vector],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=moving,
        interpret=interpret,
    )(x, factor.reshape(c, 1), offset.reshape(c, 1))


def _merge_samples(s, q, scale, bias, inverse, eps, interpret):
    """y = x · factor + offset from the sums of every sample, `[N, C]`; in blocks of channels."""
    n, c = s.shape
    width = min(c, 128)

    def kernel(s_ref, q_ref, scale_ref, bias_ref, factor_ref, offset_ref):
        mean = jnp.sum(s_ref[...], axis=0, keepdims=True) * inverse
        var = jnp.sum(q_ref[...], axis=0, keepdims=True) * inverse - mean * mean
        factor = scale_ref[...] / jnp.sqrt(var + eps)
        factor_ref[...], offset_ref[...] = factor, bias_ref[...] - mean * factor

    column = pl.BlockSpec((1, width), lambda j: (0, j))
    return pl.pallas_call(
        kernel,
        name="scan_merge",
        grid=(pl.cdiv(c, width),),
        in_specs=[pl.BlockSpec((n, width), lambda j: (0, j))] * 2 + [column, column],
        out_specs=[column, column],
        out_shape=[jax.ShapeDtypeStruct((1, c), jnp.float32)] * 2,
        interpret=interpret,
    )(s, q, scale.reshape(1, c), bias.reshape(1, c))


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


def fastest(fn: Callable, shape: tuple[int, ...], chip: ChipSpec, name: str, sizes: tuple[int, ...]) -> float:
    """µs of `fn` at the fastest of `sizes` (of its keyword `name`) that fits; infinite where none does."""
    vector = (shape[1:2], "float32")
    times = [math.inf]
    for size, depth in itertools.product(sizes, (1, 2)):
        with contextlib.suppress(CapacityError):
            options: dict[str, Any] = {name: size, "plan": TilePlan(queue_depth=depth), "explain_capacity": False}
            report = sim_npu.simulate(fn, (shape, "float16"), vector, vector, chip=chip, **options)
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
            scans = fastest(two_scan, shape, chip, "tile", (2048, 4096, 8192, 16384))
            whole = fastest(channel_split, shape, chip, "channels", (1, 2, 4, 8, 16, 32, 64))
            ratios[shape].append(scans / whole)
        cells = " | ".join("no" if ratio == 0 else f"{ratio:.2f}" for ratio in ratios[shape])
        kib = shape[0] * shape[2] * 2 / 1024
        lines.append(f"| {' × '.join(map(str, shape))} | {kib:.3g} | {cells} |")
    flat = [ratio for row in ratios.values() for ratio in row]
    by_shape = sum(ratio > 1 for ratio in flat), sum(ratio < 1 for ratio in flat)
    by_buffer = sum(any(r > 1 for r in row) and any(r < 1 for r in row) for row in ratios.values())
    fits = sum(0 < ratio < 1 for ratio in flat)
    return Outcome(
        f"Training batch norm, float16, channels first, {len(MAP)} shapes × {len(BUFFERS)} sizes of the unified "
        "buffer, each way at its fastest tile and queue depth.",
        (
            Figure("cases where the split wins", by_shape[0], asked=1, unit="", threshold=True),
            Figure("cases where two scans win", by_shape[1], asked=1, unit="", threshold=True),
            Figure("shapes where the buffer decides", by_buffer, asked=1, unit="", threshold=True),
        ),
        note="Two scans win where the samples of one channel do not fit a core, and in "
        f"{fits} cases where they do: in the model it is the fit that decides, and the shape as far as it does.",
        detail="\n".join(lines),
    )
