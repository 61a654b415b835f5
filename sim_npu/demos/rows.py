"""Root-mean-square norm of rows: y = x / sqrt(mean(x²) + eps) * scale, in three tilings of one computation.

`rms_norm` works on whole rows at once; `rms_norm_chunked` keeps the row resident and loops over power-of-two
chunks with a masked tail (this form also lowers for TPU and GPU); `rms_norm_stream` reads rows that do not fit
in two passes over a grid of chunks.
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

UB_FOR_ROWS = 160 * 1024  # bytes of unified buffer that a default plan fills, leaving room for statistics
UB_FOR_SUMS = 24 * 1024  # of what is left: partial sums and columns, 320 B a row
UB_FOR_CHUNKS = 184 * 1024  # with temporaries of a chunk only, less needs to be left


def _rows_that_fit(d: int, dtype: Any, *, budget: int = UB_FOR_ROWS) -> int:
    """Rows whose tiles fit: two buffers for x and two for y, float32 for the row and its square, partial sums."""
    tile, wide = (pl.cdiv(size * d, 32) * 32 for size in (jnp.dtype(dtype).itemsize, 4))
    tiles = 4 * tile + 2 * wide
    return min((budget - 8 * d) // tiles, (budget + UB_FOR_SUMS - 8 * d) // (tiles + 320))


def default_plan(shape: tuple[int, ...], dtype: Any) -> TilePlan:
    """Whole rows where one fits with its temporaries, then resident rows in chunks, then streamed rows.

    Blocks aim at copies of 32 KiB, and at enough blocks for 48 cores.
    """
    n, d = shape
    itemsize = jnp.dtype(dtype).itemsize
    aim = max(1, min(32 * 1024 // (d * itemsize), pl.cdiv(n, 48)))
    fit = _rows_that_fit(d, dtype)
    if fit >= 1:
        return TilePlan(rows=min(fit, aim), residency="row")
    padded = pl.cdiv(d, 1024) * 1024
    if 5 * itemsize * padded + 13 * 1024 <= UB_FOR_CHUNKS:  # x and y twice, the scale once; temporaries of a chunk
        return TilePlan(rows=1, chunk=1024, residency="row")
    return TilePlan(rows=1, chunk=4096, residency="stream")


def plan_space(x: Any, scale: Any = None) -> Iterator[TilePlan]:
    """Tilings worth trying: powers of two of rows and chunks around what fits."""
    n, d = x.shape
    fit = _rows_that_fit(d, x.dtype, budget=240 * 1024)
    rows = [r for r in (1, 2, 4, 8, 16, 32, 64, 128) if r <= max(n, 1)]
    yield from (TilePlan(rows=r, residency="row") for r in rows if r <= max(fit, 1) * 2)
    chunks = [c for c in (1024, 2048, 4096, 8192) if c < d]
    yield from (TilePlan(rows=r, chunk=c, residency="row") for c in chunks for r in rows if r * d <= 32 * 1024)
    yield from (TilePlan(rows=r, chunk=c, residency="stream") for c in chunks for r in rows if r * c <= 16 * 1024)


def example_arrays(shape: tuple[int, ...], dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """x of `shape` (leading axes folded) and a scale of its last axis."""
    rows = 1
    for n in shape[:-1]:
        rows *= n
    return jax.ShapeDtypeStruct((rows, shape[-1]), dtype), jax.ShapeDtypeStruct((shape[-1],), dtype)


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    eps: float = 1e-6,
    plan: TilePlan | None = None,
    interpret: bool = False,
    compiler_params: Any = None,
) -> jax.Array:
    """Row norm, statistics and product in float32, rounded once.

    Args:
      x: `[N, D]`.
      scale: `[D]`.
      eps: added to the mean square.
      plan: tiling; by default rows stay resident while they fit. A chunk with resident rows gives
        `rms_norm_chunked`, residency "stream" gives `rms_norm_stream`.
      interpret: run in Pallas' interpreter.
      compiler_params: of the platform, such as Triton's; a streamed row has its own.

    Returns:
      `[N, D]` in x's dtype.

    Raises:
      ValueError: for an x that is not `[N, D]`, or a scale of another length.
    """
    _check(x, scale)
    plan = plan or TilePlan()
    start = default_plan(x.shape, x.dtype)
    residency = plan.residency or start.residency
    if residency == "stream":
        return rms_norm_stream(x, scale, eps=eps, plan=plan, interpret=interpret)
    if plan.chunk is None and plan.residency is None and plan.rows is None:
        plan = start
    if plan.chunk is not None:
        return rms_norm_chunked(x, scale, eps=eps, plan=plan, interpret=interpret, compiler_params=compiler_params)
    n, d = x.shape
    rows = min(plan.rows or start.rows or 1, n)

    def kernel(x_ref, scale_ref, y_ref):
        v = x_ref[...].astype(jnp.float32)
        mean = jnp.sum(v * v, axis=-1, keepdims=True) * (1.0 / d)
        rstd = 1.0 / jnp.sqrt(mean + eps)
        y_ref[...] = (v * rstd * scale_ref[...].astype(jnp.float32)).astype(y_ref.dtype)

    return _call(kernel, "rms_norm", x, scale, rows, interpret, compiler_params)


def rms_norm_chunked(
    x: jax.Array,
    scale: jax.Array,
    *,
    eps: float = 1e-6,
    plan: TilePlan | None = None,
    interpret: bool = False,
    compiler_params: Any = None,
) -> jax.Array:
    """Row norm with resident rows, worked on in chunks: float32 temporaries of a chunk, not of a row.

    Args and result as `rms_norm`; `plan.chunk` must be a power of two (1024 by default, less for short rows).
    """
    _check(x, scale)
    plan = plan or TilePlan()
    n, d = x.shape
    chunk = plan.chunk or min(1024, pl.next_power_of_2(d))
    if chunk & (chunk - 1):
        raise ValueError(f"`plan.chunk` must be a power of two, so that lanes fill; got {chunk}.")
    padded = pl.cdiv(d, chunk) * chunk
    per_row = 4 * x.dtype.itemsize * padded + 13 * chunk  # x and y twice; two float32 temporaries and masks of a chunk
    rows = min(plan.rows or max(1, min(16, (UB_FOR_ROWS - 8 * padded) // per_row)), n)
    turns, tail = d // chunk, d % chunk

    def kernel(x_ref, scale_ref, y_ref):
        def squares(c, total):
            v = x_ref[:, pl.ds(c * chunk, chunk)].astype(jnp.float32)
            return total + jnp.sum(v * v, axis=-1, keepdims=True)

        total = jax.lax.fori_loop(0, turns, squares, jnp.zeros((rows, 1), jnp.float32))
        if tail:
            v = x_ref[:, pl.ds(turns * chunk, chunk)].astype(jnp.float32)
            inside = jax.lax.broadcasted_iota(jnp.int32, (rows, chunk), 1) < tail
            v = jnp.where(inside, v, 0.0)
            total = total + jnp.sum(v * v, axis=-1, keepdims=True)
        rstd = 1.0 / jnp.sqrt(total * (1.0 / d) + eps)

        def write(c, carry):
            at = pl.ds(c * chunk, chunk)
            y = x_ref[:, at].astype(jnp.float32) * rstd * scale_ref[:, at].astype(jnp.float32)
            y_ref[:, at] = y.astype(y_ref.dtype)
            return carry

        jax.lax.fori_loop(0, pl.cdiv(d, chunk), write, 0)

    return _call(kernel, "rms_norm_chunked", x, scale, rows, interpret, compiler_params, width=padded)


def rms_norm_stream(
    x: jax.Array, scale: jax.Array, *, eps: float = 1e-6, plan: TilePlan | None = None, interpret: bool = False
) -> jax.Array:
    """Row norm of rows too long to stay: the grid walks the chunks of a row twice (sum of squares, then product).

    Args and result as `rms_norm`.
    """
    _check(x, scale)
    plan = plan or TilePlan()
    n, d = x.shape
    chunk = min(plan.chunk or 4096, d)
    rows = min(plan.rows or 1, n)
    turns = pl.cdiv(d, chunk)

    def kernel(x_ref, scale_ref, y_ref, total_ref):
        phase, c = pl.program_id(1), pl.program_id(2)

        @pl.when((phase == 0) & (c == 0))
        def _():
            total_ref[...] = jnp.zeros_like(total_ref)

        def add(masked):
            v = x_ref[...].astype(jnp.float32)
            if masked:
                inside = jax.lax.broadcasted_iota(jnp.int32, (rows, chunk), 1) < d - c * chunk
                v = jnp.where(inside, v, 0.0)
            total_ref[...] += jnp.sum(v * v, axis=-1, keepdims=True)

        if d % chunk:  # only the last chunk of a row needs a mask
            pl.when((phase == 0) & (c == turns - 1))(lambda: add(True))
            pl.when((phase == 0) & (c < turns - 1))(lambda: add(False))
        else:
            pl.when(phase == 0)(lambda: add(False))

        @pl.when(phase == 1)
        def _():
            rstd = 1.0 / jnp.sqrt(total_ref[...] * (1.0 / d) + eps)
            y_ref[...] = (x_ref[...].astype(jnp.float32) * rstd * scale_ref[...].astype(jnp.float32)).astype(
                y_ref.dtype
            )

    return pl.pallas_call(
        kernel,
        name="rms_norm_stream",
        grid=(pl.cdiv(n, rows), 2, turns),
        in_specs=[
            pl.BlockSpec((rows, chunk), lambda i, phase, c: (i, c)),
            pl.BlockSpec((1, chunk), lambda i, phase, c: (0, c * phase)),
        ],
        out_specs=pl.BlockSpec((rows, chunk), lambda i, phase, c: (i, c * phase)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((rows, 1), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
    )(x, scale.reshape(1, d))


def _check(x: Any, scale: Any) -> None:
    need_axes("x", x, "N, D")
    need_shape("scale", scale, (x.shape[1],), "x's last axis")


def _call(
    kernel: Any,
    name: str,
    x: jax.Array,
    scale: jax.Array,
    rows: int,
    interpret: bool,
    compiler_params: Any,
    width: int | None = None,
) -> jax.Array:
    """One pass over blocks of whole rows; `width` pads the block, not the array. No step depends on another."""
    n, d = x.shape
    block = width or d
    return pl.pallas_call(
        kernel,
        name=name,
        grid=(pl.cdiv(n, rows),),
        in_specs=[pl.BlockSpec((rows, block), lambda i: (i, 0)), pl.BlockSpec((1, block), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((rows, block), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=compiler_params,
        interpret=interpret,
    )(x, scale.reshape(1, d))


for _fn in (rms_norm, rms_norm_chunked, rms_norm_stream):
    _fn.example_arrays = example_arrays  # type: ignore[attr-defined]
rms_norm.plan_space = plan_space  # type: ignore[attr-defined]
