"""How an array is split over an `AxisType.Explicit` mesh, which JAX tracks in its type, and casts between such types.

Under automatic sharding, and along axes that shard_map has made manual, nothing is tracked: every function here finds
nothing split and returns what it was given.
"""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, PartitionSpec, reshard
from jaxtyping import Array


def splits(x: Array) -> tuple[tuple[str, ...], ...]:
    """For each axis of `x` (any shape) the names of the explicit mesh axes that it is split over."""
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
    found = [_names(entry) for entry in spec]
    return tuple(found + [()] * (len(x.shape) - len(found)))


def pieces(x: Array, axis: int) -> int:
    """Into how many pieces `axis` of `x` (any shape) is split over explicit mesh axes; 1 where none is tracked."""
    sizes = dict(_mesh(x).shape) if splits(x)[axis] else {}
    number = 1
    for name in splits(x)[axis]:
        number *= sizes[name]
    return number


def unsplit(t: Array, axis: int) -> Array:
    """`t` (tiny, any shape) with `axis` on every device, so that it can be reshaped."""
    given = splits(t)
    axis %= t.ndim
    if not given[axis]:
        return t
    return _cast(t, [() if i == axis else names for i, names in enumerate(given)], _mesh(t))


def alike(arrays: list[Array]) -> list[Array]:
    """`arrays`, tiny and of one shape, all split as those of them are that are split; stacking asks for it."""
    given = [splits(t) for t in arrays]
    common = tuple(max(names, key=len) for names in zip(*given))
    if all(s == common for s in given):
        return arrays
    mesh = _mesh(arrays[next(i for i, s in enumerate(given) if any(s))])
    return [t if s == common else _cast(t, common, mesh) for t, s in zip(arrays, given)]


def _names(entry) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _mesh(t: Array):
    return jax.typeof(t).sharding.mesh


def _cast(t: Array, names, mesh) -> Array:
    return reshard(t, NamedSharding(mesh, PartitionSpec(*(n or None for n in names))))  # no mesh need be set
