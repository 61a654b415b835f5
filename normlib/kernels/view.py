"""Arrays of any rank as [A, M, L] (outer, middle, lanes), with what broadcasts to them as [1|A, 1|M, 1|L].

Neighbouring axes that are reduced alike, and along which every operand is constant or varies alike, are one axis to a
kernel. An operand that does not fit is written out along more axes (rare: a scale per pixel column of an image, say).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

Shape = tuple[int, ...]


@dataclass(frozen=True)
class View:
    """How arrays of `shape` are seen as `tile_shape` = (A, M, L): `parts` says which axes make each.

    With `split` = (axis, groups) the arrays' own axis of that number is two axes here, groups and what is in a group.
    `pooled`: the rows along M share their statistics, besides the lanes.
    """

    shape: Shape
    parts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    split: tuple[int, int] | None = None
    pooled: bool = False

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """(A, M, L)."""
        a, m, l = (math.prod(self.shape[i] for i in part) for part in self.parts)
        return a, m, l

    def given(self, t: Array) -> Array:
        """`t` with its axis of groups as two; statistics of whole groups have size 1 inside."""
        if self.split is None:
            return t
        axis, groups = self.split
        size = t.shape[axis]
        two = (1, 1) if size == 1 else (groups, size // groups)
        return t.reshape(*t.shape[:axis], *two, *t.shape[axis + 1 :])

    def joined(self, t: Array) -> Array:
        """The reverse of `given`."""
        if self.split is None:
            return t
        axis = self.split[0]
        return t.reshape(*t.shape[:axis], t.shape[axis] * t.shape[axis + 1], *t.shape[axis + 2 :])

    def array(self, t: Array, *, periodic: bool = False) -> Array:
        """`t`, of the arrays' shape with any axes 1, as [1|A, 1|M, 1|L]; written out along a part it varies in partly.

        With `periodic` it is [P, ., .] where it varies along the last P of A only.
        """
        t = self.given(t)
        sides, shape = [], list(t.shape)
        for number, part in enumerate(self.parts):
            here = [i for i in part if self.shape[i] != 1]
            varies = [i for i in here if t.shape[i] != 1]
            if periodic and not number and varies == here[len(here) - len(varies) :]:
                sides.append(math.prod(self.shape[i] for i in varies))
                continue
            for i in here if varies else ():
                shape[i] = self.shape[i]
            sides.append(math.prod(self.shape[i] for i in here) if varies else 1)
        if tuple(shape) != t.shape:
            t = jnp.broadcast_to(t, shape)
        return t.reshape(sides)

    def back(self, t: Array) -> Array:
        """[1|A, 1|M, 1|L] in the arrays' rank, with the axes of a part of size 1 kept as 1."""
        shape = [1] * len(self.shape)
        for part, side in zip(self.parts, t.shape):
            for i in part:
                shape[i] = self.shape[i] if side != 1 else 1
        return self.joined(t.reshape(shape))


def groups_of(shape: Shape, axes: Sequence[int], channel: int, groups: int) -> View | None:
    """`shape` with what one group of channels holds in a tile: [A = sets, M = its channels, L = its space], pooled.

    None unless `axes` are the last ones, right behind the channels (but for axes of size 1). Where channels are alone,
    or have no space, sets are plain rows.
    """
    axes = tuple(a for a in axes if shape[a] != 1)
    if axes != tuple(i for i in range(channel + 1, len(shape)) if shape[i] != 1):
        return None
    inner = shape[channel] // groups
    split = (*shape[:channel], groups, inner, *shape[channel + 1 :])
    outer, space = tuple(range(channel)), tuple(a + 1 for a in axes)
    if not axes:
        return View(split, (outer, (channel,), (channel + 1,)), (channel, groups))
    if inner == 1:
        return View(split, (outer, (channel,), space), (channel, groups))
    return View(split, ((*outer, channel), (channel + 1,), space), (channel, groups), pooled=True)


def rows_of(shape: Shape, axes: Sequence[int], operands: Sequence[Shape] = ()) -> View | None:
    """`shape` with the reduced `axes` as lanes; None unless they are the last axes (but for axes of size 1)."""
    axes = tuple(a for a in axes if shape[a] != 1)
    kept = [i for i in range(len(shape)) if i not in axes]
    if any(shape[i] != 1 and i > min(axes, default=len(shape)) for i in kept):
        return None
    return View(shape, (*_two(shape, kept, operands), axes))


def columns_of(shape: Shape, axes: Sequence[int]) -> View:
    """`shape` with the contiguous reduced `axes` in the middle."""
    first, last = min(axes), max(axes)
    return View(shape, (tuple(range(first)), tuple(range(first, last + 1)), tuple(range(last + 1, len(shape)))))


def elements_of(shape: Shape, operands: Sequence[Shape]) -> View:
    """`shape` for element-wise work with `operands`: as few parts as they allow, the last one long."""
    runs = _runs(shape, range(len(shape)), operands)
    if len(runs) > 3:
        runs = [sum(runs[:-2], ()), *runs[-2:]]
    return View(shape, tuple([()] * (3 - len(runs)) + runs))  # type: ignore[arg-type]


def last_run(shape: Shape, axes: Sequence[int]) -> tuple[int, ...]:
    """The last contiguous run of reduced `axes` (axes of size 1 do not interrupt)."""
    run: list[int] = []
    for i in reversed(range(len(shape))):
        if shape[i] == 1:
            continue
        if i in axes:
            run.append(i)
        elif run:
            break
    return tuple(sorted(run)) or tuple(axes)


def _two(shape: Shape, kept: list[int], operands: Sequence[Shape]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    runs = _runs(shape, kept, operands)
    if len(runs) == 2:
        return runs[0], runs[1]
    return (), tuple(kept)


def _runs(shape: Shape, axes, operands: Sequence[Shape]) -> list[tuple[int, ...]]:
    """Runs of neighbouring axes along which every operand is constant, or varies, alike."""
    runs: list[tuple[int, ...]] = []
    before = None
    for i in axes:
        if shape[i] == 1:
            continue
        sort = tuple(op[i] != 1 for op in operands)
        if sort == before:
            runs[-1] += (i,)
        else:
            runs.append((i,))
        before = sort
    return runs
