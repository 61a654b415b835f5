"""What a compiler with excess precision makes of a function: casts to narrow floats round nothing.

XLA on GPU takes a cast to a narrow float and one back away as a pair. Here a function runs so on any machine: where a
rounding is part of what is computed it must not rest on such a cast.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def without_casts(fn, *args) -> Any:
    """`fn(*args)` where values that were cast to a narrow float stay in float32, up to the results."""
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    found = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    structs, tree = jax.tree.flatten(shape)
    return jax.tree.unflatten(tree, [jnp.asarray(t).astype(s.dtype) for t, s in zip(found, structs)])


def _run(jaxpr, consts, args):
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))

    def read(v):
        value = v.val if hasattr(v, "val") else values[v]
        return jnp.asarray(value) if isinstance(value, float | int) else value

    for eqn in jaxpr.eqns:
        given = [read(v) for v in eqn.invars]
        inner = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)
        if inner is not None and eqn.primitive.name not in ("scan", "while", "pallas_call"):
            found = _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given)
        elif eqn.primitive.name == "cond":  # of platforms: where there is no barrier the pair is next to each other
            found = _run(eqn.params["branches"][int(given[0])].jaxpr, (), given[1:])
        elif eqn.primitive.name == "optimization_barrier":
            found = given
        elif eqn.primitive is lax.convert_element_type_p:
            dtype = eqn.outvars[0].aval.dtype
            found = [given[0] if dtype.name in NARROW and given[0].dtype == jnp.float32 else given[0].astype(dtype)]
        else:
            given = [_like(t, v.aval) for t, v in zip(given, eqn.invars)]
            found = eqn.primitive.bind(*given, **eqn.params)
            found = found if eqn.primitive.multiple_results else [found]
        values.update(zip(eqn.outvars, found))
    return [read(v) for v in jaxpr.outvars]


def _like(t, aval):
    """Anything but a cast takes its operands in their dtype: there the narrow array is written out."""
    dtype = getattr(aval, "dtype", None)
    same = dtype is None or not hasattr(t, "dtype") or t.dtype == dtype or dtype.name not in NARROW
    return t if same else t.astype(dtype)
