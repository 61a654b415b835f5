"""A linen or an nnx layer as one pure function, so that a test runs over both."""

import jax
import numpy as np
from flax import nnx as flax_nnx

from normlib import linen, nnx

PACKAGES = ("linen", "nnx")


def build(package, name, sizes, *args, **settings):
    """(call, variables): call(variables, *args, **options) -> (y, new batch_stats), variables as linen has them.

    `sizes` are what nnx layers are told beforehand: features, or a dict of arguments; linen finds them in `args`.
    """
    if package == "linen":
        layer = getattr(linen, name)(**settings)
        variables = jax.jit(layer.init)(jax.random.key(0), *args)

        def call(variables, *args, **options):
            y, new = layer.apply(variables, *args, mutable=["batch_stats"], **options)
            return y, new.get("batch_stats", variables.get("batch_stats", {}))

        return call, variables
    positional, named = (sizes[:-1], sizes[-1]) if isinstance(sizes[-1], dict) else (sizes, {})
    module = getattr(nnx, name)(*positional, **named, **settings, rngs=flax_nnx.Rngs(0))
    graph, params, stats, rest = flax_nnx.split(module, flax_nnx.Param, flax_nnx.BatchStat, ...)

    def call(variables, *args, **options):
        states = []
        for state, values in ((params, variables["params"]), (stats, variables.get("batch_stats", {}))):
            state = jax.tree.map(lambda t: t, state)
            flax_nnx.replace_by_pure_dict(state, values)
            states.append(state)
        model = flax_nnx.merge(graph, *states, rest)
        y = model(*args, **options)
        return y, flax_nnx.to_pure_dict(flax_nnx.state(model, flax_nnx.BatchStat))

    variables = {"params": flax_nnx.to_pure_dict(params)}
    if stats:
        variables["batch_stats"] = flax_nnx.to_pure_dict(stats)
    return call, variables


def with_params(variables, **values):
    """`variables` with other values of some parameters, in their dtypes."""
    new = {n: jax.tree.map(lambda v, old: np.asarray(v, old.dtype), values[n], variables["params"][n]) for n in values}
    return {**variables, "params": {**variables["params"], **new}}


def kept_bytes(f, *args):
    """Bytes that the backward of `f` keeps in arrays as large as its arguments: not of statistics and parameters."""
    _, pull = jax.eval_shape(lambda *a: jax.vjp(f, *a), *args)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull) if leaf.size >= args[0].size)
