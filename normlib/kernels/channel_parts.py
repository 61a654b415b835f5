"""The other way to a norm over channels: moments or sums of parts, merged, then a map; on one device or several.

A device has a part of what shares statistics: its moments are gathered and merged by Chan's formula, its sums added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from normlib.kernels.affine import affine_tile, elementwise, grad_tile
from normlib.kernels.channel_sets import Sets, rows_are_sets, sets_of, spread_over
from normlib.kernels.column_moments import moments as kernel_moments
from normlib.kernels.machine import Machine
from normlib.kernels.rows_grad import Given, through
from normlib.kernels.sums import sums as kernel_sums
from normlib.kernels.tile import activated
from normlib.kernels.view import Shape
from normlib.moments import Moments
from normlib.scope import unbroadcast


@dataclass(frozen=True)
class Over:
    """What shares statistics: entries along `axes` and `group` neighbours along `channel`."""

    axes: tuple[int, ...]
    channel: int
    group: int

    def fits(self, shape: Shape) -> bool:
        """Whether whole channels of an array of `shape` can lie in a tile, and are no rows."""
        if rows_are_sets(shape, self.axes):
            return False
        return sets_of(shape, self.axes, group=self.group, channel_axis=self.channel) is not None

    def sets(self, shape: Shape) -> Sets:
        """As tiles see an array of `shape`, that of the whole or of a device's part."""
        found = sets_of(shape, self.axes, group=self.group, channel_axis=self.channel)
        assert found is not None  # the whole has been seen so
        return found

    @property
    def name(self) -> str:
        """Of kernels."""
        return "channel_norm" if self.group == 1 else "group_norm"

    @property
    def units(self) -> tuple[tuple[int, int], ...]:
        """Channels that stay together where a program is split."""
        return () if self.group == 1 else ((self.channel, self.group),)

    def by_channel(self, t: Array) -> Array:
        """Statistics of sets, repeated for every channel."""
        return spread_over(t, self.group, self.channel)

    def by_set(self, t: Array) -> Array:
        """The reverse of `by_channel`."""
        return t if self.group == 1 else lax.slice_in_dim(t, 0, t.shape[self.channel], self.group, self.channel)

    def pooled(self, moments: Moments) -> Moments:
        """Moments of channels as those of their group, for every channel."""
        if self.group == 1:
            return moments
        at = self.channel
        split = lambda t: t.reshape(*t.shape[:at], -1, self.group, *t.shape[at + 1 :])  # noqa: E731
        merged = jax.tree.map(split, moments).merge_axis(at + 1)
        return jax.tree.map(self.by_channel, merged)

    def summed(self, t: Array) -> Array:
        """Sums of channels, `[..., 1, C]`, as those of their group, for every channel."""
        if self.group == 1:
            return t
        at = self.channel
        total = jnp.sum(t.reshape(*t.shape[:at], -1, self.group, *t.shape[at + 1 :]), at + 1)
        return self.by_channel(total)

    def means(self, t: Array) -> Array:
        """Means over sets of an array of any size along the channels, for every channel."""
        n = math.prod(t.shape[a] for a in self.axes) * self.group
        return self.summed(jnp.sum(t, self.axes, keepdims=True)) / n

    def parameters(self, machine: Machine, shapes: dict[str, Shape], shape: Shape, s0: Array, s1: Array) -> list[Array]:
        """The cotangents of parameters of `shapes` from the sums of dz and dz * xhat over every channel of x's part, of
        `shape`."""
        found: dict[str, Array] = {}
        terms = {"scale": s1, "bias": s0}
        wanted = {k: tuple(min(m, n) for m, n in zip(s, shape)) for k, s in shapes.items()}
        for to in dict.fromkeys(wanted.values()):
            keys = [k for k in wanted if wanted[k] == to]
            over = tuple(i for i, (n, m) in enumerate(zip(s0.shape, to)) if m == 1 and n != 1)
            sums: Sequence[Array] = [terms[k] for k in keys]
            if over:
                number, again = len(sums), lambda *t: t
                sums = kernel_sums(again, sums, axes=over, number=number, name="grad_sums_merge", machine=machine)
            found |= {k: unbroadcast(t, to) for k, t in zip(keys, sums)}
        return [found[k] for k in shapes]


def moments_of(n: int, mean: Array | None, low: Array | None, m2: Array) -> Moments:
    """Moments of sets of n entries each; no mean and low where they are not centred."""
    zero = jnp.zeros_like(m2)
    count = jnp.full(m2.shape, n, jnp.int32)
    return Moments(count, zero if mean is None else mean, zero if low is None else low, m2)


def merged_moments(axes: Sequence[int], parts: Sequence[Array], names: Sequence[str], shape: Shape) -> list[Array]:
    """[mean, low, m2] of all devices along `names` from those of each, over `axes` of its part of x, of `shape`."""
    mean, low, m2 = parts
    table = lax.all_gather(jnp.stack([mean, low, m2]), names)
    count = jnp.full(table[:, 0].shape, math.prod(shape[a] for a in axes), jnp.int32)
    merged = Moments(count, table[:, 0], table[:, 1], table[:, 2]).merge_axis(0)
    return [merged.mean, merged.low, merged.m2]


def parts_forward(
    machine: Machine, over: Over, x: Array, scale, bias, behind, *, names: Sequence[str], eps: float, centered: bool,
    activation: Any, dtype: Any, rows: int | None = None, chunk: int | None = None,
) -> list[Array]:  # fmt: skip
    """[y, mean and low (where centred), m2, rstd] of a device's part of x, statistics for every channel.

    Tiles have `rows` and `chunk` channels, by default what fits.
    """
    tile: dict[str, Any] = {"machine": machine, "rows": rows, "chunk": chunk}
    n = math.prod(x.shape[a] for a in over.axes) * math.prod(lax.axis_size(name) for name in names)
    if centered:
        found = list(kernel_moments(x, axes=over.axes, **tile))
        found = merged_moments(over.axes, found, names, x.shape) if names else found
        own = over.pooled(moments_of(n, *found))
        mean, low, m2, rstd = own.mean, own.low, own.m2, own.rstd(eps)
    else:
        square = lambda x: (x * x,)  # noqa: E731
        (m2,) = kernel_sums(square, [x], axes=over.axes, number=1, name="sums", **tile)
        m2 = over.summed(lax.psum(m2, names) if names else m2)
        mean, low, rstd = None, None, moments_of(n * over.group, None, None, m2).rstd(eps)

    def mapped(x, mean, low, rstd, scale, bias, behind):
        z = affine_tile(x, mean, low, rstd, scale, bias)
        z = z if behind is None else z + behind
        return activated(activation, z, machine)

    y = elementwise(
        mapped, [x, mean, low, rstd, scale, bias, behind], name="affine" if activation is None else "affine_act",
        dtype=dtype, temporary=12 if activation is None else 20, **tile,
    )  # fmt: skip
    return [y, *(t for t in (mean, low, m2, rstd) if t is not None)]


def parts_backward(
    machine: Machine, over: Over, x: Array, *given: Any, names: Sequence[str], activation: Any, behind_dtype: Any,
    rows: int | None = None, chunk: int | None = None,
) -> list[Array]:  # fmt: skip
    """[dx, dz (where asked for), sums of dz and of dz * xhat for every channel] of a device's part of x."""
    v = Given(*given)
    tile: dict[str, Any] = {"machine": machine, "rows": rows, "chunk": chunk}

    def through_tile(x, *given):
        return through(x, Given(*given), activation)

    def terms(*tiles):
        dz, xhat = through_tile(*tiles)
        return dz, dz * xhat

    s0, s1 = kernel_sums(terms, [x, *given], axes=over.axes, number=2, name="grad_sums", **tile)
    s0, s1 = lax.psum((s0, s1), names) if names else (s0, s1)
    n = math.prod(x.shape[a] for a in over.axes) * math.prod(lax.axis_size(name) for name in names) * over.group
    w0, w1 = (s0, s1) if v.scale is None else (s0 * v.scale, s1 * v.scale)
    c0, c1 = over.summed(w0) / n, v.rstd * (over.summed(w1) / n)

    def mapped(x, c0, c1, *given):
        dz, _ = through_tile(x, *given)
        mean, low, rstd, scale = given[1:5]
        return grad_tile(x, dz, mean, low, rstd, scale, c1, None if mean is None else c0)

    space = 16 if activation is None else 28
    dx = elementwise(
        mapped, [x, c0, c1, *given], name="grad_affine", dtype=x.dtype, temporary=space, **tile,
    )  # fmt: skip
    if behind_dtype is None:
        return [dx, s0, s1]
    dz = elementwise(
        lambda *tiles: through_tile(*tiles)[0], [x, *given], name="act_grad", dtype=behind_dtype, temporary=space,
        **tile,
    )  # fmt: skip
    return [dx, dz, s0, s1]
