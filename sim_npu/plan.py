"""Tiling plans: how much of a row, how many rows, how deep the queues, on how many cores.

A function is *tunable* if it takes a keyword `plan`; it then reads `plan.rows`, `plan.chunk` and
`plan.residency` to choose its blocks. The rest (queue depth, cores) is applied by the simulator, so any kernel
can be tried with other depths and core counts.
"""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RESIDENCY = ("row", "stream")


@dataclass(frozen=True)
class TilePlan:
    """A tiling.

    Attributes:
      rows: rows (or channels) per block; None leaves it to the kernel.
      chunk: elements of a row handled at a time; None for the whole row, or the kernel's choice.
      queue_depth: buffers per moving block; 2 is double buffering.
      cores: at most so many; None for all.
      residency: "row" keeps a whole row in the unified buffer, "stream" reads it in chunks, twice.
      in_place: let an operation's result take the place of an operand that is not needed again.
      bank_pad: move every second tile by half a row of banks, so that operands do not collide.

    >>> TilePlan(rows=8, queue_depth=1).describe()
    'rows 8, depth 1'

    Raises:
      ValueError: when a value is out of range.
    """

    rows: int | None = None
    chunk: int | None = None
    queue_depth: int = 2
    cores: int | None = None
    residency: str | None = None
    in_place: bool = True
    bank_pad: bool = True

    def __post_init__(self) -> None:
        for name in ("rows", "chunk", "cores"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                raise ValueError(
                    f"`{name}` of a TilePlan must be a whole number of at least 1, or None; got {value!r}."
                )
        if not _is_count(self.queue_depth):
            raise ValueError(
                f"`queue_depth` of a TilePlan must be a whole number of at least 1; got {self.queue_depth!r}."
            )
        for name in ("in_place", "bank_pad"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` of a TilePlan must be True or False; got {getattr(self, name)!r}.")
        if self.residency not in (None, *RESIDENCY):
            raise ValueError(f"`residency` of a TilePlan must be one of {RESIDENCY} or None; got {self.residency!r}.")

    def replace(self, **changes: Any) -> TilePlan:
        """A plan with some fields changed."""
        return dataclasses.replace(self, **changes)

    def describe(self) -> str:
        """The plan in a few words."""
        words = []
        if self.rows is not None:
            words.append(f"rows {self.rows}")
        if self.chunk is not None:
            words.append(f"chunk {self.chunk}")
        words.append(f"depth {self.queue_depth}")
        if self.cores is not None:
            words.append(f"{self.cores} cores")
        if self.residency is not None:
            words.append({"row": "row resident", "stream": "row streamed"}[self.residency])
        if not self.in_place:
            words.append("no in-place")
        if not self.bank_pad:
            words.append("no bank padding")
        return ", ".join(words)

    def tiling(self) -> TilePlan:
        """The part of the plan the kernel itself reads; two plans of equal tiling are one traced kernel."""
        return TilePlan(rows=self.rows, chunk=self.chunk, residency=self.residency)


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def is_tunable(fn: Callable) -> bool:
    """Whether `fn` takes a keyword `plan`."""
    try:
        return "plan" in inspect.signature(fn).parameters
    except ValueError:  # built-in callables have no signature
        return False


def enumerate_plans(fn: Callable, *args: Any, depths: tuple[int, ...] = (1, 2, 3)) -> tuple[TilePlan, ...]:
    """Plans to try for `fn(*args)`: its own tilings (`fn.plan_space`) times queue depths.

    A function without `plan_space` keeps its blocks, and only the depth varies.
    """
    space = getattr(fn, "plan_space", None)
    tilings = tuple(space(*args)) if space is not None and is_tunable(fn) else (TilePlan(),)
    return tuple(t.replace(queue_depth=d) for t in tilings for d in depths)
