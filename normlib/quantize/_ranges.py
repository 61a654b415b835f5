"""What a dynamic scale is found from: the range of each row, and the quotient of it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from normlib.scope import Scope, gather, stack


def largest_magnitude(n: Array, axes: tuple[int, ...], where: Array | None, scope: Scope) -> Array:
    """max|n| over `axes`, kept with size 1, and over devices; NaN if there is one, 0 if nothing is there.

    NaN are counted apart: XLA's reduction to a maximum loses them for some shapes on CPU (seen with 64 x 300).
    """
    missing = jnp.isnan(n) if where is None else jnp.isnan(n) & where
    usable = ~jnp.isnan(n) if where is None else ~jnp.isnan(n) & where
    largest = jnp.max(jnp.where(usable, jnp.abs(n), 0), axes, keepdims=True, initial=0)
    (largest,) = _nan_where_counted([largest], missing, axes, scope)
    return largest


def extremes(n: Array, axes: tuple[int, ...], where: Array | None, scope: Scope) -> tuple[Array, Array]:
    """(min, max) of n over `axes`, kept with size 1, and over devices; NaN if there is one, 0 if nothing is there."""
    missing = jnp.isnan(n) if where is None else jnp.isnan(n) & where
    usable = ~jnp.isnan(n) if where is None else ~jnp.isnan(n) & where
    high, low = (
        jnp.max(jnp.where(usable, sign * n, -jnp.inf), axes, keepdims=True, initial=-jnp.inf) for sign in (1, -1)
    )
    high, low = _nan_where_counted([high, low], missing, axes, scope)
    low = -low
    return jnp.where(high < low, 0, low), jnp.where(high < low, 0, high)


def _nan_where_counted(tops: list[Array], missing: Array, axes, scope: Scope) -> list[Array]:
    """The maxima `tops` over devices, NaN where `missing` holds anywhere along `axes`; one collective."""
    found = jnp.sum(missing.astype(jnp.float32), axes, keepdims=True)
    if scope.names:
        *tops, found = jnp.max(gather(stack([*tops, found]), scope.names, scope.groups), 0)
    return [jnp.where(found > 0, jnp.nan, t) for t in tops]


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
