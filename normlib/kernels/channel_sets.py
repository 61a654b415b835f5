"""Norms over channels: which entries share statistics, as tiles see it.

A tile holds all entries of some channels, `[M, lanes]` where channels are last and `[M, channels, R]` where they stand
before their space. M (rows, or samples) is always axis 0: it is what a tile is walked along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from normlib.kernels.machine import Machine
from normlib.kernels.tile import SERIAL
from normlib.kernels.view import Shape, View, columns_of


@dataclass(frozen=True)
class Sets:
    """Which entries of arrays share statistics.

    Attributes:
      view: (A, M, C) where channels are last: of each of A samples, M rows of C lanes. (M, C, R) where they are
        `spread`: of each channel, R entries in each of M samples.
      spread: channels stand before their space.
      group: neighbouring lanes that share statistics; 1 where `spread`.
    """

    view: View
    spread: bool
    group: int = 1

    @property
    def sides(self) -> tuple[int, int, int, int]:
        """(A, M, C, R)."""
        sides = self.view.tile_shape
        return (1, *sides) if self.spread else (*sides, 1)

    @property
    def entries(self) -> int:
        """Entries that share statistics."""
        _, m, _, r = self.sides
        return m * r * self.group

    @property
    def serial(self) -> int:
        """Rows of a tile that may be summed one after the other: many where their errors average over space."""
        return SERIAL * min(self.sides[3], 16)

    def varies(self, shape: Shape) -> bool:
        """Whether an array of `shape` differs between entries of one channel."""
        at = (0, 2) if self.spread else (1,)
        return any(shape[i] != 1 for part in at for i in self.view.parts[part])


def sets_of(shape: Shape, axes: Sequence[int], *, group: int = 1, channel_axis: int = -1) -> Sets | None:
    """The sets of statistics over `axes`, each of `group` neighbouring channels; None where tiles cannot hold them.

    Either the reduced axes are neighbours, with channels behind them, or there are channels between the first axes and
    the last ones (with groups the former, and no kept axis but the channels behind). Axes of size 1 do not matter: one
    channel is a tile of one lane.
    """
    long = [a for a in axes if shape[a] != 1]
    kept = [i for i in range(len(shape)) if shape[i] != 1 and i not in long]
    if not long:
        return None
    between = [i for i in kept if long[0] < i < long[-1]]
    if not between:
        sets = Sets(columns_of(shape, long), False, group)
        alone = all(shape[i] == 1 or i == channel_axis % len(shape) for i in sets.view.parts[2])
        return sets if group == 1 or alone else None
    first, last = min(between), max(between) + 1
    whole = all(i in long or shape[i] == 1 for i in (*range(first), *range(last, len(shape))))
    if group != 1 or not whole or any(i in long for i in range(first, last)):
        return None
    parts = (tuple(range(first)), tuple(range(first, last)), tuple(range(last, len(shape))))
    return Sets(View(shape, parts), True)


class Pool:
    """Sums over groups of lanes of `[1, lanes]` arrays, in every lane its group's: by a table of who is in which.

    Any width of a group and no reshaping of lanes, so it is the same on every machine.
    """

    def __init__(self, lanes: int, group: int, machine: Machine):
        number = pl.cdiv(lanes, group)
        number = pl.next_power_of_2(number) if machine.power_of_two else number
        self.group, self.alone = group, group == 1
        if not self.alone:
            place = lax.broadcasted_iota(jnp.int32, (number, lanes), 1)
            place = place - group * lax.broadcasted_iota(jnp.int32, (number, lanes), 0)
            self.member = (place >= 0) & (place < group)

    def __call__(self, t: Array) -> Array:
        if self.alone:
            return t
        zero = jnp.zeros((), t.dtype)
        total = jnp.sum(jnp.where(self.member, t, zero), 1, keepdims=True)
        return jnp.sum(jnp.where(self.member, total, zero), 0, keepdims=True)


def rows_are_sets(shape: Shape, axes: Sequence[int]) -> bool:
    """Whether what shares statistics over `axes` lies behind all that is kept: a norm of rows is better there."""
    long = [a for a in axes if shape[a] != 1]
    kept = [i for i in range(len(shape)) if shape[i] != 1 and i not in long]
    return bool(long and kept) and kept[-1] < long[0]


def spread_over(t: jax.Array, group: int, axis: int) -> jax.Array:
    """Statistics of groups, any shape, repeated for every channel of a group along `axis`."""
    if group == 1:
        return t
    shape = (*t.shape[: axis + 1], group, *t.shape[axis + 1 :])
    return jnp.broadcast_to(jnp.expand_dims(t, axis + 1), shape).reshape(
        *t.shape[:axis], t.shape[axis] * group, *t.shape[axis + 1 :]
    )  # fmt: skip
