"""One batch norm step (y, gradients, moments) in every parallel mode, each with its documented gradient recipe."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import normlib as nl

SHARD_MAP_MODES = ["vma", "vma_out", "novma", "novma_out"]  # check_vma on or off, grad taken inside or outside
MANUAL_MODES = [*SHARD_MAP_MODES, "pmap"]
GLOBAL_MODES = ["auto", "explicit"]


@functools.cache
def mesh(devices=4, explicit=False):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh((devices,), ("d",), axis_types=(kind,), devices=jax.devices()[:devices])


def objective(x, scale, bias, dy, where, **options):
    """A scalar whose gradients are the cotangents for dy; the outputs beside it."""
    out = nl.batch_norm(x, scale, bias, where=where, on_single="zero", **options)
    return (out.y.astype(jnp.float32) * dy).sum(), out


def step(mode, x, scale, bias, dy, where=None, *, devices=4, spread=False, lower=False, **options):
    """(y, dx, dscale, dbias, moments) of the global batch; with `spread` moments and parameters are per device."""
    options = {"axis_name": "d", **options} if mode in MANUAL_MODES else options
    run = _compiled(mode, devices, spread, where is not None, tuple(sorted(options.items())))
    if mode == "pmap":
        rows = [None if t is None else t.reshape(devices, -1, *t.shape[1:]) for t in (x, dy, where)]
        args = (rows[0], scale, bias, rows[1], rows[2])
    elif mode in GLOBAL_MODES:
        place = NamedSharding(mesh(devices, mode == "explicit"), P("d"))
        x, dy, where = (None if t is None else jax.device_put(t, place) for t in (x, dy, where))
        args = (x, scale, bias, dy, where)
    else:
        args = (x, scale, bias, dy, where)
    if lower:
        return run.lower(*args)
    y, dx, dscale, dbias, moments = run(*args)
    return y.reshape(x.shape), dx.reshape(x.shape), dscale, dbias, moments


@functools.cache
def _compiled(mode, devices, spread, masked, options):
    loss = functools.partial(objective, **dict(options))
    grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)

    def single(x, scale, bias, dy, where):
        (_, out), (dx, dscale, dbias) = grads(x, scale, bias, dy, where)
        return out.y, dx, dscale, dbias, out.moments

    if mode in GLOBAL_MODES:
        return jax.jit(single)

    def summed(*args):
        """Parameters' gradients are each device's part here: the caller adds them."""
        y, dx, dscale, dbias, moments = single(*args)
        return y, dx, *jax.lax.psum((dscale, dbias), "d"), moments

    if mode == "pmap":
        per_device = 0 if spread else None
        return jax.pmap(
            summed, axis_name="d", devices=jax.devices()[:devices], in_axes=(0, None, None, 0, 0 if masked else None),
            out_axes=(0, 0, None, None, per_device),
        )  # fmt: skip
    vma = not mode.startswith("novma")
    rows, whole = P("d"), P("d") if spread else P()
    in_specs = (rows, P(), P(), rows, rows)
    inside = jax.shard_map(
        single if vma else summed, mesh=mesh(devices), in_specs=in_specs, out_specs=(rows, rows, P(), P(), whole),
        check_vma=vma,
    )  # fmt: skip
    if not mode.endswith("out"):
        return jax.jit(inside)

    def total(*args):
        value, out = loss(*args)
        return jax.lax.psum(value, "d"), out.y, out.moments

    outer = jax.shard_map(
        total, mesh=mesh(devices), in_specs=in_specs, out_specs=(P(), rows, whole), check_vma=vma
    )  # fmt: skip

    def outside(x, scale, bias, dy, where):
        def f(x, scale, bias):
            value, y, moments = outer(x, scale, bias, dy, where)
            return value, (y, moments)

        (_, (y, moments)), cts = jax.value_and_grad(f, (0, 1, 2), has_aux=True)(x, scale, bias)
        return y, *cts, moments

    return jax.jit(outside)
