"""Norms over channels whose statistics are of one device: whole channels in one kernel, forward or backward.

Which way is taken, whole channels or moments of parts and a map, is decided here: by price
(`normlib.kernels.channel_cost`), or by the machine's tuner. Every function gives None for the other way. Where a
program is split between devices along what shares statistics, every device takes the other way on its part, and x is
never gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from normlib.kernels.channel_cost import Bytes, pays
from normlib.kernels.channel_grad import channel_norm_grad, grad_bytes
from normlib.kernels.channel_norm import channel_norm, norm_bytes
from normlib.kernels.channel_parts import Over, moments_of, parts_backward, parts_forward
from normlib.kernels.channel_tiling import channel_tilings
from normlib.kernels.rows_grad import Given, through
from normlib.kernels.tiling import Tiling, titled
from normlib.kernels.view import Shape
from normlib.moments import Moments, count_entries
from normlib.passes import xla
from normlib.passes.placement import Split
from normlib.passes.whole import Backward, Forward
from normlib.precision import wide
from normlib.scope import unbroadcast

IN_PARTS = Tiling(1, 1, True, in_parts=True)


def forward(
    run, terms: Sequence[Array], scale, bias, where, behind=None, *, axes, eps, centered, dtype, channels=None,
    channel_axis=-1, weights=None, activation=None, residual_dtype=None, round_first=False,
) -> Forward | None:  # fmt: skip
    """As `normlib.passes.whole.forward`, of one term and without a mask."""
    x = terms[0]
    if where is not None or not isinstance(eps, int | float) or residual_dtype is not None or round_first:
        return None
    over = _over(run, terms, weights, axes, channels, channel_axis, [scale, bias, behind])
    if over is None:
        return None
    operands, dtype = [x, scale, bias, behind], jnp.dtype(dtype)
    name = over.name + ("" if activation is None else "_act")
    options: dict[str, Any] = {"eps": eps, "centered": centered, "activation": activation, "dtype": dtype}
    kept = ("mean", "low", "m2", "rstd") if centered else ("m2", "rstd")

    def whole(tiled, x, *given):
        sets = over.sets(x.shape)
        scale, bias, behind = given
        out = channel_norm(x, scale, bias, behind, **tiled, **options, sets=sets, machine=run.machine, name=name)
        assert out is not None  # a part of the channels fits where all do
        return [out.y.reshape(x.shape), *(sets.view.back(getattr(out, k)) for k in kept)]

    def parts(arrays, names):
        return parts_forward(run.machine, over, *arrays, names=names, **options)

    held = norm_bytes(*operands, sets=over.sets(x.shape), activation=activation, dtype=dtype)
    tile = _chosen(run, over, held, name, [dtype], operands, whole, parts)
    if tile is None:
        return None

    def kernel(*arrays):
        return whole(asked(tile) if arrays[0].shape == x.shape else {}, *arrays)

    def formula(x, scale, bias, behind):
        s = wide(x)
        mean, low, m2, rstd = _moments(over, s, eps, centered)
        z = xla.mapped(s, mean, low, rstd, scale, bias)
        z = z if behind is None else z + wide(behind)
        y = (z if activation is None else activation(z)).astype(dtype)
        return [y, *((mean, low) if centered else ()), m2, rstd]

    split = Split(added=over.axes, shared=over.axes, across=parts, units=over.units)
    y, *found = run.call(kernel, formula, operands, statistics=(), split=split)
    *centre, m2, rstd = map(over.by_set, found)
    mean, low = centre or (jnp.zeros_like(m2), jnp.zeros_like(m2))
    count = count_entries(x.shape, over.axes, None) * over.group
    return Forward(y, None, Moments(jnp.broadcast_to(count, m2.shape), mean, low, m2), rstd)


def backward(
    run, terms: Sequence[Array], dy, mean, low, rstd, scale=None, bias=None, behind=None, extra=None, *, axes,
    channels=None, channel_axis=-1, weights=None, activation=None, outs=None, behind_dtype=None,
    shapes: dict[str, Shape] | None = None,
) -> Backward | None:  # fmt: skip
    """As `normlib.passes.whole.backward`, of one term, with parameters that are constant within a channel."""
    x, shapes = terms[0], shapes or {}
    if extra is not None or "sum" in shapes or (outs is not None and list(outs) != [(1.0, x.dtype.name)]):
        return None
    over = _over(run, terms, weights, axes, channels, channel_axis, [dy, scale, bias, behind])
    if over is None:
        return None
    constant = [*shapes.values(), *([] if scale is None else [scale.shape])]
    if any(over.sets(x.shape).varies(s) for s in constant):
        return None
    mean, low, rstd = (None if t is None else over.by_channel(t) for t in (mean, low, rstd))
    operands, number = [x, dy, mean, low, rstd, scale, bias, behind], 1 + (behind_dtype is not None)
    name = over.name + ("" if activation is None else "_act") + "_grad"
    options: dict[str, Any] = {"activation": activation, "behind_dtype": behind_dtype}

    def whole(tiled, x, *given):
        sets = over.sets(x.shape)
        out = channel_norm_grad(x, Given(*given), **tiled, **options, sets=sets, machine=run.machine, name=name)
        assert out is not None  # a part of the channels fits where all do
        full = [t.reshape(x.shape) for t in (out.dx, out.dz) if t is not None]
        return full, over.parameters(run.machine, shapes, x.shape, *map(sets.view.back, (out.s0, out.s1)))

    def parts(arrays, names):
        *full, s0, s1 = parts_backward(run.machine, over, *arrays, names=names, **options)
        return full, over.parameters(run.machine, shapes, arrays[0].shape, s0, s1)

    held = grad_bytes(x, Given(*operands[1:]), sets=over.sets(x.shape), **options)
    written = [x.dtype] if behind_dtype is None else [x.dtype, behind_dtype]
    tile = _chosen(run, over, held, name, written, operands, whole, parts)
    if tile is None:
        return None

    def kernel(*arrays):
        return whole(asked(tile) if arrays[0].shape == x.shape else {}, *arrays)

    def formula(x, *given):
        s, v = wide(x), Given(*(None if t is None else wide(t) for t in given))
        dz, xhat = through(s, v, activation)
        g = dz if v.scale is None else dz * v.scale
        c0, c1 = map(over.means, (g, g * xhat))
        ds = (g - xla.centred(s, v.mean, v.low) * (v.rstd * c1) - (c0 if v.mean is not None else 0.0)) * v.rstd
        full = [ds.astype(x.dtype)] + ([] if behind_dtype is None else [dz.astype(behind_dtype)])
        terms = {"scale": dz * xhat, "bias": dz}
        return full, [unbroadcast(jnp.broadcast_to(terms[k], x.shape), shapes[k]) for k in shapes]

    split = Split(added=tuple(range(x.ndim)), shared=over.axes, across=parts, units=over.units)
    full, found = run.call(kernel, formula, operands, statistics=(2, 3, 4), split=split)
    return Backward(full[:1], full[1] if number > 1 else None, dict(zip(shapes, found)))


def _over(run, terms, weights, axes, channels, channel_axis, others) -> Over | None:
    """What shares statistics, where kernels compute all operands and whole channels can be told apart."""
    x, operands = terms[0], [*terms, *(t for t in others if t is not None)]
    if len(terms) != 1 or any(w != 1 for w in weights or ()) or not all(run.computes(t) for t in operands) or not axes:
        return None
    axis = channel_axis % x.ndim
    over = Over(tuple(axes), axis, 1 if channels is None else x.shape[axis] // channels)
    return over if over.fits(x.shape) else None


def _moments(over: Over, s: Array, eps: float, centered: bool) -> tuple[Array | None, Array | None, Array, Array]:
    """(mean, low, m2, rstd) for every channel of s, in plain JAX."""
    if centered:
        own = over.pooled(xla.moments(s, axes=over.axes, where=None))
        return own.mean, own.low, own.m2, own.rstd(eps)
    m2 = over.summed(xla.sums(s, None, axes=over.axes, where=None)[1])
    n = math.prod(s.shape[a] for a in over.axes) * over.group
    return None, None, m2, moments_of(n, None, None, m2).rstd(eps)


def _chosen(
    run, over: Over, held: Bytes, name: str, written: Sequence[Any], operands, whole: Callable, parts: Callable
) -> Tiling | None:
    """The tiling of whole channels, or None for the other way."""
    x, machine = operands[0], run.machine
    sets = over.sets(x.shape)
    tile = channel_tilings(sets, machine, held)
    if tile is None or machine.tuner is None:
        return tile if tile is not None and pays(sets, machine, held, tile) else None
    present = [i for i, t in enumerate(operands) if t is not None]

    def build(choice: Tiling, *arrays: Array) -> Any:
        filled: list[Any] = [None] * len(operands)
        for i, t in zip(present, arrays):
            filled[i] = t
        return parts(filled, ()) if choice.in_parts else whole(asked(choice), *filled)

    title = f"{titled(name, x.dtype, written)}_over_{'_'.join(map(str, over.axes))}" + (
        f"_by_{over.group}" if over.group > 1 else ""
    )
    found = machine.tuner(title, [operands[i] for i in present], (tile, *tile.others, IN_PARTS), build)
    return None if found.in_parts else replace(found, others=())


def asked(tile: Tiling) -> dict[str, Any]:
    """A tiling as arguments of a kernel."""
    return {"rows": tile.rows, "chunk": tile.chunk, "residency": "stream" if tile.streamed else "row"}
