"""Walks over a model's statistics: every node with leaves `mean` and `var`, in linen's dicts and nnx states alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normlib._tree import names_of
from normlib.moments import Moments

Tree = Any
Rule = Callable[..., tuple[Any, Any]]


def is_moments(node: Any) -> bool:
    """True for `Moments`, which end the walk."""
    return isinstance(node, Moments)


def with_moments(batch_stats: Tree, moments: Tree, rule: Rule) -> Tree:
    """`batch_stats` with rule(mean, var, moments) -> (mean, var) of every layer.

    Raises:
      ValueError: if a layer's moments are missing, of another size, or overflowed their count.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(moments, is_leaf=is_moments)
    by_path = {names_of(path): m for path, m in found}

    def layer(path, pair):
        where = "/".join(path) or "the root"
        m: Any = by_path.get(path)
        if not is_moments(m):
            raise ValueError(
                f"`moments` has none for the statistics of {where}; it has them for "
                f"{['/'.join(p) for p in by_path]}. Inside nn.scan or nn.vmap the collection 'batch_moments' must be "
                "mapped as 'batch_stats' is."
            )
        if m.mean.size != jnp.size(pair[0]):
            raise ValueError(f"`moments` of {where} have shape {m.mean.shape}, its mean has {jnp.shape(pair[0])}.")
        if not isinstance(m.count, jax.core.Tracer) and np.any(np.asarray(m.count) < 0):
            raise ValueError(f"`moments` of {where} counted 2**31 entries or more in a channel; use fewer batches.")
        shaped = jax.tree.map(lambda t: t.reshape(jnp.shape(pair[0])), m)
        return rule(jnp.asarray(pair[0]), jnp.asarray(pair[1]), shaped)

    return each_layer(batch_stats, layer)


def each_layer(batch_stats: Tree, rule: Rule, *others: Tree) -> Tree:
    """`batch_stats` with rule(path, (mean, var), ...) -> (mean, var) of every layer, `others` giving more pairs.

    Raises:
      ValueError: if the tree holds no layer's statistics, or another has another structure.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(batch_stats)
    structure: Any = jax.tree.structure(batch_stats)
    values = [leaf for _, leaf in leaves]
    for other in others:
        if jax.tree.structure(other) != structure:
            raise ValueError(f"the statistics differ in structure: {structure} and {jax.tree.structure(other)}.")
    more = [jax.tree.leaves(other) for other in others]
    at = {names_of(path): i for i, (path, _) in enumerate(leaves)}
    layers = [path[:-1] for path in at if path and path[-1] == "mean" and (*path[:-1], "var") in at]
    if not layers:
        raise ValueError("`batch_stats` has no node with `mean` and `var`: give the collection of running statistics.")
    for path in layers:
        here = [at[*path, name] for name in ("mean", "var")]
        new = rule(path, *(tuple(tree[i] for i in here) for tree in (values, *more)))
        for i, value in zip(here, new):
            values[i] = value.astype(jnp.asarray(values[i]).dtype)
    return jax.tree.unflatten(structure, values)
