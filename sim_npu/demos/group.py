"""Group norm of [N, C, space]: statistics over the channels of a group and space, affine per channel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sim_npu.plan import TilePlan

RESIDENT_BYTES = 96 * 1024  # float32 bytes of a group below which it is read once


def group_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    groups: int,
    eps: float = 1e-5,
    plan: TilePlan | None = None,
    interpret: bool = False,
) -> jax.Array:
    """y = (x - mean) / sqrt(var + eps) * scale + bias, mean and var per group; float32 inside, rounded once.

    A group that fits is read once and its variance taken about the mean. A longer one is read twice in chunks,
    with sums of x and x² about the group's first element.

    Args:
      x: `[N, C, R]`.
      scale, bias: `[C]`.
      groups: number of groups, a divisor of C.
      eps: added to the variance.
      plan: `residency`, and `chunk` elements of R at a time when streaming.
      interpret: run in Pallas' interpreter.

    Returns:
      `[N, C, R]` in x's dtype.

    Raises:
      ValueError: if `groups` does not divide the channels.
    """
    n, c, r = x.shape
    if c % groups:
        raise ValueError(f"`groups` must divide the {c} channels; got {groups}.")
    per = c // groups
    plan = plan or TilePlan()
    fits = per * r * 4 * (2 if x.dtype.itemsize == 2 else 1) <= RESIDENT_BYTES
    residency = plan.residency or ("row" if fits else "stream")
    args = (x.reshape(n * groups, per, r), scale.reshape(groups, per, 1), bias.reshape(groups, per, 1))
    if residency == "row":
        y = _resident(*args, eps, interpret)
    else:
        y = _streamed(*args, eps, plan.chunk or max(128, 8192 // per), interpret)
    return y.reshape(x.shape)


def _resident(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float, interpret: bool) -> jax.Array:
    rows, per, r = x.shape
    groups = scale.shape[0]
    inverse = 1.0 / (per * r)

    def kernel(x_ref, scale_ref, bias_ref, y_ref):
        v = x_ref[...].astype(jnp.float32)
        mean = jnp.sum(v) * inverse
        centred = v - mean
        rstd = 1.0 / jnp.sqrt(jnp.sum(centred * centred) * inverse + eps)
        y_ref[...] = (centred * (scale_ref[...] * rstd) + bias_ref[...]).astype(y_ref.dtype)

    block = pl.BlockSpec((None, per, r), lambda i: (i, 0, 0))
    affine = pl.BlockSpec((None, per, 1), lambda i: (i % groups, 0, 0))
    return pl.pallas_call(
        kernel,
        name="group_norm",
        grid=(rows,),
        in_specs=[block, affine, affine],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(x, scale.astype(jnp.float32), bias.astype(jnp.float32))


def _streamed(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float, chunk: int, interpret: bool) -> jax.Array:
    rows, per, r = x.shape
    groups = scale.shape[0]
    chunk = min(chunk, r)
    turns = pl.cdiv(r, chunk)
    inverse = 1.0 / (per * r)

    def kernel(x_ref, scale_ref, bias_ref, y_ref, first_ref, sum_ref, square_ref):
        phase, t = pl.program_id(1), pl.program_id(2)

        @pl.when((phase == 0) & (t == 0))
        def _():
            first_ref[...] = x_ref[0:1, 0:1].astype(jnp.float32)
            sum_ref[...] = jnp.zeros_like(sum_ref)
            square_ref[...] = jnp.zeros_like(square_ref)

        @pl.when(phase == 0)
        def _():
            v = x_ref[...].astype(jnp.float32) - first_ref[...]
            if r % chunk:
                inside = jax.lax.broadcasted_iota(jnp.int32, (per, chunk), 1) < r - t * chunk
                v = jnp.where(inside, v, 0.0)
            sum_ref[...] += jnp.sum(v, keepdims=True)
            square_ref[...] += jnp.sum(v * v, keepdims=True)

        @pl.when(phase == 1)
        def _():
            shift = sum_ref[...] * inverse
            rstd = 1.0 / jnp.sqrt(square_ref[...] * inverse - shift * shift + eps)
            factor = scale_ref[...] * rstd
            offset = bias_ref[...] - (first_ref[...] + shift) * factor
            y_ref[...] = (x_ref[...].astype(jnp.float32) * factor + offset).astype(y_ref.dtype)

    affine = pl.BlockSpec((None, per, 1), lambda i, phase, t: (i % groups, 0, 0))
    return pl.pallas_call(
        kernel,
        name="group_norm_stream",
        grid=(rows, 2, turns),
        in_specs=[pl.BlockSpec((None, per, chunk), lambda i, phase, t: (i, 0, t)), affine, affine],
        out_specs=pl.BlockSpec((None, per, chunk), lambda i, phase, t: (i, 0, t * phase)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((1, 1), jnp.float32)] * 3,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
    )(x, scale.astype(jnp.float32), bias.astype(jnp.float32))


def _example_arrays(shape: tuple[int, ...], dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """`shape` is [N, C, space...]; two axes are read as [N, C] with no space."""
    r = 1
    for k in shape[2:]:
        r *= k
    channel = jax.ShapeDtypeStruct((shape[1],), dtype)
    return jax.ShapeDtypeStruct((shape[0], shape[1], r), dtype), channel, channel


group_norm.example_arrays = _example_arrays  # type: ignore[attr-defined]
