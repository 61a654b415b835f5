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
    """How arrays of `shape` are seen as `tile_shape` = (A, M, L): `parts` says which axes make each."""

    shape: Shape
    parts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """(A, M, L)."""
        a, m, l = (math.prod(self.shape[i] for i in part) for part in self.parts)
        return a, m, l

    def array(self, t: Array) -> Array:
        """`t`, of `shape` with any axes 1, as [1|A, 1|M, 1|L]; written out along a part it varies in only partly."""
        sides, shape = [], list(t.shape)
        for part in self.parts:
            here = [i for i in part if self.shape[i] != 1]
            varies = any(t.shape[i] != 1 for i in here)
            for i in here if varies else ():
                shape[i] = self.shape[i]
            sides.append(math.prod(self.shape[i] for i in here) if varies else 1)
        if tuple(shape) != t.shape:
            t = jnp.broadcast_to(t, shape)
        return t.reshape(sides)

    def back(self, t: Array) -> Array:
        """[1|A, 1|M, 1|L] as an array of `shape` with the axes of a part of size 1 kept as 1."""
        shape = [1] * len(self.shape)
        for part, side in zip(self.parts, t.shape):
            for i in part:
                shape[i] = self.shape[i] if side != 1 else 1
        return t.reshape(shape)


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
