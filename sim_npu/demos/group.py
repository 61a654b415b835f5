"""Group norm of [N, C, space]: statistics over the channels of a group and space, affine per channel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sim_npu.demos.shapes import need_axes, need_shape
from sim_npu.plan import TilePlan

BUDGET = 144 * 1024  # bytes of unified buffer for a group's tiles


def _bytes_per_element(dtype: Any, *, streamed: bool = False) -> int:
    """x and y twice, float32 for the group and one temporary, and for two running sums when streamed."""
    return 4 * jnp.dtype(dtype).itemsize + (16 if streamed else 8)


def group_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    groups: int,
    eps: float = 1e-5,
    about_first: bool = True,
    plan: TilePlan | None = None,
    interpret: bool = False,
) -> jax.Array:
    """y = (x - mean) / sqrt(var + eps) * scale + bias, mean and var per group; float32 inside, rounded once.

    A group that fits is read once and its variance taken about the mean. A longer one is read twice in chunks,
    with sums of x and x² about the group's first element, or about zero (E[x²] - mean², as shipped on A2).

    Args:
      x: `[N, C, R]`.
      scale, bias: `[C]`.
      groups: number of groups, a divisor of C.
      eps: added to the variance.
      about_first: whether a streamed group's sums are about its first element.
      plan: `residency`, and `chunk` elements at a time when streaming; `rows` samples per block where R is 1.
      interpret: run in Pallas' interpreter.

    Returns:
      `[N, C, R]` in x's dtype.

    Raises:
      ValueError: if `groups` does not divide the channels, x is not `[N, C, R]`, or scale or bias not `[C]`.
    """
    need_axes("x", x, "N, C, R")
    n, c, r = x.shape
    for name, array in (("scale", scale), ("bias", bias)):
        need_shape(name, array, (c,), "x's channels")
    if not isinstance(groups, int) or groups < 1 or c % groups:
        raise ValueError(f"`groups` must divide the {c} channels; got {groups!r}.")
    per = c // groups
    plan = plan or TilePlan()
    width = pl.cdiv(r, 16) * 16  # lanes a row takes in the unified buffer
    room = BUDGET // _bytes_per_element(x.dtype)
    if r == 1 and (groups == 1 or per % 128 == 0):
        return _rows(x.reshape(n, c), scale, bias, groups, eps, min(n, plan.rows or max(1, room // per)), interpret)
    args = (x.reshape(n * groups, per, r), scale.astype(jnp.float32), bias.astype(jnp.float32), groups)
    if (plan.residency or ("row" if per * width <= room else "stream")) == "row":
        y = _resident(*args, eps, interpret)
    else:
        limit = plan.chunk or BUDGET // _bytes_per_element(x.dtype, streamed=True)
        elements = min(r, max(16, limit // 16 * 16))
        channels = max(1, min(per, limit // width))
        y = _streamed(*args, eps, channels, elements, about_first, interpret)
    return y.reshape(x.shape)


def _rows(
    x: jax.Array, scale: jax.Array, bias: jax.Array, groups: int, eps: float, rows: int, interpret: bool
) -> jax.Array:
    """No space: a group is a run of channels along lanes, and a block holds several samples."""
    n, c = x.shape
    per = c // groups

    def kernel(x_ref, scale_ref, bias_ref, y_ref):
        v = x_ref[...].astype(jnp.float32)
        centred = v - jnp.sum(v, axis=-1, keepdims=True) * (1.0 / per)
        var = jnp.sum(centred * centred, axis=-1, keepdims=True) * (1.0 / per)
        y = centred * (1.0 / jnp.sqrt(var + eps)) * scale_ref[...] + bias_ref[...]
        y_ref[...] = y.astype(y_ref.dtype)

    block = pl.BlockSpec((rows, per), lambda i, g: (i, g))
    affine = pl.BlockSpec((1, per), lambda i, g: (0, g))
    return pl.pallas_call(
        kernel,
        name="group_norm_rows",
        grid=(pl.cdiv(n, rows), groups),
        in_specs=[block, affine, affine],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
    )(x, scale.reshape(1, c).astype(jnp.float32), bias.reshape(1, c).astype(jnp.float32)).reshape(n, c, 1)


def _affine(scale_ref: Any, bias_ref: Any, start: Any, channels: int) -> tuple[jax.Array, jax.Array]:
    """Columns `[channels, 1]` of scale and bias, which lie in the buffer as rows from the first step on."""
    at = pl.ds(start, channels)
    return scale_ref[0, at].reshape(channels, 1), bias_ref[0, at].reshape(channels, 1)


def _resident(x: jax.Array, scale: jax.Array, bias: jax.Array, groups: int, eps: float, interpret: bool) -> jax.Array:
    rows, per, r = x.shape
    c = groups * per
    inverse = 1.0 / (per * r)

    def kernel(x_ref, scale_ref, bias_ref, y_ref):
        v = x_ref[...].astype(jnp.float32)
        mean = jnp.sum(v) * inverse
        centred = v - mean
        rstd = 1.0 / jnp.sqrt(jnp.sum(centred * centred) * inverse + eps)
        factor, offset = _affine(scale_ref, bias_ref, (pl.program_id(0) % groups) * per, per)
        y_ref[...] = (centred * (factor * rstd) + offset).astype(y_ref.dtype)

    block = pl.BlockSpec((None, per, r), lambda i: (i, 0, 0))
    affine = pl.BlockSpec((1, c), lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        name="group_norm",
        grid=(rows,),
        in_specs=[block, affine, affine],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(x, scale.reshape(1, c), bias.reshape(1, c))


def _streamed(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    groups: int,
    eps: float,
    channels: int,
    elements: int,
    about_first: bool,
    interpret: bool,
) -> jax.Array:
    """Blocks of `channels` by `elements` of space, walked twice; `elements` is all of it where `channels` is not 1.

    Sums run per position of the block and are reduced once per group: a reduction of every block would take more
    vector instructions than all the rest.
    """
    rows, per, r = x.shape
    c = groups * per
    inverse = 1.0 / (per * r)

    def kernel(x_ref, scale_ref, bias_ref, y_ref, first_ref, sum_ref, square_ref, shift_ref, rstd_ref):
        group, phase, k, t = pl.program_id(0) % groups, pl.program_id(1), pl.program_id(2), pl.program_id(3)

        @pl.when((phase == 0) & (k == 0) & (t == 0))
        def _():
            first_ref[...] = x_ref[0:1, 0:1].astype(jnp.float32) if about_first else jnp.zeros_like(first_ref)
            sum_ref[...] = jnp.zeros_like(sum_ref)
            square_ref[...] = jnp.zeros_like(square_ref)

        def add(height, width):
            v = x_ref[0:height, 0:width].astype(jnp.float32)
            if about_first:
                v = v - first_ref[...]
            sum_ref[:, 0:width] += v if height == 1 else jnp.sum(v, axis=0, keepdims=True)
            square_ref[:, 0:width] += v * v if height == 1 else jnp.sum(v * v, axis=0, keepdims=True)

        # What the last block holds of the group is known when tracing, so nothing is masked.
        tail = (per % channels or channels, r % elements or elements)
        partial = ((k + 1) * channels > per) | ((t + 1) * elements > r)
        if tail != (channels, elements):
            pl.when((phase == 0) & partial)(lambda: add(*tail))
            pl.when((phase == 0) & jnp.logical_not(partial))(lambda: add(channels, elements))
        else:
            pl.when(phase == 0)(lambda: add(channels, elements))

        @pl.when((phase == 1) & (k == 0) & (t == 0))
        def _():
            shift = jnp.sum(sum_ref[...], keepdims=True) * inverse
            rstd_ref[...] = 1.0 / jnp.sqrt(jnp.sum(square_ref[...], keepdims=True) * inverse - shift * shift + eps)
            shift_ref[...] = first_ref[...] + shift

        @pl.when(phase == 1)
        def _():
            scale_column, bias_column = _affine(scale_ref, bias_ref, group * per + k * channels, channels)
            factor = scale_column * rstd_ref[...]
            offset = bias_column - shift_ref[...] * factor
            y_ref[...] = (x_ref[...].astype(jnp.float32) * factor + offset).astype(y_ref.dtype)

    affine = pl.BlockSpec((1, c + channels), lambda i, phase, k, t: (0, 0))  # the last block reaches beyond
    moving = pl.BlockSpec((None, channels, elements), lambda i, phase, k, t: (i, k, t))
    return pl.pallas_call(
        kernel,
        name="group_norm_stream",
        grid=(rows, 2, pl.cdiv(per, channels), pl.cdiv(r, elements)),
        in_specs=[moving, affine, affine],
        out_specs=pl.BlockSpec((None, channels, elements), lambda i, phase, k, t: (i, k * phase, t * phase)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((1, width), jnp.float32) for width in (1, elements, elements, 1, 1)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary")),
        interpret=interpret,
    )(x, scale.reshape(1, c), bias.reshape(1, c))


def plan_space(x: Any, *rest: Any) -> Iterator[TilePlan]:
    """The default, and smaller chunks of a streamed group."""
    yield TilePlan()
    yield from (TilePlan(chunk=k, residency="stream") for k in (1024, 2048, 4096, 8192) if k < x.shape[1] * x.shape[2])


def _example_arrays(shape: tuple[int, ...], dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """`shape` is [N, C, space...]; two axes are read as [N, C] with no space."""
    r = 1
    for k in shape[2:]:
        r *= k
    channel = jax.ShapeDtypeStruct((shape[1],), dtype)
    return jax.ShapeDtypeStruct((shape[0], shape[1], r), dtype), channel, channel


group_norm.example_arrays = _example_arrays  # type: ignore[attr-defined]
group_norm.plan_space = plan_space  # type: ignore[attr-defined]
