"""Kernels over channels, from which the claims about batch norm build fused and separate forms.

Two shapes of work over `[N, C]` (channels last): sums of a few terms per channel, as partial results of blocks of rows
and a second kernel that adds them in a fixed order; and a map of every element with parameters per channel. Everything
is computed in float32 and rounded once. These stand in for `normlib.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

PARTS = 48  # partial results, one per vector core of the largest A2 chip
UB = 140 * 1024  # bytes of the unified buffer that a tile fills, with its temporaries
_WIDTH = 128  # channels of a block in the merge

Terms = Callable[..., Sequence[jax.Array]]


def _wide(ref: Any) -> jax.Array:
    return ref[...].astype(jnp.float32)


def _tile_rows(arrays: Sequence[jax.Array], written: int, rows: int) -> int:
    """Rows of a tile, at most `rows`: two buffers for all that moves, and some float32 temporaries.

    Args:
      written: bytes per element that the kernel writes.
    """
    moving = sum(a.dtype.itemsize for a in arrays) + written
    per_row = arrays[0].shape[1] * (2 * moving + 4 * (len(arrays) + 2))
    return max(1, min(UB // per_row, rows))


def channel_sums(
    name: str,
    terms: Terms,
    arrays: Sequence[jax.Array],
    parameters: Sequence[jax.Array] = (),
    *,
    count: int,
    interpret: bool = False,
) -> list[jax.Array]:
    """`count` sums over rows, `[C]` float32 each: Σ of every array that `terms(*tiles, *parameters)` gives.

    Args:
      terms: of float32 tiles `[rows, C]` and parameters `[1, C]`; gives `count` tiles.
      arrays: `[N, C]`, all of one shape.
      parameters: `[C]`.
    """
    n, c = arrays[0].shape
    per_part = pl.cdiv(n, min(PARTS, n))
    rows = _tile_rows(arrays, 0, per_part)
    turns = pl.cdiv(per_part, rows)
    parts = pl.cdiv(n, rows * turns)

    def kernel(*refs):
        inputs, outputs = refs[:-count], refs[-count:]
        part, turn = pl.program_id(0), pl.program_id(1)

        @pl.when(turn == 0)
        def _():
            for ref in outputs:
                ref[...] = jnp.zeros_like(ref)

        first = (part * turns + turn) * rows

        def add(masked):
            for ref, value in zip(outputs, terms(*map(_wide, inputs))):
                if masked:
                    inside = first + jax.lax.broadcasted_iota(jnp.int32, value.shape, 0) < n
                    value = jnp.where(inside, value, 0.0)
                ref[...] += jnp.sum(value, axis=0, keepdims=True)

        if parts * turns * rows > n:  # only blocks that reach beyond the array need a mask
            pl.when(first + rows > n)(lambda: add(True))
            pl.when(first + rows <= n)(lambda: add(False))
        else:
            add(False)

    partial = pl.pallas_call(
        kernel,
        name=name,
        grid=(parts, turns),
        in_specs=[pl.BlockSpec((rows, c), lambda p, t: (p * turns + t, 0)) for _ in arrays]
        + [pl.BlockSpec((1, c), lambda p, t: (0, 0)) for _ in parameters],
        out_specs=[pl.BlockSpec((None, 1, c), lambda p, t: (p, 0, 0)) for _ in range(count)],
        out_shape=[jax.ShapeDtypeStruct((parts, 1, c), jnp.float32) for _ in range(count)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(*arrays, *(p.reshape(1, c) for p in parameters))
    return _merged(f"{name}_merge", [p.reshape(parts, c) for p in partial], interpret)


def _merged(name: str, partial: Sequence[jax.Array], interpret: bool) -> list[jax.Array]:
    """Sums of the partial results, `[parts, C]` each, part by part."""
    parts, c = partial[0].shape
    width = min(c, _WIDTH)

    def kernel(*refs):
        for source, target in zip(refs[: len(partial)], refs[len(partial) :]):

            def add(p, total, source=source):
                return total + source[pl.ds(p, 1), :]

            target[...] = jax.lax.fori_loop(0, parts, add, jnp.zeros((1, width), jnp.float32))

    merged = pl.pallas_call(
        kernel,
        name=name,
        grid=(pl.cdiv(c, width),),
        in_specs=[pl.BlockSpec((parts, width), lambda j: (0, j)) for _ in partial],
        out_specs=[pl.BlockSpec((1, width), lambda j: (0, j)) for _ in partial],
        out_shape=[jax.ShapeDtypeStruct((1, c), jnp.float32) for _ in partial],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(*partial)
    return [m.reshape(c) for m in merged]


def channel_map(
    name: str,
    fn: Callable[..., jax.Array],
    arrays: Sequence[jax.Array],
    parameters: Sequence[jax.Array],
    *,
    dtype: Any = None,
    interpret: bool = False,
) -> jax.Array:
    """`fn(*tiles, *parameters)` of every element, `[N, C]` in `dtype` (None: that of the first array)."""
    n, c = arrays[0].shape
    dtype = jnp.dtype(dtype or arrays[0].dtype)
    rows = _tile_rows(arrays, dtype.itemsize, pl.cdiv(n, min(PARTS, n)))

    def kernel(*refs):
        refs[-1][...] = fn(*map(_wide, refs[:-1])).astype(refs[-1].dtype)

    return pl.pallas_call(
        kernel,
        name=name,
        grid=(pl.cdiv(n, rows),),
        in_specs=[pl.BlockSpec((rows, c), lambda i: (i, 0)) for _ in arrays]
        + [pl.BlockSpec((1, c), lambda i: (0, 0)) for _ in parameters],
        out_specs=pl.BlockSpec((rows, c), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((n, c), dtype),
        interpret=interpret,
    )(*arrays, *(p.reshape(1, c) for p in parameters))


def batch_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, eps: float = 1e-5, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Fused training batch norm of `[N, C]`: one pass for both sums, one that normalises. Returns y, mean, rstd."""
    s, q = channel_sums("bn_sums", lambda v: (v, v * v), (x,), count=2, interpret=interpret)
    mean = s / x.shape[0]
    rstd = jax.lax.rsqrt(jnp.maximum(q / x.shape[0] - mean * mean, 0.0) + eps)
    factor = rstd * scale
    y = channel_map("bn_apply", lambda v, a, b: v * a + b, (x,), (factor, bias - mean * factor), interpret=interpret)
    return y, mean, rstd


def batch_norm_grad(
    x: jax.Array, dy: jax.Array, mean: jax.Array, rstd: jax.Array, scale: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Its gradient, again in two passes. Returns dx, dscale, dbias."""

    def terms(v, g, m, r):
        return g, g * ((v - m) * r)

    dbias, dscale = channel_sums("bn_grad_sums", terms, (x, dy), (mean, rstd), count=2, interpret=interpret)
    k, n = scale * rstd, x.shape[0]
    c1 = -k * rstd * dscale / n
    c0 = -k * dbias / n - c1 * mean
    dx = channel_map(
        "bn_grad_apply", lambda v, g, k, c1, c0: g * k + v * c1 + c0, (x, dy), (k, c1, c0), interpret=interpret
    )
    return dx, dscale, dbias


def batch_norm_in_six(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, eps: float = 1e-5, interpret: bool = False
) -> jax.Array:
    """The same y from six operators that each read and write: mean, centre, variance, rstd, multiply, scale and shift.

    What an array operator writes is in x's dtype. (Mean and variance are two launches each: partial sums, and their
    sum.)
    """
    n, c = x.shape
    one = jnp.zeros((1, c), jnp.float32)
    (s,) = channel_sums("mean", lambda v: (v,), (x,), count=1, interpret=interpret)
    centred = channel_map("centre", lambda v, s: v - s * (1.0 / n), (x,), (s,), interpret=interpret)
    (q,) = channel_sums("variance", lambda v: (v * v,), (centred,), count=1, interpret=interpret)
    rstd = channel_map("rstd", lambda _, q: 1.0 / jnp.sqrt(q * (1.0 / n) + eps), (one,), (q,), interpret=interpret)
    xhat = channel_map("multiply", lambda v, r: v * r, (centred,), (rstd.reshape(c),), interpret=interpret)
    return channel_map("scale_and_shift", lambda v, a, b: v * a + b, (xhat,), (scale, bias), interpret=interpret)
