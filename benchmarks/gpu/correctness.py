"""Every kernel against float64 NumPy, on the device at hand."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

from benchmarks.cases import Case
from normlib.kernels.machine import Machine

REFUSALS = (RuntimeError, ValueError, NotImplementedError, TypeError)
T = TypeVar("T")


def spread(items: Sequence[T], step: int = 29) -> Iterator[T]:
    """All items, far apart ones first: what is reached before the time is over covers all kinds."""
    for first in range(step):
        yield from items[first::step]


def compiled(pool: ThreadPoolExecutor, fn: Callable[..., Any], structs: Sequence[Any]) -> Future:
    """`fn`, being compiled for operands like `structs` by a thread of `pool`."""

    def build() -> Any:
        return jax.jit(fn).lower(*structs).compile()

    return pool.submit(build)


def correctness(machine: Machine, chosen: Sequence[Case], until: float, threads: int = 8) -> list[dict[str, Any]]:
    """One row a case: the largest error in units of its bound, and how long it waited, ran and was compared."""
    rows: list[dict[str, Any]] = []
    pool = ThreadPoolExecutor(threads)
    programs = [compiled(pool, functools.partial(case.call, machine), case.structs()) for case in chosen]
    try:
        for case, program in zip(chosen, programs):
            if time.perf_counter() > until:
                break
            rows.append(_checked(case, program))
            if not rows[-1]["ok"]:
                print(f"WRONG {case.name}: {rows[-1]['error']:.2f} times the bound {rows[-1]['reason']}", flush=True)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return rows


def _checked(case: Case, program: Future) -> dict[str, Any]:
    begin, arrays = time.perf_counter(), case.arrays()
    error, reason = float("inf"), ""
    try:
        error = case.error(arrays, jax.device_get(program.result()(*arrays)))
    except REFUSALS as problem:
        reason = " ".join(str(problem).split())[:400]
    seconds = time.perf_counter() - begin
    return {"kernel": case.name, "ok": error <= 1, "error": error, "seconds": seconds, "reason": reason}
