"""Gradient of a per-channel norm: two sums per channel, then one element-wise pass.

Channels are dealt to cores. A channel whose elements fit is read once; otherwise a first phase of the grid sums and
a second one writes. Without training the gradient does not pass through the statistics, and one phase does both;
`channel_scale` is that gradient alone, without the two sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sim_npu.demos.shapes import need_axes, need_shape
from sim_npu.plan import TilePlan

CORES = 64  # channels are cut so that so many cores have some
RESIDENT = 6 * 1024  # elements of a channel block that stay in the unified buffer


def channel_grad(
    dy: jax.Array,
    x: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    scale: jax.Array,
    *,
    training: bool = True,
    plan: TilePlan | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dx, dscale, dbias of y = (x - mean) * rstd * scale + bias.

        dbias = Σ dy    dscale = Σ dy·x̂    dx = scale·rstd·(dy − (dbias + x̂·dscale)/n)   (training)

    Args:
      dy, x: `[N, C, R]`.
      mean, rstd, scale: `[C]`, float32.
      training: whether dx goes through the statistics; otherwise dx = scale·rstd·dy.
      plan: `rows` is channels per block, `chunk` elements of R (of N where R is 1) at a time.
      interpret: run in Pallas' interpreter.

    Returns:
      dx `[N, C, R]` in x's dtype, dscale `[C]`, dbias `[C]` in float32.

    Raises:
      ValueError: for arrays of other shapes.
    """
    need_axes("x", x, "N, C, R")
    n, c, r = x.shape
    need_shape("dy", dy, (n, c, r), "that of x")
    for name, given in (("mean", mean), ("rstd", rstd), ("scale", scale)):
        need_shape(name, given, (c,), "x's channels")
    block = _block(n, c, r, plan or TilePlan())
    nb, cb, rb = block
    flat = r == 1  # [N, C]: channels along lanes
    turns = (pl.cdiv(n, nb), pl.cdiv(r, rb))
    phases = 2 if training and turns != (1, 1) else 1
    tile, column = (block[:2], (1, cb)) if flat else (block, (1, cb, 1))
    stat_shape = (1, c) if flat else (1, c, 1)

    def moving(j, phase, i, t):
        return (i, j) if flat else (i, j, t)

    def written(j, phase, i, t):
        on = phase if phases == 2 else 1  # the only phase writes, or the second
        return (i * on, j) if flat else (i * on, j, t * on)

    array = (n, c) if flat else x.shape
    stats = pl.BlockSpec(column, lambda j, phase, i, t: (0, j) if flat else (0, j, 0))
    dx, dscale, dbias = pl.pallas_call(
        _kernel(x.shape, block, phases, training),
        name="channel_grad",
        grid=(pl.cdiv(c, cb), phases, *turns),
        in_specs=[pl.BlockSpec(tile, moving), pl.BlockSpec(tile, moving), stats, stats, stats],
        out_specs=[pl.BlockSpec(tile, written), stats, stats],
        out_shape=[
            jax.ShapeDtypeStruct(array, x.dtype),
            jax.ShapeDtypeStruct(stat_shape, jnp.float32),
            jax.ShapeDtypeStruct(stat_shape, jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary")),
        interpret=interpret,
    )(dy.reshape(array), x.reshape(array), *(s.reshape(stat_shape).astype(jnp.float32) for s in (mean, rstd, scale)))
    return dx.reshape(x.shape), dscale.reshape(c), dbias.reshape(c)


def _kernel(shape: tuple[int, ...], block: tuple[int, int, int], phases: int, training: bool) -> Any:
    """The body for arrays of `shape` in tiles of `block`."""
    (n, _, r), (nb, cb, rb) = shape, block
    flat = r == 1
    axes, tile = ((0,), (nb, cb)) if flat else ((0, 2), block)
    inverse = 1.0 / (n * r)

    def kernel(dy_ref, x_ref, mean_ref, rstd_ref, scale_ref, dx_ref, dscale_ref, dbias_ref):
        phase, i, t = pl.program_id(1), pl.program_id(2), pl.program_id(3)

        def xhat():
            return (x_ref[...].astype(jnp.float32) - mean_ref[...]) * rstd_ref[...]

        def write():
            g = dy_ref[...].astype(jnp.float32)
            if training:
                g = g - (dbias_ref[...] + xhat() * dscale_ref[...]) * inverse
            dx_ref[...] = (g * (scale_ref[...] * rstd_ref[...])).astype(dx_ref.dtype)

        @pl.when((phase == 0) & (i == 0) & (t == 0))
        def _():
            dscale_ref[...] = jnp.zeros_like(dscale_ref)
            dbias_ref[...] = jnp.zeros_like(dbias_ref)

        def add(masked):
            g, h = dy_ref[...].astype(jnp.float32), xhat()
            if masked:
                inside = jax.lax.broadcasted_iota(jnp.int32, tile, 0) < n - i * nb
                if r % rb:
                    inside &= jax.lax.broadcasted_iota(jnp.int32, tile, 2) < r - t * rb
                g, h = jnp.where(inside, g, 0.0), jnp.where(inside, h, 0.0)
            dbias_ref[...] += jnp.sum(g, axis=axes, keepdims=True)
            dscale_ref[...] += jnp.sum(g * h, axis=axes, keepdims=True)
            if phases == 1:
                write()

        partial = ((i + 1) * nb > n) | ((t + 1) * rb > r)  # only these blocks need a mask
        if n % nb or r % rb:
            pl.when((phase == 0) & partial)(lambda: add(True))
            pl.when((phase == 0) & jnp.logical_not(partial))(lambda: add(False))
        else:
            pl.when(phase == 0)(lambda: add(False))

        if phases == 2:
            pl.when(phase == 1)(write)

    return kernel


def _block(n: int, c: int, r: int, plan: TilePlan) -> tuple[int, int, int]:
    """(samples, channels, elements of R) per block."""
    share = max(1, pl.cdiv(c, CORES))
    if r == 1:
        channels = min(c, plan.rows or min(512, max(16, pl.cdiv(share, 16) * 16)))
        return min(n, plan.chunk or max(1, 4096 // channels)), channels, 1
    elements = min(r, plan.chunk or 4096)
    width = pl.cdiv(elements, 16) * 16  # lanes a row takes in the unified buffer
    channels = min(c, plan.rows or max(1, min(share, RESIDENT // (n * width) or 1)))
    samples = 1 if elements < r else max(1, min(n, RESIDENT // (channels * width)))
    return samples, channels, elements


def plan_space(dy: Any, x: Any, *rest: Any) -> Iterator[TilePlan]:
    """Channels per block and chunks around the default."""
    n, c, r = x.shape
    yield TilePlan()
    rows = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k <= c]
    if r == 1:
        yield from (TilePlan(rows=k, chunk=m) for k in rows if k >= 16 for m in (16, 32, 64, 128) if m <= n)
    else:
        yield from (TilePlan(rows=k) for k in rows if k * min(r, 4096) <= 8192)
        yield from (TilePlan(rows=1, chunk=m) for m in (1024, 2048, 4096, 6144) if m < r)


def example_arrays(shape: tuple[int, ...], dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """`shape` is [N, C, space...]; two axes are read as [N, C] with no space."""
    r = 1
    for k in shape[2:]:
        r *= k
    x = jax.ShapeDtypeStruct((shape[0], shape[1], r), dtype)
    stat = jax.ShapeDtypeStruct((shape[1],), jnp.float32)
    return x, x, stat, stat, stat


def channel_scale(
    dy: jax.Array,
    scale: jax.Array,
    var: jax.Array,
    *,
    eps: float = 1e-5,
    plan: TilePlan | None = None,
    interpret: bool = False,
) -> jax.Array:
    """dx = dy * scale / sqrt(var + eps): the gradient to x of a per-channel norm with statistics held fixed.

    Args:
      dy: `[N, C, R]`.
      scale, var: `[C]`, float32.
      eps: added to the variance.
      plan: `rows` is channels per block, `chunk` elements of R (of N where R is 1) at a time.
      interpret: run in Pallas' interpreter.

    Returns:
      `[N, C, R]` in dy's dtype. No step depends on another, so few channels still use every core.

    Raises:
      ValueError: for arrays of other shapes.
    """
    need_axes("dy", dy, "N, C, R")
    n, c, r = dy.shape
    for name, given in (("scale", scale), ("var", var)):
        need_shape(name, given, (c,), "dy's channels")
    plan = plan or TilePlan()
    if r == 1:
        cb = min(c, plan.rows or 512)
        tile: tuple[int, ...] = (min(n, plan.chunk or max(1, min(8192 // cb, pl.cdiv(n, CORES)))), cb)
        array: tuple[int, ...] = (n, c)
        column: tuple[int, ...] = (1, cb)
        grid: tuple[int, ...] = (pl.cdiv(n, tile[0]), pl.cdiv(c, cb))
        stats = pl.BlockSpec(column, lambda i, j: (0, j))
        moving = pl.BlockSpec(tile, lambda i, j: (i, j))
    else:
        rb = min(r, plan.chunk or 8192)
        cb = min(c, plan.rows or max(1, min(8192 // (pl.cdiv(rb, 16) * 16), pl.cdiv(n * c, CORES))))
        array, column, grid = dy.shape, (1, cb, 1), (n, pl.cdiv(c, cb), pl.cdiv(r, rb))
        stats = pl.BlockSpec(column, lambda i, j, t: (0, j, 0))
        moving = pl.BlockSpec((1, cb, rb), lambda i, j, t: (i, j, t))

    def kernel(dy_ref, scale_ref, var_ref, dx_ref):
        factor = scale_ref[...] / jnp.sqrt(var_ref[...] + eps)
        dx_ref[...] = (dy_ref[...].astype(jnp.float32) * factor).astype(dx_ref.dtype)

    stat = (1, c) if r == 1 else (1, c, 1)
    return pl.pallas_call(
        kernel,
        name="channel_scale",
        grid=grid,
        in_specs=[moving, stats, stats],
        out_specs=moving,
        out_shape=jax.ShapeDtypeStruct(array, dy.dtype),
        interpret=interpret,
    )(dy.reshape(array), *(s.reshape(stat).astype(jnp.float32) for s in (scale, var))).reshape(dy.shape)


def _scale_plans(dy: Any, *rest: Any) -> Iterator[TilePlan]:
    """Channels per block and chunks around the default."""
    n, c, r = dy.shape
    yield TilePlan()
    if r == 1:
        yield from (TilePlan(chunk=m) for m in (4, 8, 16, 32) if m <= n)
    else:
        yield from (TilePlan(rows=k) for k in (1, 2, 4, 8, 16, 32, 64, 128) if k <= c and k * min(r, 8192) <= 16384)
        yield from (TilePlan(rows=1, chunk=m) for m in (2048, 4096, 16384) if m < r)


def _scale_arrays(shape: tuple[int, ...], dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    dy, *_, var, scale = example_arrays(shape, dtype)
    return dy, scale, var


channel_scale.example_arrays = _scale_arrays  # type: ignore[attr-defined]
channel_scale.plan_space = _scale_plans  # type: ignore[attr-defined]
channel_grad.example_arrays = example_arrays  # type: ignore[attr-defined]
channel_grad.plan_space = plan_space  # type: ignore[attr-defined]
