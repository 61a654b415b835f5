"""Kernel calls in programs that are split between devices: globally sharded arrays, shard_map, explicit meshes.

What splits programs does not look into kernels, so each call says along which axes it may be split
(`custom_partitioning`): devices then run it on their own parts, and add partial sums, instead of gathering x first.
Two smaller matters of the same kind: kernels reshape, which explicitly sharded axes refuse, and interpreters mix
values that vary over a mesh with constants that do not, which shard_map's types refuse.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.export
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from normlib._varying import vary, varying

Kernel = Callable[..., Any]
Levels = tuple[tuple[int, ...], ...]  # of each operand, which vmaps its leading axes belong to


@dataclass(frozen=True)
class Split:
    """Along which axes of its first operand a kernel call may be split between devices: all but those named here.

    Attributes:
      whole: axes that stay on one device.
      added: axes that may be split, along which results of size 1 are then partial sums, to be added.
      merge: what is done instead of adding: (results, names of mesh axes, shape of x's part) -> results.
      shared: those of `added` along which `across` takes the kernel's place: (arrays, names of mesh axes) -> results,
        which share what they must over these names themselves.
      across: see `shared`.
      units: (axis, entries) that stay together where an axis is split.
    """

    whole: tuple[int, ...] = ()
    added: tuple[int, ...] = ()
    merge: Callable[..., Any] | None = None
    shared: tuple[int, ...] = ()
    across: Callable[..., Any] | None = None
    units: tuple[tuple[int, int], ...] = ()

    def mapped(self, in_axes: Sequence[int | None], size: int) -> Split:
        """That of the call under one vmap more."""
        across = self.across
        if across is None:
            return self

        def under(arrays: Sequence[Array], names: Sequence[str]) -> Any:
            one = lambda *arrays: across(arrays, names)  # noqa: E731
            return jax.vmap(one, in_axes, axis_size=size)(*arrays)

        return replace(self, across=under)


def place(
    kernel: Kernel, arrays: Sequence[Array], split: Split | None, *, interpreted: bool, partition: bool = True
) -> Any:
    """`kernel(*arrays)` where the program around it may be split between devices.

    Args:
      kernel: of arrays; gives an array or a tree of them.
      arrays: the first of any shape, the rest of its rank and broadcastable to it; so are the results.
      split: None keeps all axes whole.
      interpreted: the kernel becomes ordinary JAX operations, and not one opaque call.
      partition: False leaves globally sharded arrays to the compiler.
    """
    split = Split(whole=tuple(range(arrays[0].ndim))) if split is None else split
    return _placed(kernel, split, interpreted, partition, ((),) * len(arrays), 0)(*arrays)


def _placed(kernel: Kernel, split: Split, interpreted: bool, partition: bool, levels: Levels, depth: int) -> Kernel:
    """The call under `depth` vmaps. Neither a partitioned nor an exported call can be vmapped by JAX."""

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        if any(varying(t) for t in arrays):
            return _untyped(kernel, arrays) if interpreted else kernel(*arrays)
        mesh = jax.sharding.get_abstract_mesh()
        # inside shard_map every device runs its own call already, and a mesh of an abstract device has nothing to split
        alone = mesh.manual_axes or not partition or getattr(mesh, "abstract_device", None) is not None
        run = kernel if alone else functools.partial(_partitioned, kernel, split, levels)
        typed = [jax.typeof(t).sharding for t in arrays]
        explicit = next((s.mesh for s in typed if any(axes is not None for axes in s.spec)), None)
        if explicit is not None:
            to = _Factors(kernel, split, levels, arrays).results_on(explicit, [s.spec for s in typed])
            run = jax.sharding.auto_axes(run, out_sharding=to)
        return run(*arrays)

    @call.def_vmap
    def _(size, batched, *arrays):
        in_axes = [0 if b else None for b in batched]
        inner = jax.vmap(kernel, in_axes, axis_size=size)
        lifted = tuple((depth, *own) if b else own for b, own in zip(batched, levels))
        out = _placed(inner, split.mapped(in_axes, size), interpreted, partition, lifted, depth + 1)(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    return call


def _untyped(kernel: Kernel, arrays: Sequence[Array]) -> Any:
    """`kernel(*arrays)` traced without the types of shard_map(check_vma=True), which interpreters do not keep.

    An exported function carries no such types; it is inlined like any other.
    """
    exporting = jax.export.export(jax.jit(kernel), platforms=(jax.export.default_export_platform(),))
    exported = exporting(*_shapes(arrays))
    names = sorted(set().union(*(varying(t) for t in arrays)))
    return jax.tree.map(lambda t: vary(t, names), exported.call(*arrays))


def _shapes(arrays: Sequence[Array]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes alone: no types of a mesh."""
    return [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in arrays]


class _Factors:
    """Axes of operands and results by name: equal names are split alike.

    `x0`, `x1`, ... are axes of the first operand, `b0`, ... those of vmaps; an axis of size 1 where the first operand
    has more has a name of its own, and is not split.
    """

    def __init__(self, kernel: Kernel, split: Split, levels: Levels, arrays: Sequence[Any]):
        sizes = arrays[0].shape[len(levels[0]) :]
        outs, self.structure = jax.tree.flatten(jax.eval_shape(kernel, *_shapes(arrays)))
        every = tuple(range(1 + max((own[0] for own in levels if own), default=-1)))[::-1]
        shapes = [(t.shape, own) for t, own in zip(arrays, levels)] + [(t.shape, every) for t in outs]
        self.sizes: dict[str, int] = {}
        self.names = [self._of(i, shape, own, sizes) for i, (shape, own) in enumerate(shapes)]
        self.operands, self.results = self.names[: len(arrays)], self.names[len(arrays) :]
        self.added = {d: f"x{d}" for d in split.added if sizes[d] != 1}
        self.whole = {f"x{d}" for d in split.whole} | {n for names in self.names for n in names if n[0] == "o"}
        self.shared = [f"x{d}" for d in split.shared]
        self.units = {f"x{d}": n for d, n in split.units}
        self.levels, self.every = levels, every

    def _of(self, number: int, shape: Sequence[int], levels: Sequence[int], sizes: Sequence[int]) -> list[str]:
        names = [f"b{level}" for level in levels]
        rest = shape[len(levels) :]
        names += [f"x{d}" if n == sizes[d] else f"o{number}n{d}" for d, n in enumerate(rest)]
        self.sizes.update(zip(names, shape))
        return names

    def rule(self) -> tuple[str, dict[str, tuple[str, ...]]]:
        """In the notation of `custom_partitioning`, special names in the order in which they appear."""
        sides = [", ".join(" ".join(names) for names in side) for side in (self.operands, self.results)]
        order = list(dict.fromkeys(n for names in self.names for n in names))
        # a name of some result is no pure reduction to the compiler, though other results are summed over it
        summed = set(self.added.values()) - self.whole - {n for names in self.results for n in names}
        kinds = {"reduction_factors": summed, "need_replication_factors": self.whole}
        return " -> ".join(sides), {kind: tuple(n for n in order if n in names) for kind, names in kinds.items()}

    def assigned(self, specs: Sequence[Any], mesh: Any) -> dict[str, Any]:
        """Mesh axes by name, from the partition specs of operands (and results); of a conflict, the first."""
        found: dict[str, Any] = {}
        used: set[str] = set()
        for names, spec in zip(self.names, specs):
            for name, axes in zip(names, tuple(spec)):
                together = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
                parts = math.prod(mesh[a] for a in together)
                if not together or name in found or name in self.whole or used & set(together):
                    continue
                if self.sizes[name] % (parts * self.units.get(name, 1)) == 0:
                    found[name] = axes
                    used |= set(together)
        return found

    def results_on(self, mesh: Any, specs: Sequence[Any]) -> Any:
        """Shardings of the results for these of the operands, as the tree that the kernel gives."""
        found = self.assigned(specs, mesh.shape)
        places = [NamedSharding(mesh, P(*map(found.get, names))) for names in self.results]
        return jax.tree.unflatten(self.structure, places)

    def partial_sums(self, found: dict[str, Any]) -> list[tuple[str, ...]]:
        """Of each result, the mesh axes over which devices hold partial sums."""
        lead = len(self.every)
        over = []
        for names in self.results:
            over.append(_flat(found[n] for d, n in self.added.items() if n in found and names[lead + d] != n))
        return over

    def across(self, found: dict[str, Any]) -> tuple[str, ...]:
        """The mesh axes that split what `Split.across` is for."""
        return _flat(found[n] for n in self.shared if n in found)


def _flat(axes: Iterable[Any]) -> tuple[str, ...]:
    """Names of mesh axes, of entries of a partition spec."""
    return tuple(a for one in axes for a in (one if isinstance(one, tuple) else (one,)))


def _partitioned(kernel: Kernel, split: Split, levels: Levels, *arrays: Array) -> Any:
    """`kernel(*arrays)` that a compiler may split as `split` allows."""
    if not arrays[0].ndim:
        return kernel(*arrays)
    factors = _Factors(kernel, split, levels, arrays)

    def partition(mesh, given, wanted):
        shardings = [t.sharding for t in (*jax.tree.leaves(given), *jax.tree.leaves(wanted))]
        if mesh.empty:  # shardings without names: run whole, everywhere
            mesh = Mesh(np.array(sorted(shardings[0].device_set, key=lambda device: device.id)), ("devices",))
        found = factors.assigned([getattr(s, "spec", ()) for s in shardings], mesh.shape)
        over, names = factors.partial_sums(found), factors.across(found)
        if names:
            over = [tuple(a for a in axes if a not in names) for axes in over]

        def local(*parts):
            results = jax.tree.leaves(split.across(parts, names) if names and split.across else kernel(*parts))
            if split.merge is not None and over[0]:
                results = split.merge(results, over[0], parts[0].shape[len(levels[0]) :])
            elif split.merge is None:
                results = [lax.psum(t, axes) if axes else t for t, axes in zip(results, over)]
            return jax.tree.unflatten(factors.structure, results)

        places = [NamedSharding(mesh, P(*map(found.get, names))) for names in factors.names]
        results = jax.tree.unflatten(factors.structure, places[len(arrays) :])
        return mesh, local, results, tuple(places[: len(arrays)])

    call = custom_partitioning(lambda *given: kernel(*given))
    notation, kinds = factors.rule()
    call.def_partition(partition, sharding_rule=notation, **kinds)
    return call(*arrays)
