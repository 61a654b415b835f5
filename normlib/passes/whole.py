"""Norms whose statistics are of one device and of rows, forward or backward in one kernel.

What a fused operator puts before and behind the norm is in the same kernel: a weighted sum, something added, an
activation, the cotangent of the sum itself. Every function gives None where one kernel does not do it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from normlib.kernels.rows import row_norm
from normlib.kernels.rows_grad import Given, RowGrad, row_norm_grad, row_sums_terms, through
from normlib.kernels.sums import sums as kernel_sums
from normlib.kernels.tile import weighted
from normlib.kernels.tiling import pooled_fits
from normlib.kernels.view import Shape, View, groups_of, rows_of
from normlib.moments import Moments, count_entries
from normlib.passes import xla
from normlib.passes.placement import Split
from normlib.precision import rounded, wide
from normlib.scope import unbroadcast


class Forward(NamedTuple):
    """What a forward in one kernel gives: y, the sum (None where it is not asked for), moments and rstd."""

    y: Array
    residual: Array | None
    moments: Moments
    rstd: Array


class Backward(NamedTuple):
    """What a backward in one kernel gives: ds per output, the cotangent behind the activation or None, and those of
    parameters by name."""

    ds: list[Array]
    dz: Array | None
    parameters: dict[str, Array]


def forward(
    run, terms: Sequence[Array], scale, bias, where, behind=None, *, axes, eps, centered, dtype, channels=None,
    channel_axis=-1, weights=None, activation=None, residual_dtype=None, round_first=False,
) -> Forward | None:  # fmt: skip
    """See `normlib.kernels.rows.row_norm`; with `channels` groups along `channel_axis` share statistics."""
    x = terms[0]
    weights = tuple(weights or (1.0,) * len(terms))
    view = _view(run, x, axes, channels, channel_axis, [*terms, scale, bias, where, behind])
    if view is None or (view.pooled and not pooled_fits(view, run.machine)):
        return None
    number, dtype = len(terms), jnp.dtype(dtype)
    options = {"centered": centered, "weights": weights, "activation": activation, "dtype": dtype}
    options |= {"residual_dtype": residual_dtype, "round_first": round_first}
    options |= {"name": _name(view, centered, terms, activation)}

    def kernel(*arrays):
        scale, bias, where, behind, *dynamic = arrays[number:]
        room = dynamic[0] if dynamic else eps
        here = _part(run, arrays[0], axes, channels, channel_axis, arrays)
        out = row_norm(
            arrays[:number], scale, bias, where, behind=behind, view=here, eps=room, machine=run.machine, **options
        )
        columns = [out.m2, out.rstd, *((out.mean, out.low) if centered else ())]
        full = [out.y, *([] if out.residual is None else [out.residual])]
        return [here.back(t) for t in (*full, *columns)]

    def formula(*arrays):
        scale, bias, where, behind, *dynamic = (None if t is None else view.given(t) for t in arrays[number:])
        room = arrays[-1] if dynamic else eps
        s = weighted([wide(view.given(t)) for t in arrays[:number]], weights)
        s = rounded(s, residual_dtype) if round_first else s
        over = _reduced(view)
        if centered:
            own = xla.moments(s, axes=over, where=where)
        else:
            own = _own(s.shape, over, where, None, None, xla.sums(s, None, axes=over, where=where)[1])
        rstd = own.rstd(room)
        mean, low = (own.mean, own.low) if centered else (None, None)
        z = xla.mapped(s, mean, low, rstd, scale, bias, where)
        z = z if behind is None else z + wide(behind)
        y = (z if activation is None else activation(z)).astype(dtype)
        full = [y, *([] if residual_dtype is None else [s.astype(residual_dtype)])]
        return [view.joined(t) for t in (*full, own.m2, rstd, *((mean, low) if centered else ()))]

    dynamic = [] if isinstance(eps, int | float) else [jnp.reshape(eps, jnp.shape(eps) or (1,) * x.ndim)]
    operands = [*terms, scale, bias, where, behind, *dynamic]
    held = (number + 4,)
    split = Split(whole=_set(x, axes, channels, channel_axis))
    y, *found = run.call(kernel, formula, operands, statistics=held, split=split)
    residual = found.pop(0) if residual_dtype is not None else None
    m2, rstd, *centre = found
    mean, low = centre or (None, None)
    given = None if where is None else view.given(where)
    own = _own(view.shape, _reduced(view), given, *(None if t is None else view.given(t) for t in (mean, low, m2)))
    return Forward(y, residual, jax.tree.map(view.joined, own), rstd)


def backward(
    run, terms: Sequence[Array], dy, mean, low, rstd, scale=None, bias=None, behind=None, extra=None, *, axes,
    channels=None, channel_axis=-1, weights=None, activation=None, outs=None,
    behind_dtype=None, shapes: dict[str, Shape] | None = None,
) -> Backward | None:  # fmt: skip
    """See `normlib.kernels.rows_grad.row_norm_grad`; `shapes` of the parameters "scale", "bias" and "sum" (a vector
    that was added to the terms) whose cotangents are wanted, in float32. Statistics are of the shape of sets."""
    x, given = terms[0], Given(dy, mean, low, rstd, scale, bias, behind, extra)
    weights = tuple(weights or (1.0,) * len(terms))
    view = _view(run, x, axes, channels, channel_axis, [*terms, given.rstd, *given])
    if view is None or (view.pooled and not pooled_fits(view, run.machine)):
        return None
    shapes, number = shapes or {}, len(terms)
    outs = [(1.0, x.dtype)] if outs is None else list(outs)
    plan = _Parameters(view, x.shape, shapes, given.scale)
    whole = _set(x, axes, channels, channel_axis)
    if view.split is not None and (plan.apart or (view.pooled and not plan.flat)):
        return None

    def kernel(*arrays):
        here = Given(*arrays[number:])
        shape = arrays[0].shape
        part = _part(run, arrays[0], axes, channels, channel_axis, arrays)
        mine = _Parameters(part, shape, {k: tuple(min(m, n) for m, n in zip(s, shape)) for k, s in shapes.items()},
                           here.scale)  # fmt: skip
        out = row_norm_grad(
            arrays[:number], here, view=part, machine=run.machine, weights=weights, activation=activation, outs=outs,
            behind_dtype=behind_dtype, wanted=mine.collected, apart=mine.apart, by_row=bool(mine.by_row),
            name=_name(view, mean is not None, terms, activation) + "_grad",
        )  # fmt: skip
        full = [*out.ds, *([] if out.dz is None else [out.dz])]
        found = mine.found(out, run, arrays[:number], here, weights, activation)
        return [part.back(t) for t in full], [found[key] for key in shapes]

    def formula(*arrays):
        v = Given(*(None if t is None else view.given(t) for t in arrays[number:]))
        v = v._replace(dy=wide(v.dy), behind=None if v.behind is None else wide(v.behind))
        s = weighted([wide(view.given(t)) for t in arrays[:number]], weights)
        over = _reduced(view)
        n = math.prod(view.shape[a] for a in over)
        dz, xhat = through(s, v, activation)
        g = dz if v.scale is None else dz * v.scale
        c0, c1 = (jnp.sum(t, over, keepdims=True) / n for t in (g, g * xhat))
        xc = xla.centred(s, v.mean, v.low)
        ds = (g - xc * (v.rstd * c1) - (c0 if v.mean is not None else 0.0)) * v.rstd
        ds = ds if v.extra is None else ds + wide(v.extra)
        full = [(ds * w).astype(d) for w, d in outs] + ([] if behind_dtype is None else [dz.astype(behind_dtype)])
        terms = {"scale": dz * xhat, "bias": dz, "sum": ds}
        sums = [unbroadcast(view.joined(jnp.broadcast_to(terms[k], s.shape)), shapes[k]) for k in shapes]
        return [view.joined(t) for t in full], sums

    split = Split(whole=whole, added=tuple(i for i in range(x.ndim) if i not in whole))
    full, sums = run.call(
        kernel, formula, [*terms, *given], statistics=tuple(number + i for i in (1, 2, 3)), split=split
    )  # fmt: skip
    ds, rest = full[: len(outs)], full[len(outs) :]
    return Backward(ds, rest[0] if rest else None, dict(zip(shapes, sums)))


class _Parameters:
    """Where the cotangents of parameters come from: sums of a row, sums collected over rows, or a kernel apart."""

    def __init__(self, view: View, shape: Shape, shapes: dict[str, Shape], scale: Array | None):
        self.view, self.shape, self.shapes = view, shape, shapes
        along = {key: _varies(view, p) for key, p in shapes.items()}
        self.flat = scale is None or not _varies(view, scale.shape)[2]  # the scale is constant along lanes
        self.by_row = [k for k, (_, _, l) in along.items() if not l and k != "sum" and self.flat]
        self.collected = [k for k, (_, m, l) in along.items() if l and not m and not view.pooled]
        self.apart = [k for k in shapes if k not in (*self.by_row, *self.collected)]

    def found(self, out: RowGrad, run, terms, given: Given, weights, activation) -> dict[str, Array]:
        """The cotangents, float32, in the parameters' shapes."""
        columns = {"scale": "s1", "bias": "s0"}
        rows = {k: self.view.back(out.columns[columns[k]]) for k in self.by_row}
        found = self.merged(run, rows) | self.collected_in(out, run)
        by_axes: dict[tuple[int, ...], list[str]] = {}
        for k in self.shapes:
            if k not in found:
                by_axes.setdefault(_summed_axes(self.shape, self.shapes[k]), []).append(k)
        for axes, keys in by_axes.items():
            c = [self.view.back(out.columns[key]) for key in ("c0", "c1")] if "sum" in keys else [None, None]
            operands = [*terms, *c, *given]
            found |= zip(keys, _sums(run, row_sums_terms(activation, weights, keys), operands, axes, len(keys)))
        return found

    def collected_in(self, out: RowGrad, run) -> dict[str, Array]:
        """Partial sums over rows, merged in their order."""
        if not out.sums:
            return {}
        parts = list(out.sums.values())
        a, number, l = parts[0].shape
        if number > 1:
            parts = _sums(run, lambda *t: t, parts, (1,), len(parts), rows=number)
        whole = {k: self.view.back(t.reshape(a, 1, l)) for k, t in zip(out.sums, parts)}
        return {k: unbroadcast(t, self.shapes[k]) for k, t in whole.items()}

    def merged(self, run, rows: dict[str, Array]) -> dict[str, Array]:
        """Sums of rows, summed to the parameters' shapes."""
        if len({self.shapes[k] for k in rows}) > 1:
            return {key: t for k in rows for key, t in self.merged(run, {k: rows[k]}).items()}
        if not rows:
            return {}
        key, t = next(iter(rows.items()))
        axes = _summed_axes(t.shape, self.shapes[key])
        return dict(zip(rows, _sums(run, lambda *t: t, list(rows.values()), axes, len(rows)))) if axes else rows


def _sums(run, terms, operands, axes, number: int, rows: int | None = None) -> list[Array]:
    name = "grad_sums_merge" if len(operands) == number else "grad_sums"
    found = kernel_sums(terms, operands, axes=axes, number=number, name=name, machine=run.machine, rows=rows)
    return list(found)


def _summed_axes(shape: Shape, to: Shape) -> tuple[int, ...]:
    return tuple(i for i, (n, m) in enumerate(zip(shape, to)) if m == 1 and n != 1)


def _varies(view: View, shape: Shape) -> tuple[bool, ...]:
    """Whether an array of `shape` varies along A, M and L."""
    split = jax.eval_shape(view.given, jax.ShapeDtypeStruct(shape, jnp.float32)).shape
    return tuple(any(split[i] != 1 for i in part) for part in view.parts)


def _name(view: View, centered: bool, terms, activation) -> str:
    name = "group_norm" if view.pooled else "layer_norm" if centered else "rms_norm"
    return ("add_" if len(terms) > 1 else "") + name + ("" if activation is None else "_act")


def _reduced(view: View) -> tuple[int, ...]:
    return (*view.parts[1], *view.parts[2]) if view.pooled else view.parts[2]


def _view(run, x: Array, axes, channels, channel_axis, operands) -> View | None:
    if not run.computes(x) or not all(run.computes(t) or t.dtype == jnp.bool_ for t in operands if t is not None):
        return None
    if channels is not None:
        return groups_of(x.shape, axes, channel_axis % x.ndim, channels)
    shapes = [t.shape for t in operands if t is not None]
    return rows_of(x.shape, axes, shapes) if axes else None


def _part(run, x: Array, axes, channels, channel_axis, operands) -> View:
    """The view of a part of x: a device's, where the program is split."""
    view = _view(run, x, axes, channels, channel_axis, operands)
    assert view is not None  # the whole has been seen so
    return view


def _set(x: Array, axes, channels, channel_axis) -> tuple[int, ...]:
    """Axes along which a set of statistics lies."""
    return tuple(axes) if channels is None else (*axes, channel_axis % x.ndim)


def _own(shape, axes, where, mean, low, m2) -> Moments:
    count = jnp.broadcast_to(count_entries(shape, axes, where), m2.shape)
    return Moments(count, jnp.zeros_like(m2) if mean is None else mean, jnp.zeros_like(m2) if low is None else low, m2)
