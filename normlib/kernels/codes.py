"""Codes of a norm's float32 value, in the kernel of the norm: by a known factor, or by each row's largest magnitude."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from normlib.kernels.phases import Columns, Phase
from normlib.kernels.tile import Chunk, widened


@dataclass(frozen=True)
class Coder:
    """One quantisation.

    Attributes:
      dtype: of the codes.
      encode: (value in units of the step, zero point or None) -> codes, of float32 tiles.
      factor: what the value is multiplied with, of x's rank and broadcastable to it; None for 1.
      zero_point: likewise, integer, or None.
      largest: code of a row's largest magnitude; None where the factor is the whole scale.
      floor: smallest scale of a row.
    """

    dtype: Any
    encode: Callable[[Array, Array | None], Array]
    factor: Array | None = None
    zero_point: Array | None = None
    largest: float | None = None
    floor: float = 0.0

    @property
    def by_row(self) -> bool:
        """Whether every row finds its own scale."""
        return self.largest is not None

    @property
    def arrays(self) -> list[Array]:
        """Operands of the kernel."""
        return [t for t in (self.factor, self.zero_point) if t is not None]


class Coding:
    """The coders of a kernel, their operands lying at `at` among its refs, their rows' scales from `known` on among
    its results."""

    def __init__(self, coders: Sequence[Coder], at: int, known: int):
        self.coders, self.known = coders, known
        self.places: dict[int, int] = {}  # of a coder's operands
        for coder in coders:
            self.places[id(coder)] = at
            at += len(coder.arrays)
        self.searching = [c for c in coders if c.by_row]

    @property
    def operands(self) -> int:
        """Their number."""
        return sum(len(c.arrays) for c in self.coders)

    def _given(self, coder: Coder, chunk: Chunk, refs: Sequence[Any]) -> tuple[Array | None, Array | None]:
        at = self.places[id(coder)]
        found: list[Array | None] = []
        for t in (coder.factor, coder.zero_point):
            found.append(None if t is None else widened(chunk.read(refs[at])))
            at += t is not None
        return found[0], found[1]

    def search(self, value: Callable[[Chunk, Any, Columns], Array]) -> list[Phase]:
        """A walk for the largest magnitude of `value` in every row; none where no scale depends on it."""
        if not self.searching:
            return []

        def largest(chunk: Chunk, refs: Any, done: Columns) -> Columns:
            found: list[Array] = []
            y = value(chunk, refs, done)
            for coder in self.searching:
                factor, _ = self._given(coder, chunk, refs)
                v = chunk.clean(y if factor is None else y * factor)
                there = v == v  # a maximum may lose a NaN
                found.append(jnp.max(jnp.where(there, jnp.abs(v), 0.0), 1, keepdims=True))
                found.append(jnp.max(jnp.where(there, 0.0, 1.0), 1, keepdims=True))
            return tuple(found)

        def step(chunk: Chunk, refs: Any, carry: Columns, done: Columns) -> Columns:
            return tuple(jnp.maximum(a, b) for a, b in zip(carry, largest(chunk, refs, done)))

        def end(refs: Any, carry: Columns, done: Columns) -> Columns:
            found: list[Array] = []
            for i, coder in enumerate(self.searching):
                top = jnp.where(carry[2 * i + 1] > 0, jnp.nan, carry[2 * i])
                # the divisor depends on the dividend: a constant one would become a product with its reciprocal
                scale = top / (jnp.where(top - top == 0, top, 0.0) * 0.0 + (coder.largest or 0.0))
                scale = jnp.where(scale < coder.floor, coder.floor, scale)
                found += [scale, 1.0 / scale]
            return tuple(found)

        number = 2 * len(self.searching)
        return [Phase(largest, step, end, number, number)]

    def scales(self, done: Columns) -> Columns:
        """The scale of every row, for each coder that looks for one."""
        return done[self.known : self.known + 2 * len(self.searching) : 2]

    def write(self, chunk: Chunk, refs: Sequence[Any], outs: Sequence[Any], y: Array, done: Columns) -> None:
        """Codes of `y` into `outs`."""
        inverses = list(done[self.known + 1 : self.known + 2 * len(self.searching) : 2])
        for coder, out in zip(self.coders, outs):
            factor, zero_point = self._given(coder, chunk, refs)
            v = y if factor is None else y * factor
            v = v * inverses.pop(0) if coder.by_row else v
            chunk.write(out, coder.encode(v, None if zero_point is None else zero_point.astype(jnp.int32)))
