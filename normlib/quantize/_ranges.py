"""What a dynamic scale is found from: the range of each row, and the quotient of it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from normlib.passes.xla import own_copy
from normlib.scope import Scope, axis_size, gather, stack


def largest_magnitude(n: Array, axes: tuple[int, ...], where: Array | None, scope: Scope) -> Array:
    """max|n| over `axes`, kept with size 1, and over devices; NaN if there is one, 0 if nothing is there."""
    (largest,) = _tops([lambda n: jnp.max(jnp.abs(n), axes, keepdims=True, initial=0)], [0], n, axes, where, scope)
    return largest


def extremes(n: Array, axes: tuple[int, ...], where: Array | None, scope: Scope) -> tuple[Array, Array]:
    """(min, max) of n over `axes`, kept with size 1, and over devices; NaN if there is one, 0 if nothing is there."""
    reductions = [
        lambda n: jnp.max(n, axes, keepdims=True, initial=-jnp.inf),
        lambda n: -jnp.min(n, axes, keepdims=True, initial=jnp.inf),
    ]
    high, low = _tops(reductions, [-jnp.inf, jnp.inf], n, axes, where, scope)
    return jnp.where(high < -low, 0, -low), jnp.where(high < -low, 0, high)


def _tops(reductions, ignored, n: Array, axes, where: Array | None, scope: Scope) -> list[Array]:
    """What `reductions` find in n and over all devices of `scope`, the larger being the better; NaN if n has one.

    NaN are looked for apart, in a sum of 1 / (1 + n**2): XLA's reduction to a maximum loses them for some shapes on CPU
    (seen with 64 x 300), its element-wise minimum inside a reduction too; arithmetic keeps them, and infinities give 0.
    A count of NaN takes twice as long and writes out an array. Every reduction reads a copy of its own, one behind the
    other: copies side by side are merged again, and what they share is written out (20 ms instead of 3 for 16 MiB).
    """
    tops = []
    for reduce, least in zip(reductions, ignored):
        n, where = own_copy(n, where)
        tops.append(reduce(n if where is None else jnp.where(where, n, least)))
    n, where = own_copy(n, where)
    seen = n if where is None else jnp.where(where, n, 0)
    missing = jnp.isnan(jnp.sum(1 / (1 + seen * seen), axes, keepdims=True))
    if scope.names:
        words = stack([*(jnp.where(missing, 0, t) for t in tops), missing.astype(jnp.float32)])
        *tops, found = jnp.max(gather(words, scope.names, axis_size(scope.names), scope.groups), 0)
        missing = found > 0
    return [jnp.where(missing, jnp.nan, t) for t in tops]


def divided(t: Array, by: float) -> Array:
    """t / by with one correct rounding, t float32 of any shape.

    XLA turns division by a constant, or by anything broadcast, into a product with the reciprocal: 4 to 71 % of the
    quotients differ from IEEE division then. So the divisor is an array of t's shape that depends on t (under vmap a
    constant one, even behind a barrier, is broadcast again) and whose value XLA cannot see.
    """
    divisor = jnp.where(jnp.isfinite(t), t, 0) * 0 + by
    return t / lax.optimization_barrier(divisor)


def at_least(t: Array, floor: Array | float) -> Array:
    """max(t, floor) that keeps NaN; t float32, floor broadcastable to it."""
    return jnp.where(t < floor, floor, t)
