"""Moments: what a norm knows of its input, as a monoid.

Entries of x, channels of a group, rows of a gathered table and devices are all pooled by one formula (`about`): with
n entries and s1 = sum(x - k), s2 = sum((x - k)**2) about any common k,

    mean = k + s1 / n        m2 = s2 - s1**2 / n

which is exact to rounding when |mean - k| is not much larger than the standard deviation. `low` is the part of the
mean below its own rounding (Knuth's TwoSum): subtracting `mean` and then `low` keeps y accurate to one ulp where
mean / sigma is 1e4 or 1e5, and makes constant inputs come out as zero.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from normlib._varying import vary, varying
from normlib.precision import wide


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of a set of numbers; arrays of one common shape.

    Attributes:
      count: int32, number of entries.
      mean: their mean, rounded; 0 where count is 0.
      low: what rounding took from the mean: `mean + low` is the mean to twice the precision.
      m2: sum of |x - mean|**2, never negative. For uncentred moments (RMS) the sum of |x|**2, with mean 0.
    """

    count: Array  # type: ignore[assignment]  # a tuple's method of that name is not missed
    mean: Array
    low: Array
    m2: Array

    @property
    def var(self) -> Array:
        """Biased variance m2 / count, 0 where count is 0."""
        return divided(self.m2, self.count)

    @property
    def unbiased_var(self) -> Array:
        """m2 / (count - 1); the biased value where count is 0 or 1."""
        return self.m2 / positive(self.count - 1, self.m2.dtype)

    def rstd(self, eps) -> Array:
        """1 / sqrt(var + eps): NaN where the variance is not finite, 0 where nothing was counted."""
        var = self.var
        root = jnp.where(jnp.isfinite(var), reciprocal_root(var + jnp.asarray(eps, var.dtype)), jnp.nan)
        return jnp.where(self.count > 0, root, 0)

    @classmethod
    def of(cls, x: Array, axes: int | tuple[int, ...] | None = None, *, where: Array | None = None) -> Moments:
        """Moments of `x` over `axes` (None: all), counting only entries where `where` is True; axes are dropped.

        >>> m = Moments.of(jnp.array([1.0, 2.0, 6.0]))
        >>> float(m.mean), float(m.var)
        (3.0, 4.666666507720947)
        """
        axes = tuple(range(x.ndim)) if axes is None else (axes,) if isinstance(axes, int) else tuple(axes)
        axes = tuple(a % x.ndim for a in axes)
        count = count_entries(x.shape, axes, where)
        s1, _ = _sums(x, None, axes, where)
        pilot = lax.stop_gradient(divided(s1, count))
        s1, s2 = _sums(x, pilot, axes, where)
        return jax.tree.map(lambda t: jnp.squeeze(jnp.broadcast_to(t, s1.shape), axes), about(pilot, count, s1, s2))

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets together (Chan et al. 1979); shapes must broadcast.

        >>> a, b = Moments.of(jnp.arange(3.0)), Moments.of(jnp.arange(3.0, 8.0))
        >>> float(a.merge(b).mean), float(a.merge(b).var)
        (3.5, 5.25)
        """
        both = jax.tree.map(lambda a, b: jnp.stack(jnp.broadcast_arrays(a, b)), self, other)
        return both.merge_axis(0)

    def merge_axis(self, axis: int | tuple[int, ...], *, keepdims: bool = False) -> Moments:
        """The moments of all sets along `axis` together; sets of count 0 weigh nothing.

        The common k is the largest mean of the non-empty sets: equal means stay exactly equal (a division could not
        promise that), and a second merge about the result removes what a far-off set costs. The table is tiny.
        """
        filled = self.count > 0
        lowest = jnp.finfo(self.mean.real.dtype).min
        if jnp.iscomplexobj(self.mean):
            pilot = jnp.sum(jnp.where(filled, self.mean, 0), axis, keepdims=True)
            pilot = pilot / positive(jnp.sum(filled, axis, keepdims=True), self.m2.dtype)
        else:
            pilot = jnp.max(jnp.where(filled, self.mean, lowest), axis, keepdims=True, initial=lowest)
            pilot = jnp.where(jnp.any(filled, axis, keepdims=True), pilot, 0)
        merged = self._merge_about(lax.stop_gradient(pilot), axis)
        merged = self._merge_about(lax.stop_gradient(merged.mean), axis)
        return merged if keepdims else jax.tree.map(lambda t: jnp.squeeze(t, axis), merged)

    def sums_about(self, k: Array) -> tuple[Array, Array]:
        """(s1, s2) about `k`, from which `about` gives the same moments back."""
        n = self.count.astype(self.m2.dtype)
        d = jnp.where(self.count > 0, (self.mean - k) + self.low, 0)
        return n * d, self.m2 + n * abs_squared(d)

    def _merge_about(self, k: Array, axis) -> Moments:
        total = [jnp.sum(t, axis, keepdims=True) for t in self.sums_about(k)]
        return about(k, jnp.sum(self.count, axis, keepdims=True, dtype=jnp.int32), *total)


def positive(count: Array, dtype) -> Array:
    """max(count, 1) as a float: the divisor that leaves an empty set's sums at zero. Any shape."""
    return jnp.maximum(count, 1).astype(dtype)


def reciprocal_root(v: Array) -> Array:
    """1 / sqrt(v) of tiny statistics, any shape, within 1.5 * 2**-24.

    XLA on CPU makes rsqrt of 1 / sqrt, which is off by up to 2.4 * 2**-24: the barrier keeps root and division apart,
    each correctly rounded.
    """
    return 1 / lax.optimization_barrier(jnp.sqrt(v))


def divided(t: Array, count: Array) -> Array:
    """t / max(count, 1), correctly rounded whatever the shape.

    XLA on CPU makes a product with the reciprocal of a divisor that is broadcast, for some shapes and not for others:
    behind the barrier it is an array like t.
    """
    n = lax.optimization_barrier(jnp.broadcast_to(positive(count, t.real.dtype), t.shape))
    return t / n


def abs_squared(x: Array) -> Array:
    """|x|**2 element by element, real for complex x. Any shape."""
    return x.real * x.real + x.imag * x.imag if jnp.iscomplexobj(x) else x * x


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """(s, e) with s = fl(a + b) and s + e = a + b exactly (Knuth, TAOCP 2, 4.2.2). Any shapes that broadcast."""
    s = a + b
    bb = s - a
    return s, (a - (s - bb)) + (b - bb)


def about(k: Array | float, count: Array, s1: Array | None, s2: Array) -> Moments:
    """Moments from the sums s1, s2 about a common `k`; s1 None gives uncentred moments. Shapes broadcast."""
    if s1 is None:
        zero = jnp.zeros_like(s2)
        return Moments(jnp.broadcast_to(count, s2.shape), zero, zero, s2)
    d = lax.optimization_barrier(divided(s1, count))
    filled = count > 0
    mean, low = two_sum(jnp.broadcast_to(jnp.asarray(k, d.dtype), d.shape), d)
    # where, not a multiplication: k of an empty set may be anything, and NaN * 0 is NaN
    mean, low = jnp.where(filled, mean, 0), lax.stop_gradient(jnp.where(filled, low, 0))
    # rounded before it is subtracted: fused, as it is for some shapes only, it would change a row with its neighbours
    taken = lax.optimization_barrier((s1 * d.conj()).real if jnp.iscomplexobj(d) else s1 * d)
    m2 = jnp.where(filled, jnp.maximum(s2 - taken, 0), 0)
    return Moments(jnp.broadcast_to(count, m2.shape), mean, low, m2)


def count_entries(shape: tuple[int, ...], axes: tuple[int, ...], where: Array | None) -> Array:
    """int32 number of entries of an array of `shape` over `axes` (kept as 1) where `where` holds.

    Raises:
      ValueError: if a set has 2**31 entries or more, which an int32 count cannot hold.
    """
    n = 1
    for axis in axes:
        n *= shape[axis]
    if isinstance(n, int) and n >= 2**31:  # symbolic sizes of an export are not known yet
        raise ValueError(f"a set of {n} entries over axes {axes} of {shape} is too large: the count is an int32.")
    if where is None:
        return jnp.full((1,) * len(shape), n, jnp.int32)
    here = tuple(a for a in axes if where.shape[a] != 1)
    repeated = 1
    for axis in axes:
        repeated *= shape[axis] if where.shape[axis] == 1 else 1
    return jnp.sum(where, axes, keepdims=True, dtype=jnp.int32) * repeated if here else where.astype(jnp.int32) * n


def _sums(x: Array, k: Array | None, axes: tuple[int, ...], where: Array | None) -> tuple[Array, Array]:
    d = wide(x) if k is None else wide(x) - k
    if where is not None:
        d = jnp.where(where, d, 0)
    return jnp.sum(d, axes, keepdims=True), jnp.sum(abs_squared(d), axes, keepdims=True)


def welford_scan(x: Array, axis: int = 0, *, where: Array | None = None) -> Moments:
    """Welford's recurrence, one entry of `axis` at a time: for teaching and for the simulator.

        d = x_t - mean;  mean += d / t;  m2 += d * (x_t - mean)

    Args:
      x: any shape, real; computed in float32 (float64 for float64).
      axis: the axis run along, dropped in the result.
      where: bool, broadcastable to x; entries where it is False are passed over.

    Returns:
      Moments with `low` 0. Its relative variance error grows with mean / sigma (2e-5 at 1e3 in float32), unlike
      `Moments.of`'s.

    Source: Welford 1962, "Note on a method for calculating corrected sums of squares and products".

    >>> float(welford_scan(jnp.array([1.0, 2.0, 6.0])).mean)
    3.0
    """
    rows = jnp.moveaxis(wide(x), axis, 0)
    seen = jnp.ones_like(rows, bool) if where is None else jnp.moveaxis(jnp.broadcast_to(where, x.shape), axis, 0)

    def step(carry, row):
        count, mean, m2 = carry
        value, here = row
        grown = count + here
        d = jnp.where(here, value - mean, 0)
        mean = mean + d / positive(grown, mean.dtype)
        return (grown, mean, m2 + d * jnp.where(here, value - mean, 0)), None

    # a scan's carry must vary over the same mesh axes at the start as after a step, and zeros vary over none
    names = sorted(varying(rows) | varying(seen))
    zero = vary(jnp.zeros(rows.shape[1:], rows.dtype), names)
    start = (vary(jnp.zeros(rows.shape[1:], jnp.int32), names), zero, zero)
    (count, mean, m2), _ = lax.scan(step, start, (rows, seen))
    return Moments(count, mean, jnp.zeros_like(mean), m2)
