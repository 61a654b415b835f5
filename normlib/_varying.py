"""Over which mesh axes a value varies: the types that shard_map(check_vma=True) tracks, and casts between them.

Under pmap, vmap and check_vma=False nothing is tracked and every set here is empty.
"""

from __future__ import annotations

import jax
from jax import lax
from jaxtyping import Array


def varying(x: Array) -> frozenset[str]:
    """Names of the mesh axes over which `x` (any shape) may differ between devices; empty where JAX tracks none."""
    return getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", frozenset())


def is_typed(names: tuple[str, ...]) -> bool:
    """True if JAX tracks variation over `names` here. An axis index tells; x itself may be replicated."""
    return bool(names) and bool(varying(lax.axis_index(names[0])))


def is_bound(names: tuple[str, ...]) -> bool:
    """False in the backward that JAX batches when grad is taken outside of a vmap: its axes are not bound there.

    Collectives over them work all the same.
    """
    try:
        for name in names:
            lax.axis_size(name)
    except NameError:
        return False
    return True


@jax.custom_batching.custom_vmap
def summed_like(primal: Array, cotangent: Array) -> Array:
    """`cotangent`, summed over the members of a vmap where the `primal` (of its shape) is one for all of them.

    JAX sums so itself, but refuses to (0.12) beside outputs that are one for all: it cannot know that their cotangents
    have been counted once.
    """
    return cotangent


@summed_like.def_vmap
def _summed_like_vmap(size, mapped, primal, cotangent):
    primal_mapped, cotangent_mapped = mapped
    if cotangent_mapped and not primal_mapped:
        return cotangent.sum(0), False
    return cotangent, cotangent_mapped


def vary(x: Array, names) -> Array:
    """`x` (any shape) typed as varying over `names` too: only missing names are cast, since a second cast raises."""
    missing = tuple(n for n in names if n not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def like(cotangent: Array, primal: Array) -> Array:
    """`cotangent` with the varying axes, and dtype, that a custom rule must return for `primal` (both of one shape).

    The sum runs over varying(cotangent) - varying(primal) and nothing else: unconditional sums are P times too big
    where nothing is tracked and grad is taken outside.
    """
    return typed_like(cotangent, primal.dtype, varying(primal))


def typed_like(cotangent: Array, dtype, names: frozenset[str]) -> Array:
    """`like`, for a primal of `dtype` that varies over `names`."""
    extra = varying(cotangent) - names
    summed = lax.psum(cotangent, tuple(sorted(extra))) if extra else cotangent
    return vary(summed, sorted(names)).astype(dtype)
