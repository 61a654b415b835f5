"""What must be known before a loop or branch is traced, found by tracing its body on shapes alone.

Carried values have a kind and a divisor, Refs a kind, slack and whether they are written. A body may change all of
them, so it is traced until nothing new is found; then only the Refs it writes travel as carried arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sim_npu.precision import Kind
from sim_npu.values import Ref, RefState, Value, joined_multiple


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known before a loop or branch is traced: of its carried values and of the Refs it sees."""

    kinds: tuple[Kind, ...]
    multiples: tuple[int, ...]
    refs: tuple[RefState, ...]

    @staticmethod
    def of(values: Sequence[Value], refs: Sequence[Ref]) -> Known:
        return Known(tuple(v.kind for v in values), tuple(v.multiple for v in values), tuple(r.state() for r in refs))

    @staticmethod
    def before(values: Sequence[Value], refs: Sequence[Ref]) -> Known:
        known = Known.of(values, refs)
        return dataclasses.replace(known, refs=tuple(dataclasses.replace(r, written=False) for r in known.refs))

    def __or__(self, other: Known) -> Known:
        return Known(
            tuple(a | b for a, b in zip(self.kinds, other.kinds)),
            tuple(joined_multiple(a, b) for a, b in zip(self.multiples, other.multiples)),
            tuple(a | b for a, b in zip(self.refs, other.refs)),
        )

    def with_memory(self, other: Known) -> Known:
        """This with the slack and writes of another, kinds unchanged."""
        merged = tuple(dataclasses.replace(a | b, kind=a.kind) for a, b in zip(self.refs, other.refs))
        return dataclasses.replace(self, refs=merged)

    def widen(self, refs: Sequence[Ref]) -> None:
        for ref, state in zip(refs, self.refs):
            ref.widen(state.slack)

    def outside(self, values: Sequence[Value], refs: Sequence[Ref]) -> tuple[list[Any], list[Any]]:
        """Arrays to start from: the values, then the Refs that are written."""
        return [jnp.asarray(v.x) for v in values], [r.array for r, s in zip(refs, self.refs) if s.written]

    def placed(self, refs: Sequence[Ref], arrays: Sequence[Any]) -> list[Any]:
        """One array per Ref: a carried one where it is written."""
        left = iter(arrays)
        return [next(left) if s.written else r.array for r, s in zip(refs, self.refs)]

    def inside(self, refs: Sequence[Ref], carried: Any) -> tuple[dict[int, Ref], list[Value]]:
        """Twins of the Refs by identity, and the carried values."""
        values, arrays = carried
        placed = self.placed(refs, arrays)
        fresh = [dataclasses.replace(s, written=False, slack=r.slack) for r, s in zip(refs, self.refs)]
        twins = {id(r): r.copy(a, s) for r, a, s in zip(refs, placed, fresh)}
        return twins, [Value(x, k, m) for x, k, m in zip(values, self.kinds, self.multiples)]

    def changed(self, twins: dict[int, Ref]) -> list[Any]:
        """Arrays of the Refs that are carried, after the body."""
        return [t.array for t, s in zip(twins.values(), self.refs) if s.written]

    def finish(self, refs: Sequence[Ref], final: Any) -> list[Value]:
        """Put the carried arrays back; the carried values."""
        values, arrays = final
        self.finish_memory(refs, self.placed(refs, arrays))
        return [Value(x, k, m) for x, k, m in zip(values, self.kinds, self.multiples)]

    def finish_memory(self, refs: Sequence[Ref], arrays: Sequence[Any]) -> None:
        for ref, state, array in zip(refs, self.refs, arrays):
            ref.array, ref.kind, ref.written = array, state.kind, ref.written or state.written


def found_by(trace: Callable[[Known], tuple[Any, ...]], known: Known) -> Known:
    """What a trace on shapes alone finds."""
    seen: list[Known] = []

    def shapes() -> int:
        seen.extend(part for part in trace(known) if isinstance(part, Known))
        return 0

    jax.eval_shape(shapes)
    return seen[0]


def settle(known: Known, refs: Sequence[Ref], trace: Callable[[Known], tuple[Any, ...]]) -> Known:
    """What holds in every turn of a loop: traced until nothing new is found."""
    while (merged := known | found_by(trace, known)) != known:
        known = merged
        known.widen(refs)
    return known
