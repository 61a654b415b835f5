"""The backward of a norm of rows in one kernel: both row sums, then dx, for one read of x and dy.

g = dy * weight;   dx = (g - c1 * (x - mean) - c0) * rstd,   c0 = sum(g) / n,   c1 = rstd * sum(g * xhat) / n
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from normlib.kernels.affine import as_bytes, centred, grad_tile
from normlib.kernels.machine import Machine
from normlib.kernels.phases import Columns, Out, Phase, run_rows, tiling
from normlib.kernels.tile import Chunk, widened
from normlib.kernels.view import View


def row_norm_grad(
    x: Array, dy: Array, mean: Array | None, low: Array | None, rstd: Array, weight: Array | None = None, *,
    view: View, machine: Machine, dtype: Any = None, name: str | None = None,
    rows: int | None = None, chunk: int | None = None, residency: str | None = None,
) -> Array:  # fmt: skip
    """dx of a norm over the lanes of `view`, `[A, M, L]` in `dtype` (x's by default), rounded once.

    Args:
      x, dy: of `view.shape`.
      mean, low, rstd: one value per row, of the same rank; mean and low None where x was not centred.
      weight: what y was multiplied with, broadcastable to x, or None.
      view: how the shape is seen as [A, M, L].
      machine: where it runs.
      name: of the kernel in reports.
      rows, chunk, residency: the tiling asked for; see `sim_npu.TilePlan`.
    """
    given = [x, dy, mean, low, rstd, weight]
    arrays = [as_bytes(view.array(t)) for t in given if t is not None]
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    moving = sum(2 * t.dtype.itemsize for t in arrays if t.size == x.size) + 2 * dtype.itemsize
    fixed = sum(2 * t.dtype.itemsize for t in arrays if t.shape[2] != 1 and t.size != x.size)
    tile = tiling(
        view.tile_shape, machine, moving=moving, temporary=12, fixed=fixed, rows=rows, chunk=chunk, residency=residency
    )
    body = _Body(view.tile_shape[2], [t is not None for t in given])
    (dx,) = run_rows(
        body.phases(), view, arrays, [Out(dtype)], tile, machine=machine, columns=lambda done: (),
        name=name or ("rms_norm_grad" if mean is None else "layer_norm_grad"),
    )  # fmt: skip
    return dx


class _Body:
    """Refs: x, dy, mean, low, rstd, weight (those given), dx."""

    def __init__(self, n: int, given: Sequence[bool]):
        self.n, self.given = n, given

    def phases(self) -> list[Phase]:
        """Sum, then write."""
        return [
            Phase(self.summed, self.add, self.end, 2, 2),
            Phase(lambda c, refs, done: self.write(c, refs, (), done), self.write, lambda *_: (), 0, 0),
        ]

    def _values(self, chunk: Chunk, refs: Sequence[Any]) -> list[Array | None]:
        left = list(refs)
        return [widened(chunk.read(left.pop(0))) if use else None for use in self.given]

    def summed(self, chunk: Chunk, refs: Sequence[Any], done: Columns) -> Columns:
        """(sum of g, sum of g * xhat) of a chunk."""
        x, dy, mean, low, rstd, weight = self._values(chunk, refs)
        assert x is not None and dy is not None and rstd is not None
        g = chunk.clean(dy if weight is None else dy * weight)
        xhat = chunk.clean(centred(x, mean, low) * rstd)
        return jnp.sum(g, 1, keepdims=True), jnp.sum(g * xhat, 1, keepdims=True)

    def add(self, chunk: Chunk, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """The sums with one more chunk."""
        more = self.summed(chunk, refs, done)
        return carry[0] + more[0], carry[1] + more[1]

    def end(self, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """(c0, c1)."""
        n = float(self.n)
        rstd = widened(refs[sum(self.given[:4])][...])
        return carry[0] / n, rstd * (carry[1] / n)

    def write(self, chunk: Chunk, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """dx of a chunk."""
        x, dy, mean, low, rstd, weight = self._values(chunk, refs)
        c0, c1 = done
        dx = grad_tile(x, dy, mean, low, rstd, weight, c1, None if mean is None else c0)
        chunk.write(refs[sum(self.given)], dx)
        return ()
