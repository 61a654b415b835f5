"""The backward of a norm of rows in one kernel, with what stands before and behind it, for one read of each array.

    z = xhat * scale + bias + behind;     dz = dy, or the cotangent of z through an activation
    g = dz * scale;   ds = (g - c1 * (s - mean) - c0) * rstd + extra,   c0 = sum(g) / n,   c1 = rstd * sum(g * xhat) / n

s is a weighted sum of arrays, formed again; `extra` is the cotangent of s itself. Sums of dz, dz * xhat and ds over
rows are the cotangents of bias, scale and of a vector added to s. Where grid steps run in order, they are collected
in the same kernel, a partial sum for each part of the rows; elsewhere where a program holds whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from normlib.kernels.affine import as_bytes, centred, grad_tile
from normlib.kernels.machine import Machine
from normlib.kernels.phases import Columns, Out, Phase, run_rows
from normlib.kernels.tile import Chunk, rows_per_tile, weighted, widened
from normlib.kernels.tiling import Tiling, lane_bytes, tiling
from normlib.kernels.view import View

MOST_COLLECTED = 8192  # lanes whose sums a Triton program keeps in registers
# What may be summed over rows
SUMMED = ("scale", "bias", "sum")


class RowGrad(NamedTuple):
    """What `row_norm_grad` returns.

    Attributes:
      ds: `[A, M, L]`, one array per entry of `outs`.
      dz: `[A, M, L]` or None.
      sums: by name, `[A, parts, L]`, partial sums over the rows; those that were wanted and collected.
      columns: `[A, M, 1]` each: c0 and c1 if something wanted was not collected, and with `by_row` the sums of dz and
        dz * xhat of every row.
    """

    ds: list[Array]
    dz: Array | None
    sums: dict[str, Array]
    columns: dict[str, Array]


class Given(NamedTuple):
    """The arrays of a backward besides the summed terms, of one rank and broadcastable to them, or None."""

    dy: Any
    mean: Any
    low: Any
    rstd: Any
    scale: Any = None
    bias: Any = None
    behind: Any = None
    extra: Any = None


def row_norm_grad(
    terms: Sequence[Array], given: Given, *, view: View, machine: Machine, weights: Sequence[float] | None = None,
    activation: Any = None, outs: Sequence[tuple[float, Any]] | None = None, behind_dtype: Any = None,
    wanted: Sequence[str] = (), apart: Sequence[str] = (), by_row: bool = False, name: str | None = None,
    rows: int | None = None, chunk: int | None = None, residency: str | None = None,
) -> RowGrad:  # fmt: skip
    """Cotangents of a norm over the lanes of `view`.

    Args:
      terms: what is summed, all but the first broadcastable to it.
      given: dy and the rest; mean and low None where s was not centred; bias and behind only matter to an activation.
      view: how the shape is seen as [A, M, L].
      machine: where it runs.
      weights: of the terms, 1 by default.
      activation: with a method `pull(dy, z, one)`, or None.
      outs: (weight, dtype) of each output weight * ds; one in the first term's dtype by default.
      behind_dtype: of dz as an output; None for no such output.
      wanted: names of `SUMMED` to collect over the rows where that can be done here.
      apart: names of `SUMMED` that vary along the rows: never collected, and c0 and c1 are columns for who sums them.
      by_row: whether sums per row are wanted as columns; then `scale` is constant along lanes.
      name: of the kernel in reports.
      rows, chunk, residency: the tiling asked for; see `sim_npu.TilePlan`.
    """
    x = terms[0]
    arrays = [as_bytes(view.array(t, periodic=True)) for t in (*terms, *given) if t is not None]
    outs = [(1.0, x.dtype)] if outs is None else list(outs)
    dtypes = [dtype for _, dtype in outs] + ([] if behind_dtype is None else [behind_dtype])
    moving = sum(2 * t.dtype.itemsize for t in arrays if t.size == x.size)
    moving += sum(2 * jnp.dtype(d).itemsize for d in dtypes) + (8 if len(terms) > 1 else 0)
    lanes: dict[str, Any] = lane_bytes(arrays, x.size)
    options: dict[str, Any] = {
        "moving": moving, "temporary": 16 if activation is None else 28, "rows": rows, "chunk": chunk,
        "residency": residency, "pooled": view.pooled,
    }  # fmt: skip
    collected = tuple(wanted)
    tile: Tiling | None
    if machine.masked:
        tile = _one_chunk(view.tile_shape, machine, rows) if chunk is None and not view.pooled else None
    else:
        held: dict[str, Any] = lanes | {"fixed": lanes["fixed"] + 12 * len(collected)}
        more = options | {"temporary": options["temporary"] + 4}
        tile = _staying(tiling(view.tile_shape, machine, **more, **held))
    if tile is None or not collected:
        collected, tile = (), tiling(view.tile_shape, machine, **options, **lanes)
    wide = widened(x[:0]).dtype if x.ndim else jnp.float32
    left = len(collected) < len(wanted) or bool(apart)
    body = _Body(view, weights or (1.0,) * len(terms), given, activation, outs, behind_dtype, collected, by_row, left)
    written = [Out(d) for d in dtypes] + [Out(wide, summed=True) for _ in collected]
    names = [*(("c0", "c1") if left else ()), *(("s0", "s1") if by_row else ())]
    written += [Out(wide, columns=len(names))] if names else []
    found = run_rows(
        body.phases(), view, arrays, written, tile, machine=machine,
        columns=body.columns, name=name or ("rms_norm_grad" if given.mean is None else "layer_norm_grad"),
    )  # fmt: skip
    ds, rest = list(found[: len(outs)]), list(found[len(outs) :])
    dz = rest.pop(0) if behind_dtype is not None else None
    sums = {key: rest.pop(0)[:, :, 0] for key in collected}
    return RowGrad(ds, dz, sums, {key: rest[0][:, :, i : i + 1] for i, key in enumerate(names)})


def _one_chunk(shape: tuple[int, int, int], machine: Machine, rows: int | None) -> Tiling | None:
    """The tiling of a Triton program that keeps sums over its rows: a row is one chunk, or there is none."""
    _, m, l = shape
    lanes = pl.next_power_of_2(l)
    if lanes > MOST_COLLECTED:
        return None
    return Tiling(rows_per_tile(m, rows or max(1, machine.entries // lanes), machine), lanes, False)


def _staying(tile: Tiling) -> Tiling | None:
    """The tilings whose rows stay: sums over rows cannot be collected for chunks that come and go."""
    found = [t for t in (replace(tile, others=()), *tile.others) if not t.streamed]
    return replace(found[0], others=tuple(found[1:])) if found else None


class _Body:
    """Refs: terms, those given, then ds, dz, sums."""

    def __init__(self, view, weights, given, activation, outs, behind_dtype, collected, by_row, left):
        _, m, l = view.tile_shape
        self.pooled, self.n = view.pooled, m * l if view.pooled else l
        self.weights, self.given = weights, [t is not None for t in given]
        self.activation, self.outs, self.behind, self.collected = activation, outs, behind_dtype, collected
        self.by_row, self.left = by_row, left
        self.used = len(weights) + sum(self.given)

    def phases(self) -> list[Phase]:
        """Sum, then write."""
        found = 4 if self.by_row else 2
        return [
            Phase(self.summed, self.add, self.end, 2, found, flat=2 if self.pooled else 0),
            Phase(lambda c, refs, done: self.write(c, refs, (), done), self.write, lambda *_: (), 0, 0),
        ]

    def columns(self, done: Columns) -> Columns:
        """What is written per row."""
        return (*(done[:2] if self.left else ()), *(done[2:] if self.by_row else ()))

    def _values(self, chunk: Chunk, refs: Sequence[Any]) -> tuple[Array, Given]:
        terms, rest = refs[: len(self.weights)], list(refs[len(self.weights) : self.used])
        s = weighted([widened(chunk.read(ref)) for ref in terms], self.weights)
        return s, Given(*(widened(chunk.read(rest.pop(0))) if use else None for use in self.given))

    def summed(self, chunk: Chunk, refs: Sequence[Any], done: Columns) -> Columns:
        """(sum of g, sum of g * xhat) of a chunk; unweighted where they are wanted by row."""
        s, v = self._values(chunk, refs)
        dz, xhat = through(s, v, self.activation)
        g = chunk.clean(dz if v.scale is None or self.unweighted else dz * v.scale)
        return jnp.sum(g, 1, keepdims=True), jnp.sum(g * chunk.clean(xhat), 1, keepdims=True)

    def add(self, chunk: Chunk, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """The sums with one more chunk."""
        more = self.summed(chunk, refs, done)
        return carry[0] + more[0], carry[1] + more[1]

    def end(self, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """(c0, c1), and the sums of rows."""
        n = float(self.n)
        at = len(self.weights) + sum(self.given[:3])
        rstd = widened(refs[at][...])
        s0, s1 = carry
        if self.unweighted and self.given[4]:
            scale = widened(refs[at + 1][...])
            s0, s1 = s0 * scale, s1 * scale
        if self.pooled:
            s0, s1 = jnp.sum(s0, 0, keepdims=True), jnp.sum(s1, 0, keepdims=True)
        c0, c1 = s0 / n, rstd * (s1 / n)
        return (c0, c1, *carry) if self.by_row else (c0, c1)

    @property
    def unweighted(self) -> bool:
        """Whether the sums of a row leave its scale out: rows that are pooled may have different ones."""
        return self.by_row or self.pooled

    def write(self, chunk: Chunk, refs: Sequence[Any], carry: Columns, done: Columns) -> Columns:
        """ds and dz of a chunk, and its part of the sums over rows."""
        c0, c1 = done[:2]
        s, v = self._values(chunk, refs)
        dz, xhat = through(s, v, self.activation)
        ds = grad_tile(s, dz, v.mean, v.low, v.rstd, v.scale, c1, None if v.mean is None else c0)
        ds = ds if v.extra is None else ds + v.extra
        results = list(refs[self.used :])
        for w, _ in self.outs:
            chunk.write(results.pop(0), ds if w == 1 else ds * w)
        if self.behind is not None:
            chunk.write(results.pop(0), dz)
        terms = {"scale": lambda: dz * xhat, "bias": lambda: dz, "sum": lambda: ds}
        for key in self.collected:
            chunk.add(results.pop(0), jnp.broadcast_to(terms[key](), s.shape))
        return ()


def through(s: Array, v: Given, activation: Any) -> tuple[Array, Array]:
    """(dz, xhat) of float32 tiles, z = xhat * scale + bias + behind being formed again for an activation."""
    xhat = centred(s, v.mean, v.low) * v.rstd
    if activation is None:
        return v.dy, xhat
    z = xhat if v.scale is None else xhat * v.scale
    z = z if v.bias is None else z + v.bias
    z = z if v.behind is None else z + v.behind
    return activation.pull(v.dy, z, jnp.ones((), s.dtype)), xhat


def row_sums_terms(activation: Any, weights: Sequence[float], wanted: Sequence[str]) -> Callable[..., tuple]:
    """Summands of `normlib.kernels.sums.sums` for what `row_norm_grad` did not collect: of tiles of c0, c1, the terms
    and those given."""

    def terms(*tiles):
        *summed, c0, c1 = tiles[: len(weights) + 2]
        v = Given(*tiles[len(weights) + 2 :])
        s = weighted(summed, weights)
        dz, xhat = through(s, v, activation)
        found = []
        for key in wanted:
            if key == "sum":
                ds = grad_tile(s, dz, v.mean, v.low, v.rstd, v.scale, c1, None if v.mean is None else c0)
                found.append(ds if v.extra is None else ds + v.extra)
            else:
                found.append(dz * xhat if key == "scale" else dz)
        return tuple(found)

    return terms
