"""Norms of rows in one kernel: statistics and affine map, with sums before, an activation and columns of statistics.

    s = sum_i weights[i] * terms[i];  y = activation((s - mean) * rstd * scale + bias)

Statistics of a chunk are taken about its own mean, while it is in the buffer, and chunks are merged by Chan's formula
with the mean carried in two words: as accurate as two passes over the row, for one read of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from normlib.kernels.affine import affine_tile, as_bytes
from normlib.kernels.codes import Coder, Coding
from normlib.kernels.machine import Machine
from normlib.kernels.phases import Columns, Out, Phase, run_rows
from normlib.kernels.tile import Chunk, activated, at_least_zero, chan, quotient, weighted, widened
from normlib.kernels.tiling import lane_bytes, tiling
from normlib.kernels.view import View
from normlib.moments import two_sum


class RowNorm(NamedTuple):
    """What `row_norm` returns: `[A, M, L]` arrays (residual None if not asked for) and `[A, M, 1]` columns.

    No count where nothing is masked (it is L), no mean and low where x is not centred. With coders, y is None, `codes`
    are one array per coder and `scales` one column per coder that looks for one.
    """

    y: Any  # an array, or None
    residual: Array | None
    count: Array | None  # type: ignore[assignment]  # a tuple's method of that name is not missed
    mean: Array | None
    low: Array | None
    m2: Array
    rstd: Array
    codes: Sequence[Array] = ()
    scales: Sequence[Array] = ()


def row_norm(
    terms: Sequence[Array], scale: Array | None = None, bias: Array | None = None, where: Array | None = None, *,
    view: View, eps: float | Array, machine: Machine, centered: bool = True, weights: Sequence[float] | None = None,
    behind: Array | None = None, activation: Callable[[Array], Array] | None = None, dtype: Any = None,
    residual_dtype: Any = None, round_first: bool = False, coders: Sequence[Coder] = (), name: str | None = None,
    rows: int | None = None, chunk: int | None = None, residency: str | None = None,
) -> RowNorm:  # fmt: skip
    """Normalise the rows of a weighted sum of arrays.

    Args:
      terms: arrays that broadcast to `view.shape`, the first of that shape.
      scale, bias, where, behind: of the same rank and broadcastable to it, or None; `behind` is added after the norm.
      view: how the shape is seen as [A, M, L]; L is normalised, or M and L where it is pooled.
      eps: added to the variance; a number, or an array: a scalar, or one value per row in x's rank.
      machine: where it runs.
      centered: False keeps the mean in.
      weights: of the terms, 1 by default.
      activation: applied to float32 before the rounding.
      dtype: of y; that of the first term by default.
      residual_dtype: of the sum as an output; None for no such output.
      round_first: round the sum to `residual_dtype` before it is measured.
      coders: what writes codes of y instead of y; rows are not pooled then.
      name: of the kernel in reports.
      rows, chunk, residency: the tiling asked for; see `sim_npu.TilePlan`.
    """
    x = terms[0]
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    weights = tuple(weights or (1.0,) * len(terms))
    dynamic = None if isinstance(eps, int | float) else eps
    given = [*terms, scale, bias, where, behind]
    arrays = [as_bytes(view.array(t, periodic=True)) for t in given if t is not None]
    if dynamic is not None:
        arrays.append(view.array(jnp.reshape(dynamic, jnp.shape(dynamic) or (1,) * x.ndim), periodic=True))
    coding = Coding(coders, len(arrays), 5) if coders else None
    arrays += [view.array(t, periodic=True) for coder in coders for t in coder.arrays]
    body = _Body(
        view, machine, len(terms), weights, [t is not None for t in given[len(terms) :]], dynamic is not None,
        eps if dynamic is None else None, centered, activation, residual_dtype, round_first, coding,
    )  # fmt: skip
    written = [Out(c.dtype) for c in coders] or [Out(dtype)]
    full = [t for t in arrays if t.size == x.size]
    moving = sum(2 * t.dtype.itemsize for t in full) + sum(2 * jnp.dtype(o.dtype).itemsize for o in written)
    moving += 2 * jnp.dtype(residual_dtype).itemsize if residual_dtype is not None else 0
    moving += 8 if len(terms) > 1 else 0  # the sum is one more float32 value in use
    tile = tiling(
        view.tile_shape, machine, moving=moving, temporary=12 if activation is None and coding is None else 20,
        **lane_bytes(arrays, x.size), rows=rows, chunk=chunk, residency=residency, pooled=view.pooled,
    )  # fmt: skip
    wide = widened(x[:0]).dtype if x.ndim else jnp.float32
    kept = [i for i, use in enumerate((where is not None, centered, centered, True, True)) if use]
    number = len(kept) + (len(coding.searching) if coding is not None else 0)
    outs = [*written, *([Out(residual_dtype)] if residual_dtype is not None else [])]

    def columns(done: Columns) -> Columns:
        return (*(done[i] for i in kept), *(coding.scales(done) if coding is not None else ()))

    *found, side = run_rows(
        body.phases(), view, arrays, [*outs, Out(wide, columns=number, single=view.pooled)], tile, machine=machine,
        columns=columns, name=name or ("layer_norm" if centered else "rms_norm"),
    )  # fmt: skip
    residual = found.pop() if residual_dtype is not None else None
    sides = [side[:, :, i : i + 1] for i in range(number)]
    values: list[Any] = [None] * 5
    for i in kept:
        values[i] = sides.pop(0)
    count, mean, low, m2, rstd = values
    y, codes = (None, found) if coders else (found[0], [])
    return RowNorm(y, residual, count, mean, low, m2, rstd, codes, sides)


def row_moments(
    x: Array, *, view: View, machine: Machine, name: str = "moments",
    rows: int | None = None, chunk: int | None = None, residency: str | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(mean, low, m2), `[A, M, 1]` in float32, of the rows of `view`; arguments as `row_norm`."""
    body = _Body(view, machine, 1, (1.0,), [False] * 4, False, 0.0, True, None, None, False)
    tile = tiling(
        view.tile_shape, machine, moving=2 * x.dtype.itemsize, temporary=12, rows=rows, chunk=chunk,
        residency=residency,
    )  # fmt: skip
    phase = Phase(body.first, body.measure, lambda refs, carry, done: carry[1:], 4, 3)
    (columns,) = run_rows(
        [phase], view, [view.array(x)], [Out(widened(x[:0]).dtype, columns=3)], tile, machine=machine, name=name,
        columns=lambda done: done,
    )  # fmt: skip
    mean, low, m2 = (columns[:, :, i : i + 1] for i in range(3))
    return mean, low, m2


class _Body:
    """The phases of a row norm. Refs: terms, scale, bias, where, behind, eps (those given), y, residual."""

    def __init__(
        self,
        view,
        machine,
        terms,
        weights,
        given,
        dynamic,
        eps,
        centered,
        activation,
        residual_dtype,
        round_first,
        coding=None,
    ):
        _, m, l = view.tile_shape
        self.pooled, self.rows = view.pooled, m if view.pooled else 1
        self.n = self.rows * l
        self.machine, self.coding = machine, coding
        self.terms, self.weights, self.given, self.dynamic = terms, weights, given, dynamic
        self.eps, self.centered, self.activation = eps, centered, activation
        self.residual_dtype, self.round_first = residual_dtype, round_first

    def phases(self) -> list[Phase]:
        """Measure, then write."""
        flat = self.pooled
        measure = Phase(self.first, self.measure, self.end, 4, 5, flat_carry=flat, flat=5 if flat else 0)
        search = self.coding.search(lambda *at: self._value(*at)[0]) if self.coding is not None else []
        return [measure, *search, Phase(self.write_first, self.write, lambda refs, carry, done: (), 0, 0)]

    def _optional(self, chunk: Chunk, refs: Sequence[Any], number: int) -> Array | None:
        if not self.given[number]:
            return None
        value = chunk.read(refs[self.terms + sum(self.given[:number])])
        return value != 0 if value.dtype == jnp.int8 else widened(value)

    def _outputs(self, refs: Sequence[Any]) -> Sequence[Any]:
        at = self.terms + sum(self.given) + self.dynamic
        return refs[at + (self.coding.operands if self.coding is not None else 0) :]

    def sum_of(self, chunk: Chunk, refs: Sequence[Any], *, clean: bool = False) -> Array:
        """The weighted sum of the terms, rounded first where asked."""
        total = weighted([widened(chunk.read(ref, clean=clean)) for ref in refs[: self.terms]], self.weights)
        return total.astype(self.residual_dtype).astype(total.dtype) if self.round_first else total

    def _sum(self, t: Array) -> Array:
        """Of a row, `[rows, 1]`; of all rows, `[1, 1]`, where they are pooled."""
        if self.pooled and not self.machine.masked:
            return jnp.sum(t, (0, 1), keepdims=True)
        t = jnp.sum(t, 1, keepdims=True)
        return jnp.sum(t, 0, keepdims=True) if self.pooled else t  # Triton (JAX 0.12) sums along one axis at a time

    def measured(self, chunk: Chunk, refs: Sequence[Any]) -> tuple[Any, Array, Array]:
        """(count, mean, deviations) of a chunk: float32, a column or a number, a column, `[rows, size]`."""
        s = self.sum_of(chunk, refs, clean=True)
        where = self._optional(chunk, refs, 2)
        if where is None:
            number = chunk.count * self.rows
            count: Any = float(number)
            if not self.centered:
                return count, jnp.zeros((1 if self.pooled else s.shape[0], 1), s.dtype), s
            mean = quotient(self._sum(s), float(number), self.machine)
            return count, mean, chunk.clean(s - mean)
        where = jnp.broadcast_to(where, s.shape)
        count = self._sum(chunk.clean(where.astype(s.dtype)))
        s = jnp.where(where, s, jnp.zeros((), s.dtype))
        if not self.centered:
            return count, jnp.zeros_like(count), s
        mean = quotient(self._sum(s), jnp.maximum(count, 1.0), self.machine)
        return count, mean, chunk.clean(jnp.where(where, s - mean, jnp.zeros((), s.dtype)))

    def first(self, chunk: Chunk, refs: Sequence[Any], done: Columns) -> Columns:
        """(count, mean, low, m2) of the first chunk."""
        count, mean, d = self.measured(chunk, refs)
        m2 = self._sum(d * d)
        counts = jnp.full_like(mean, count) if isinstance(count, float) else count
        if not self.centered:
            return counts, mean, mean, m2
        rest = self._sum(d)
        part = quotient(rest, count if isinstance(count, float) else jnp.maximum(count, 1.0), self.machine)
        mean, low = two_sum(mean, part)
        return counts, mean, low, at_least_zero(m2 - rest * part)

    def measure(self, chunk: Chunk, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """Chan's merge of one more chunk; the mean stays in two words."""
        other = self.first(chunk, refs, done)
        if self.centered:
            return chan(carry, other, self.machine)
        return carry[0] + other[0], *carry[1:3], carry[3] + other[3]

    def end(self, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """(count, mean, low, m2, rstd)."""
        count, mean, low, m2 = carry
        masked = self.given[2]
        var = m2 / (jnp.maximum(count, 1.0) if masked else float(self.n))
        eps = widened(refs[self.terms + sum(self.given)][...]) if self.dynamic else self.eps
        # var - var is 0, or NaN where the variance is not finite: 1 / inf would be a silent 0
        rstd = 1.0 / jnp.sqrt(var + eps) + (var - var)
        return count, mean, low, m2, jnp.where(count > 0, rstd, 0.0) if masked else rstd

    def write_first(self, chunk: Chunk, refs: Sequence[Any], done: Columns) -> Columns:
        """The affine map of the first chunk."""
        return self.write(chunk, refs, (), done)

    def write(self, chunk: Chunk, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """The affine map of a chunk, or its codes, and the sum itself where it is asked for."""
        y, s = self._value(chunk, refs, done)
        outs = list(self._outputs(refs))
        number = 1 if self.coding is None else len(self.coding.coders)
        if self.coding is None:
            chunk.write(outs[0], y)
        else:
            self.coding.write(chunk, refs, outs[:number], y, done)
        for ref in outs[number:]:
            chunk.write(ref, s)
        return ()

    def _value(self, chunk: Chunk, refs: Sequence[Any], done: Columns) -> tuple[Array, Array]:
        """(y, sum of the terms) of a chunk, float32."""
        mean, low, rstd = done[1], done[2], done[4]
        scale, bias, where, behind = (self._optional(chunk, refs, i) for i in range(4))
        s = self.sum_of(chunk, refs)
        if self.pooled and scale is not None and where is None:  # the product of two columns, not of a tile
            rstd, scale = rstd * scale, None
        y = affine_tile(s, mean if self.centered else None, low, rstd, scale, bias, where)
        y = y if behind is None else y + behind
        return activated(self.activation, y, self.machine), s
