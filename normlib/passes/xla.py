"""The XLA pass: plain JAX, staged so that XLA on CPU fuses each sweep into one loop.

A value with two consumers does not fuse on CPU: it is written out in float32. So every pass reads its own copy of its
operands through an optimization barrier and widens it again (batch norm in bfloat16, forward and backward: 26.6 ms
without, 9.1 ms with; extra memory 2-12 times x without, none with). Other platforms get no barriers.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from normlib._varying import varying
from normlib.moments import Moments, about, abs_squared, count_entries, divided
from normlib.precision import wide

_staged = contextvars.ContextVar("staged", default=True)


@contextlib.contextmanager
def unstaged():
    """Formulas traced inside have no barriers: JAX 0.12 cannot transpose one that holds tangents beside constants."""
    token = _staged.set(False)
    try:
        yield
    finally:
        _staged.reset(token)


def own_copy(*operands: Any) -> tuple[Any, ...]:
    """The operands (arrays of any shapes, deferred arrays, or None), behind a barrier when lowered for CPU.

    All go through one barrier: it also orders the passes, so that no copy is shared with an earlier one.
    """
    if not _staged.get():
        return operands
    present, structure = jax.tree.flatten(operands)
    if any(varying(t) for t in present):
        # platform_dependent refuses branches of different varying types (jax 0.10): decide while tracing
        copies = lax.optimization_barrier(present) if jax.default_backend() == "cpu" else present
    else:
        copies = lax.platform_dependent(present, cpu=lax.optimization_barrier, default=lambda t: t)
    return jax.tree.unflatten(structure, copies)


def centred(x: Array, mean: Array | None, low: Array | None) -> Array:
    """x - mean - low in the wide dtype, x's shape: subtracting the mean first is exact where x is near it."""
    x = wide(x)
    return x if mean is None or low is None else (x - mean) - low


def _sum(t: Array, axes: tuple[int, ...], batch_invariant: bool) -> Array:
    if not batch_invariant or not axes:
        return jnp.sum(t, axes, keepdims=True)
    (t,) = own_copy(t)  # or the first stage may be fused with what made t, by some numbers of rows
    return functools.reduce(_sum_by_halving, axes, t)


def _sum_by_halving(t: Array, axis: int) -> Array:
    """Sum along one axis in an order that depends on nothing but its length.

    XLA's own reductions change with the number of rows beside. Padded to a power of two (64 or more) and halved, with
    a barrier a stage so that the stages are not merged again.
    """
    n = t.shape[axis]
    size = max(64, 1 << max(n - 1, 0).bit_length())
    t = jnp.pad(t, [(0, size - n if a == axis else 0) for a in range(t.ndim)])
    while size > 1:
        size //= 2
        t = lax.slice_in_dim(t, 0, size, axis=axis) + lax.slice_in_dim(t, size, 2 * size, axis=axis)
        (t,) = own_copy(t)
    return t


def sums(x, k, *, axes, where, batch_invariant=False):
    """See `normlib.passes.Pass.sums`; x of any shape. Two reductions, each of its own copy (see above)."""

    def term(power, x, k):
        d = wide(x) if k is None else wide(x) - k
        d = d if where is None else jnp.where(where, d, 0)
        return _sum(power(d), axes, batch_invariant)

    first = own_copy(x, k)
    return term(lambda d: d, *first), term(abs_squared, *own_copy(*first))


def moments(x, *, axes, where, batch_invariant=False, sums=sums):
    """See `normlib.passes.Pass.moments`; x of any shape. Two passes, corrected: 1e-7 at mean / sigma 1e5.

    `sums` may be another backend's.
    """
    count = count_entries(x.shape, axes, where)
    s1, _ = sums(x, None, axes=axes, where=where, batch_invariant=batch_invariant)
    pilot = lax.stop_gradient(divided(s1, count))
    s1, s2 = sums(x, pilot, axes=axes, where=where, batch_invariant=batch_invariant)
    return Moments(*about(pilot, count, s1, s2))


def apply(x, mean, low, rstd, scale, bias, *, where=None, dtype=None, batch_invariant=False):
    """See `normlib.passes.Pass.apply`; x of any shape.

    Here and below a mask selects before the products and not only after: the derivative of a selected product is
    0 * NaN where an unmeasured entry is NaN.
    """
    dtype = x.dtype if dtype is None else dtype
    x, mean, low, rstd, scale, bias = own_copy(x, mean, low, rstd, scale, bias)
    return mapped(x, mean, low, rstd, scale, bias, where, batch_invariant).astype(dtype)


def mapped(x, mean, low, rstd, scale, bias, where=None, batch_invariant=False):
    """What `apply` computes, in the wide dtype and without copies of its own: for who already reads x in a pass."""
    xc = given = centred(x, mean, low)
    if where is not None:
        usable = where | jnp.isfinite(given) | (rstd == 0)
        xc = jnp.where(usable & (rstd != 0), given, 0)
    y = xc * rstd
    y = y if scale is None else y * scale
    if bias is not None:
        # contracted to a fused multiply-add for some numbers of rows and not for others (jax 0.12), unless kept apart
        y = (own_copy(y)[0] if batch_invariant else y) + bias
    return y if where is None else jnp.where(usable, y, given)


def grad_sums(x, dy, mean, low, rstd, weight, *, axes, where):
    """See `normlib.passes.Pass.grad_sums`; x of any shape. Two reductions, each of its own copy."""

    def weighted(dy, weight):
        return wide(dy) if weight is None else wide(dy) * weight

    first = own_copy(dy, weight)
    plain = jnp.sum(weighted(*first), axes, keepdims=True)
    dy, weight, x, mean, low, rstd = own_copy(*first, x, mean, low, rstd)
    g, xc = weighted(dy, weight), centred(x, mean, low)
    if where is not None:
        # an unmeasured entry that sends a cotangent keeps its xhat
        xc = jnp.where((where | (g != 0)) & (rstd != 0), xc, 0)
    return plain, jnp.sum(g * (xc * rstd), axes, keepdims=True)


def grad_apply(x, dy, mean, low, rstd, weight, c1, c0, *, where):
    """See `normlib.passes.Pass.grad_apply`; x of any shape. rstd last: its rounding then enters the difference once."""
    dtype = x.dtype
    x, dy, mean, low, rstd, weight, c1, c0 = own_copy(x, dy, mean, low, rstd, weight, c1, c0)
    xc = centred(x, mean, low)
    xc = xc if where is None else jnp.where(where, xc, 0)
    through = xc * c1
    through = through if c0 is None else through + c0
    through = through if where is None else jnp.where(where, through, 0)
    g = wide(dy) if weight is None else wide(dy) * weight
    return ((g - through) * rstd).astype(dtype)
