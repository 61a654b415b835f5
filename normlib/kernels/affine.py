"""Element-wise kernels: the affine map of a norm, and dx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from normlib.kernels.machine import Machine
from normlib.kernels.tile import (
    Chunk,
    Operand,
    inside,
    lanes_per_tile,
    launch,
    output,
    rows_per_tile,
    rows_that_fit,
    widened,
)
from normlib.kernels.view import elements_of

MOST_LANES = 2048  # a longer tile makes longer instructions, which gain nothing


def elementwise(
    body: Callable[..., Array], operands: Sequence[Array | None], *, name: str, dtype: Any, machine: Machine,
    rows: int | None = None, chunk: int | None = None, temporary: int = 12,
) -> Array:  # fmt: skip
    """`body(*operands)` element by element, rounded to `dtype` once.

    Args:
      body: a function of float32 tiles (masks bool), any of them `[rows, 1]`, `[1, lanes]` or `[1, 1]`.
      operands: the first gives the shape; the rest of its rank and broadcastable to it, or None.
      name: of the kernel in reports.
      machine: where it runs.
      rows, chunk: rows and lanes per tile; by default what fits.
      temporary: bytes per entry of the float32 values in use at once; three by default.
    """
    x = operands[0]
    assert x is not None
    present = [t for t in operands if t is not None]
    view = elements_of(x.shape, [t.shape for t in present])
    a, m, l = view.tile_shape
    arrays = [as_bytes(view.array(t)) for t in present]
    lanes = lanes_per_tile(l, chunk or MOST_LANES, machine)
    fit = rows_that_fit(arrays, lanes, machine, size=x.size, extra=2 * jnp.dtype(dtype).itemsize + temporary)
    tile = rows_per_tile(m, rows or fit, machine)

    def kernel(*refs: Any) -> None:
        ins, (out,) = list(refs[:-1]), refs[-1:]
        part = Chunk(
            machine, 0, lanes,
            None if l % lanes == 0 else inside(pl.program_id(2) * lanes, lanes, l, 1),
            None if m % tile == 0 else inside(pl.program_id(1) * tile, tile, m, 0), lanes,
        )  # fmt: skip
        values = [None if t is None else _loaded(part, ins.pop(0)) for t in operands]
        part.write(out, body(*values))

    def operand(t: Array) -> Operand:
        sides = (t.shape[0] != 1, t.shape[1] != 1, t.shape[2] != 1)
        block = (None, tile if sides[1] else 1, lanes if sides[2] else 1)
        return Operand(t, block, lambda i, j, k: (i * sides[0], j * sides[1], k * sides[2]))

    out = output((a, m, l), dtype, (None, tile, lanes), lambda i, j, k: (i, j, k))
    (y,) = launch(
        kernel, name, (a, pl.cdiv(m, tile), pl.cdiv(l, lanes)),
        [operand(t) for t in arrays], [out], machine,
        semantics=("parallel", "parallel", "parallel"), entries=tile * lanes,
    )  # fmt: skip
    return y.reshape(x.shape)


def as_bytes(t: Array) -> Array:
    """A mask as int8: kernels have no bool in memory."""
    return t.astype(jnp.int8) if t.dtype == jnp.bool_ else t


def _loaded(part: Chunk, ref: Any) -> Array:
    value = part.read(ref)
    return value != 0 if ref.dtype == jnp.int8 else widened(value)


def centred(x: Array, mean: Array | None, low: Array | None) -> Array:
    """x - mean - low of float32 tiles: subtracting the mean first is exact where x is near it."""
    return x if mean is None or low is None else (x - mean) - low


def finite(t: Array) -> Array:
    """Which entries are finite: only there is t - t zero."""
    return t - t == 0


def affine_tile(x, mean, low, rstd, scale, bias, where=None):
    """`normlib.passes.Pass.apply` of float32 tiles, unrounded."""
    xc = given = centred(x, mean, low)
    if where is not None:
        usable = where | finite(given) | (rstd == 0)
        xc = jnp.where(usable & (rstd != 0), given, 0.0)
    y = xc * rstd
    y = y if scale is None else y * scale
    y = y if bias is None else y + bias
    return y if where is None else jnp.where(usable, y, given)


def grad_tile(x, dy, mean, low, rstd, weight, c1, c0, where=None):
    """`normlib.passes.Pass.grad_apply` of float32 tiles, unrounded."""
    xc = centred(x, mean, low)
    xc = xc if where is None else jnp.where(where, xc, 0.0)
    through = xc * c1
    through = through if c0 is None else through + c0
    through = through if where is None else jnp.where(where, through, 0.0)
    g = dy if weight is None else dy * weight
    return (g - through) * rstd
