"""Norms in the sense of lengths: p-norms, and what divides or clips by them."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from normlib import _arguments as check
from normlib._restyled import restyled
from normlib.moments import Moments
from normlib.passes.xla import own_copy
from normlib.precision import output_dtype, statistics_dtype, wide

RENORM_EPS = 1e-7
LEAST_VAR = 1e-24  # keeps the derivative of a root finite; far below eps squared, the next thing that matters


def lp_norm(
    x: Num[Array, ...],
    *,
    p: float = 2.0,
    axis: check.Axes | None = None,
    keepdims: bool = False,
    eps: float = 0.0,
) -> Array:
    """The p-norm over axes.

        y = max((sum |x|**p)**(1/p), eps);   p = inf: max |x|;  -inf: min |x|;  0: the number of entries that are not 0

    Args:
      x: any shape; computed in float32 (float64 for float64 x), about a power of two near max |x|, so that no power
        overflows or vanishes.
      p: order, 0 or greater, or -inf.
      axis: axis or axes reduced; None for all.
      keepdims: keep reduced axes with size 1.
      eps: least value of the result, 0 for the norm itself; ops-nn's default is 1e-12.

    Returns:
      The norm in x's dtype (float32 for integers), rounded once. Forward and reverse mode: its derivative is
      sign(x) * (|x| / y)**(p - 1), 0 where x or y is 0, shared by equal entries where p is infinite.

    Raises:
      ValueError: for axes out of range, p below 0 and not -inf, or eps < 0.
      TypeError: if p is not a number.

    Source: ops-nn's LpNormV2; the scaling as in LAPACK's xNRM2.

    >>> lp_norm(jnp.array([3.0, -4.0])).item(), lp_norm(jnp.array([3.0, -4.0]), p=math.inf).item()
    (5.0, 4.0)
    """
    x = check.array(x)
    y = _norm(x, check.number(p, "p"), _axes(axis, x), check.epsilon(eps))
    return (y if keepdims else jnp.squeeze(y, _axes(axis, x))).astype(output_dtype(x.dtype))


def euclidean_norm(x: Num[Array, ...], *, axis: check.Axes | None = None, keepdims: bool = False) -> Array:
    """sqrt(sum x**2) over axes: `lp_norm` with p = 2; integers are allowed and give float32.

    Args, returns, raises: as `lp_norm`.

    Source: ops-nn's EuclideanNorm.

    >>> euclidean_norm(jnp.array([[3, 4], [6, 8]]), axis=1).tolist()
    [5.0, 10.0]
    """
    return lp_norm(x, axis=axis, keepdims=keepdims)


def l2_normalize(x: Num[Array, ...], *, axis: check.Axes = -1, eps: float = 1e-12) -> Array:
    """x divided by its length, or by eps where it is shorter.

        y = x / max(sqrt(sum x**2), eps)

    Args:
      x: any shape; computed in float32 (float64 for float64 x).
      axis: axis or axes of one vector.
      eps: least divisor, in units of x.

    Returns:
      y in x's shape and dtype (float32 for integers), rounded once; NaN where a sum of squares overflows float32
      (|x| beyond 1e19). The backward keeps x and the lengths: dx = (dy - y * sum(y * dy)) / length, dy / eps where
      shorter.

    Raises:
      ValueError: for axes out of range or named twice, or eps < 0.

    Source: ops-nn's L2Normalize and L2NormalizeGrad (whose eps is 1e-4).

    >>> np.float64(l2_normalize(jnp.array([3.0, 4.0]))).round(3).tolist()
    [0.6, 0.8]
    """
    x = check.array(x)
    return _l2_normalize(check.axes(axis, x.ndim), check.epsilon(eps), x.astype(output_dtype(x.dtype)))


def renorm(x: Num[Array, ...], *, p: float, axis: int, maxnorm: float) -> Array:
    """Slices along `axis` whose p-norm exceeds `maxnorm` are scaled down to it; others are left as they are.

        y_i = x_i * maxnorm / (norm(x_i) + 1e-7)   where norm(x_i) > maxnorm

    Args:
      x: any shape; computed in float32 (float64 for float64 x).
      p: order of the norm, as in `lp_norm`.
      axis: a slice is what has one index along it; the norm is over all other axes.
      maxnorm: longest norm allowed, in units of x.

    Returns:
      y in x's shape and dtype (float32 for integers), rounded once. The norm is differentiated too.

    Raises:
      ValueError: for an axis out of range, a bad p, or a negative maxnorm.
      TypeError: if p or maxnorm is not a number.

    Source: ops-nn's Renorm, with PyTorch's 1e-7.

    >>> np.float64(renorm(jnp.array([[3.0, 4.0], [0.3, 0.4]]), p=2.0, axis=0, maxnorm=1.0)).round(3).tolist()
    [[0.6, 0.8], [0.3, 0.4]]
    """
    x = check.array(x)
    (slices,) = check.axes(axis, x.ndim)
    p, maxnorm = check.number(p, "p"), check.number(maxnorm, "maxnorm", least=0)
    others = tuple(a for a in range(x.ndim) if a != slices)
    dtype = output_dtype(x.dtype)

    def run(x):
        x = wide(x)  # so that the two parts of dx are added before they are rounded
        norm = _norm(x, p, others, 0.0)
        (again,) = own_copy(x)
        return (again * jnp.where(norm > maxnorm, maxnorm / (norm + RENORM_EPS), 1)).astype(dtype)

    return jax.checkpoint(run)(x)


def mean_variance_norm(
    x: Num[Array, ...], *, axis: check.Axes = (0, 2, 3), eps: float = 1e-9, rule: str = "reverse",
    backend: str | None = None,
) -> Array:  # fmt: skip
    """Zero mean and unit variance, with eps outside the root.

        y = (x - mean) / (sqrt(var) + eps)

    Args:
      x: `[N, C, H, W]`, or any shape with `axis` naming the reduced axes; computed in float32 (float64 for float64 x).
      axis: reduced axis or axes.
      eps: added to the standard deviation, in units of x.
      rule, backend: as `normlib.layer_norm`.

    Returns:
      y in x's shape and dtype (float32 for integers), rounded once. Constant input gives 0 and a finite gradient.

    Raises:
      ValueError: for axes out of range or named twice, or eps < 0.

    Source: ops-nn's MVNV2.

    >>> mean_variance_norm(jnp.array([[1.0, 3.0], [5.0, 5.0]]), axis=1).tolist()
    [[-1.0, 1.0], [0.0, 0.0]]
    """
    x, eps = check.array(x), check.epsilon(eps)
    room = jnp.asarray(eps, statistics_dtype(x))
    return restyled(_outside, x, room, axes=check.axes(axis, x.ndim), eps=LEAST_VAR, rule=rule, backend=backend).y


def _outside(moments: Moments, eps: Array) -> tuple[Array, None]:
    """From 1 / sqrt(var) to 1 / (sqrt(var) + eps)."""
    std = jnp.sqrt(moments.var + LEAST_VAR)
    divisor = std + eps
    return std / divisor, None


def foreach_norm(tree: Any, *, p: float = 2.0) -> Any:
    """The p-norm of every array of a tree, each on its own.

    Args:
      tree: a pytree of arrays of any shapes.
      p: order, as in `lp_norm`.

    Returns:
      A tree of the same structure of float32 scalars (float64 for float64 arrays).

    Raises:
      ValueError: for a bad p.

    Source: the foreach norms of PyTorch's clipping.

    >>> foreach_norm({"w": jnp.array([3.0, 4.0]), "b": jnp.array([2.0])})["w"].item()
    5.0
    """
    p = check.number(p, "p")
    return jax.tree.map(lambda t: _norm(check.array(t), p, tuple(range(jnp.ndim(t))), 0.0).reshape(()), tree)


def clip_by_foreach_norm(max_norm: float, *, p: float = 2.0, per_array: bool = False):
    """An optax transformation that scales updates down to a longest norm.

        scale = min(1, max_norm / norm),   norm = (sum_i norm_i**p)**(1/p) over the arrays, or each array's own

    Args:
      max_norm: longest norm allowed.
      p: order of the norm, as in `lp_norm`.
      per_array: clip every array by its own norm instead of all by the common one.

    Returns:
      An `optax.GradientTransformation` without state. Updates keep their dtypes; a norm that is not finite makes them
      NaN, as a division would.

    Raises:
      ValueError: for a bad p or a negative max_norm.

    Source: Pascanu, Mikolov and Bengio 2013 for clipping by the norm.

    >>> clip = clip_by_foreach_norm(1.0)
    >>> np.float64(clip.update({"w": jnp.array([3.0, 4.0])}, clip.init(None))[0]["w"]).round(2).tolist()
    [0.6, 0.8]
    """
    import optax  # only here: it takes longer to import than the rest of the library

    p, longest = check.number(p, "p"), check.number(max_norm, "max_norm", least=0)

    def update(updates, state, params=None):
        del params
        norms = foreach_norm(updates, p=p)
        leaves = jax.tree.leaves(norms)
        if not per_array and leaves:
            together = _norm(jnp.stack([n.astype(jnp.float32) for n in leaves]), p or 1.0, (0,), 0.0)[0]
            norms = jax.tree.map(lambda n: together, norms)

        def clipped(u, norm):
            factor = jnp.where(norm <= longest, 1, longest / jnp.where(norm > 0, norm, 1))
            return (wide(u) * factor).astype(u.dtype)

        return jax.tree.map(clipped, updates, norms), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _axes(axis, x: Array) -> tuple[int, ...]:
    return tuple(range(x.ndim)) if axis is None else check.axes(axis, x.ndim)


def _norm(x: Array, p: float, axes: tuple[int, ...], eps: float) -> Array:
    """The p-norm in the wide dtype, reduced axes kept, at least `eps`."""
    if p < 0 and p != -math.inf:
        raise ValueError(f"`p` must be 0 or greater, or -inf; got {p}.")
    y = _length(p, axes, x.astype(output_dtype(x.dtype)))
    return jnp.maximum(y, jnp.asarray(eps, y.dtype)) if eps else y


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _length(p: float, axes: tuple[int, ...], x: Array) -> Array:
    if p == -math.inf:
        return jnp.min(abs(wide(x)), axes, keepdims=True, initial=jnp.inf)
    largest = jnp.max(abs(wide(x)), axes, keepdims=True, initial=0)
    if p == math.inf:
        return largest
    (again,) = own_copy(x)
    if p == 0:
        return jnp.sum(again != 0, axes, keepdims=True, dtype=largest.dtype)
    if p == 1:
        return jnp.sum(abs(wide(again)), axes, keepdims=True)
    unit = _power_of_two(largest)
    t = abs(wide(again)) * (1 / unit)
    total = jnp.sum(t * t if p == 2 else jnp.where(t > 0, jnp.where(t > 0, t, 1) ** p, t), axes, keepdims=True)
    root = jnp.sqrt(total) if p == 2 else total ** (1 / p)
    return root * unit


@_length.defjvp
def _length_jvp(p, axes, primals, tangents):
    """Linear in the tangent and rematerialised: forward and reverse mode, and x and y are all that is kept."""
    (x,), (x_dot,) = primals, tangents
    y = _length(p, axes, x)

    def tangent(x, y, x_dot):
        size = abs(wide(x))
        if p == 0:
            share = jnp.zeros_like(size)
        elif math.isinf(p):
            share = (size == y).astype(size.dtype)
            share = share / jnp.maximum(jnp.sum(share, axes, keepdims=True), 1)
        else:
            inside = (size > 0) & (y > 0)
            ratio = jnp.where(inside, size, 1) / jnp.where(y > 0, y, 1)
            share = jnp.where(inside, ratio ** (p - 1), 0)
        return jnp.sum(jnp.sign(wide(x)) * share * wide(x_dot), axes, keepdims=True)

    return y, jax.checkpoint(tangent)(x, y, x_dot)


def _power_of_two(largest: Array) -> Array:
    """The power of two at or below `largest`; 1 where that is 0 or not finite. Its reciprocal is exact."""
    usable = (largest > 0) & jnp.isfinite(largest)
    _, exponent = jnp.frexp(jnp.where(usable, largest, 1))
    # within the normal range on both sides
    bound = 120 if largest.dtype == jnp.float32 else 1000
    return jnp.ldexp(jnp.ones_like(largest), jnp.clip(exponent, -bound, bound))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _l2_normalize(axes, eps, x: Array) -> Array:
    return _l2_forward(axes, eps, x)[0]


def _l2_forward(axes, eps, x):
    (copy,) = own_copy(x)
    squares = jnp.sum(jnp.square(wide(copy)), axes, keepdims=True)
    length = jnp.sqrt(squares)
    divisor = jnp.maximum(length, jnp.asarray(eps, length.dtype))
    inverse = jnp.where(jnp.isfinite(squares), 1 / jnp.where(divisor > 0, divisor, 1), jnp.nan)
    copy, by = own_copy(copy, inverse)
    return (wide(copy) * by).astype(x.dtype), (x, inverse, length > eps)


def _l2_backward(axes, eps, residuals, dy):
    x, inverse, longer = residuals
    first, copy, by = own_copy(dy, x, inverse)
    along = jnp.sum(wide(first) * (wide(copy) * by), axes, keepdims=True) * longer
    first, copy, by, along = own_copy(first, copy, by, along)
    return (((wide(first) - (wide(copy) * by) * along) * by).astype(x.dtype),)


_l2_normalize.defvjp(_l2_forward, _l2_backward)
