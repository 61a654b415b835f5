"""Sums over channels-last arrays: per-channel mean and sum of squared deviations.

Cores cannot add into one tile, so each block of rows gives a partial result and a second kernel merges them in a
fixed order (Chan's formula for the statistics): two kernels, deterministic on any number of cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sim_npu.demos.shapes import need_axes
from sim_npu.plan import TilePlan

PARTS = 48  # partial results, one per vector core of the largest A2 chip


def _tiles(n: int, c: int, itemsize: int, plan: TilePlan | None) -> tuple[int, int, int]:
    """(parts, rows per block, blocks per part)."""
    plan = plan or TilePlan()
    per_part = pl.cdiv(n, min(PARTS, n))
    rows = min(plan.rows or max(1, min(per_part, 16 * 1024 // max(1, c * itemsize))), per_part)
    turns = pl.cdiv(per_part, rows)
    return pl.cdiv(n, rows * turns), rows, turns


def plan_space(x: Any, *rest: Any) -> Iterator[TilePlan]:
    """Rows per block, powers of two."""
    n, c = x.shape
    yield from (TilePlan(rows=r) for r in (1, 4, 8, 16, 32, 64, 128, 256) if r <= n and r * c <= 16 * 1024)


def _fold(shape: tuple[int, ...]) -> tuple[int, int]:
    rows = 1
    for n in shape[:-1]:
        rows *= n
    return rows, shape[-1]


def channel_stats(
    x: jax.Array, *, plan: TilePlan | None = None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Mean and sum of squared deviations of each channel.

    Args:
      x: `[N, C]`, channels last.
      plan: `rows` per block.
      interpret: run in Pallas' interpreter.

    Returns:
      mean `[C]` and m2 `[C]`, float32.

    Raises:
      ValueError: for an x that is not `[N, C]`.
    """
    need_axes("x", x, "N, C")
    n, c = x.shape
    parts, rows, turns = _tiles(n, c, x.dtype.itemsize, plan)

    def partial(x_ref, sum_ref, square_ref):
        p, t = pl.program_id(0), pl.program_id(1)

        @pl.when(t == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)
            square_ref[...] = jnp.zeros_like(square_ref)

        first = (p * turns + t) * rows

        def add(masked):
            v = x_ref[...].astype(jnp.float32)
            if masked:
                v = jnp.where(first + jax.lax.broadcasted_iota(jnp.int32, (rows, c), 0) < n, v, 0.0)
            sum_ref[...] += jnp.sum(v, axis=0, keepdims=True)
            square_ref[...] += jnp.sum(v * v, axis=0, keepdims=True)

        if parts * turns * rows > n:  # only blocks that reach beyond the array need a mask
            pl.when(first + rows > n)(lambda: add(True))
            pl.when(first + rows <= n)(lambda: add(False))
        else:
            add(False)

    last = pl.cdiv(n, rows) - 1

    def moving(p, t):
        block = p * turns + t
        # The last part may have fewer blocks: it stays on its last one, and adds nothing.
        return (block if parts * turns == last + 1 else jnp.minimum(block, last)), 0

    out = jax.ShapeDtypeStruct((parts, 1, c), jnp.float32)
    spec = pl.BlockSpec((None, 1, c), lambda p, t: (p, 0, 0))
    sums, squares = pl.pallas_call(
        partial,
        name="channel_partials",
        grid=(parts, turns),
        in_specs=[pl.BlockSpec((rows, c), moving)],
        out_specs=[spec, spec],
        out_shape=[out, out],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(x)
    return _merge(sums.reshape(parts, c), squares.reshape(parts, c), n, rows * turns, interpret)


def _merge(sums: jax.Array, squares: jax.Array, n: int, per_part: int, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Chan's merge of partial sums in the order of the parts; the last part holds what is left of `n`."""
    parts, c = sums.shape
    width = min(c, 128)

    def merge(sum_ref, square_ref, mean_ref, m2_ref):
        def add_part(p, carry):
            mean, m2 = carry
            before = jnp.minimum(p * per_part, n).astype(jnp.float32)
            count = jnp.clip(n - p * per_part, 0, per_part).astype(jnp.float32)
            total = sum_ref[pl.ds(p, 1), :]
            part_mean = total / jnp.maximum(count, 1.0)
            part_m2 = square_ref[pl.ds(p, 1), :] - total * part_mean
            delta = part_mean - mean
            weight = count / jnp.maximum(before + count, 1.0)
            return mean + delta * weight, m2 + part_m2 + delta * delta * (before * weight)

        start = jnp.zeros((1, width), jnp.float32)
        mean_ref[...], m2_ref[...] = jax.lax.fori_loop(0, parts, add_part, (start, start))

    out = jax.ShapeDtypeStruct((1, c), jnp.float32)
    part = pl.BlockSpec((parts, width), lambda j: (0, j))
    whole = pl.BlockSpec((1, width), lambda j: (0, j))
    mean, m2 = pl.pallas_call(
        merge,
        name="channel_merge",
        grid=(pl.cdiv(c, width),),
        in_specs=[part, part],
        out_specs=[whole, whole],
        out_shape=[out, out],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(sums, squares)
    return mean[0], m2[0]


def _stats_arrays(shape: tuple[int, ...], dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (jax.ShapeDtypeStruct(_fold(shape), dtype),)


channel_stats.example_arrays = _stats_arrays  # type: ignore[attr-defined]
channel_stats.plan_space = plan_space  # type: ignore[attr-defined]
