"""What the norms by the statistics of a batch share: who pools with whom, and one call of the engine."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from normlib import _arguments as check
from normlib import passes
from normlib._composed import Activation, composed
from normlib._forward import effective, folded, wide_or_none
from normlib._sharding import pieces
from normlib.engine import normalize
from normlib.moments import Moments, reciprocal_root
from normlib.precision import output_dtype, statistics_dtype, wide
from normlib.scope import Scope, axis_size


def batch_normalized(
    x: Array, scale: Array | None, bias: Array | None, *, channels: tuple[int, ...], eps: float, where: Array | None,
    operator: str, scale_offset: float = 0.0, axis_name=None, axis_index_groups=None,
    virtual_batch_size: int | None = None, ragged: bool = False, running: str = "merged", shift: Array | None = None,
    method: str = "auto", on_single: str = "raise", rule: str = "reverse", rescale: bool = False,
    backend: str | None = None, out_dtype: DTypeLike | None = None, added: Array | None = None,
    activation: Activation | None = None,
) -> tuple[Array, Moments]:  # fmt: skip
    """Normalise x over all axes but `channels`; (y, moments of the shape of the channels).

    `scale` and `bias` are of x's rank and broadcastable to x (a row may have its own); y = activation(norm + added),
    `added` of x's shape. The other arguments and the errors are those of `normlib.batch_norm`, in `operator`'s name.
    """
    check.one_of(running, ("merged", "group_mean"), "running")
    reduced = tuple(a for a in range(x.ndim) if a not in channels)
    where = check.mask(where, x)
    shift = None if shift is None else check.feature(shift, "shift", x, channels)
    check.one_of(on_single, ("raise", "zero"), "on_single")
    virtual_batch_size = check.integer(virtual_batch_size, "virtual_batch_size")
    names, groups = check.names(axis_name), check.groups(axis_index_groups)
    scope, splits = _scope(x, channels, names, groups, virtual_batch_size, ragged, method)
    rows = math.prod(x.shape[a] for a in reduced)
    if splits > 1:
        last = x.shape[0] % virtual_batch_size  # type: ignore[operator]
        rows = rows // x.shape[0] * (last or virtual_batch_size)  # type: ignore[operator]
    if where is None:
        sharing = len(scope.groups[0]) if scope.groups else axis_size(scope.names)
        check.more_than_one(rows * sharing, on_single, f"{operator} of x with shape {x.shape}")
    arrays: list = [x, scale, bias, where, added, shift]
    if splits > 1:
        _check_split(x, splits, virtual_batch_size)
        arrays, reduced = _split_rows(arrays, splits, virtual_batch_size), tuple(a + 1 for a in reduced)
    first, scale, bias, where, added, shift = arrays
    options: dict[str, Any] = {
        "axes": reduced, "eps": check.epsilon(eps), "where": where, "scale_offset": scale_offset, "scope": scope,
        "shift": shift, "rule": rule, "rescale": rescale, "backend": backend, "out_dtype": out_dtype,
    }  # fmt: skip
    if activation is None and added is None:
        out = normalize(first, scale, bias, **options)
    else:
        out = composed([first], scale, bias, behind=added, activation=activation, residual=False, **options)  # type: ignore[assignment]
    y = out.y.reshape(-1, *x.shape[1:])[: x.shape[0]] if splits > 1 else out.y
    moments = out.total if running == "merged" or not scope.has_total else scope.group_mean(out.moments)
    kept = tuple(x.shape[a] for a in channels)
    return y, jax.tree.map(lambda t: t.reshape(kept), moments)


def stored_normalized(
    x: Array, mean: Array, var: Array, scale: Array | None, bias: Array | None, *, channels: tuple[int, ...],
    eps: float, scale_offset: float, out_dtype: DTypeLike,
) -> Array:  # fmt: skip
    """Normalise x by stored statistics; arguments and errors as `normlib.batch_norm_inference`."""
    eps = check.epsilon(eps)
    scale, bias = (check.parameter(p, n, x, channels) for p, n in ((scale, "scale"), (bias, "bias")))
    centre, spread = (check.parameter(p, n, x, channels) for p, n in ((mean, "mean"), (var, "var")))
    if centre is None or spread is None:
        raise TypeError("`mean` and `var` must be arrays of x's channels; got None.")
    dtype = statistics_dtype(x)
    rstd = reciprocal_root(spread.astype(dtype) + jnp.asarray(eps, dtype))
    x = x.astype(output_dtype(x.dtype))
    parameters = folded(rstd, effective(scale, scale_offset), wide_or_none(bias))
    backend = passes.current_backend()
    return backend.apply(x, wide(centre), jnp.zeros_like(wide(centre)), *parameters, dtype=out_dtype)


def _scope(x, channels, names, groups, virtual, ragged, method) -> tuple[Scope, int]:
    """The scope of a batch norm, and into how many virtual batches this device's rows are split."""
    if virtual is None:
        return Scope(names=names, groups=groups, method=method), 1
    if groups is not None:
        raise ValueError("`axis_index_groups` and `virtual_batch_size` both say who shares statistics: give one.")
    if virtual < 1:
        raise ValueError(f"`virtual_batch_size` must be a positive number of rows; got {virtual!r}.")
    if x.ndim == 0 or 0 in channels:
        raise ValueError(f"`virtual_batch_size` counts rows of axis 0, which is a channel axis of x, shape {x.shape}.")
    rows, devices = x.shape[0], axis_size(names)
    if rows == 0:
        return Scope(total_names=names, method=method), 1
    if virtual < rows and (rows % virtual == 0 or ragged):
        return Scope(total_names=names, total_axes=(0,), method=method), -(-rows // virtual)
    if virtual == rows:
        return Scope(total_names=names, method=method), 1
    if virtual == rows * devices:
        return Scope(names=names, method=method), 1
    together = virtual // rows if rows and virtual % rows == 0 else 0
    if together and devices % together == 0:
        neighbours = tuple(tuple(range(i, i + together)) for i in range(0, devices, together))
        return Scope(names=names, groups=neighbours, method=method), 1
    inside = [v for v in range(1, rows + 1) if rows % v == 0]
    across = [k * rows for k in range(2, devices + 1) if devices % k == 0]
    raise ValueError(
        f"`virtual_batch_size` {virtual} does not fit {rows} rows on each of {devices} devices; legal are {inside} "
        f"within a device and {across} across devices" + ("." if ragged else ", or any below with ragged=True.")
    )


def _check_split(x, splits, virtual):
    """Raise where explicitly sharded rows cannot be typed as virtual batches: one would span two devices."""
    devices = pieces(x, 0)
    if devices > 1 and (splits * virtual != x.shape[0] or splits % devices):
        raise ValueError(
            f"`virtual_batch_size` {virtual} does not divide the {x.shape[0] // devices} rows that each of {devices} "
            "devices holds, and JAX cannot type the virtual batches of explicitly sharded rows then: wrap the call in "
            "jax.sharding.auto_axes(f, out_sharding=...), or choose a divisor."
        )


def _split_rows(arrays, splits, virtual):
    """[B, ...] -> [splits, virtual, ...] of all that has rows; a smaller last virtual batch is padded and masked."""
    x, *others, shift = arrays
    where = others[2]
    rows = x.shape[0]
    missing = splits * virtual - rows
    if missing:
        real = jnp.arange(rows).reshape(-1, *(1,) * (x.ndim - 1)) < rows
        others[2] = real if where is None else jnp.broadcast_to(where, (rows, *where.shape[1:]))

    def split(t):
        if t is None:
            return None
        if t.shape[0] != rows or rows == 1:
            return t[None]
        padded = jnp.pad(t, [(0, missing)] + [(0, 0)] * (t.ndim - 1)) if missing else t
        return padded.reshape(splits, virtual, *t.shape[1:])

    return [split(t) for t in (x, *others)] + [None if shift is None else shift[None]]
