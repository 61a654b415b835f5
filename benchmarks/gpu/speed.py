"""The large kernels in turns with XLA's version and a copy of the same bytes."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.cases import Case
from normlib.kernels.machine import Machine

ROUNDS = 11
ROUND_SECONDS = 0.01


def medians(
    calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS, least: float = ROUND_SECONDS
) -> dict[str, float]:
    """Median seconds of each call, the calls taking turns, so that all see the same clock and neighbours."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        jax.block_until_ready(call())  # compiled
        begin = time.perf_counter()
        jax.block_until_ready(call())
        repeats[name] = max(1, int(least / max(time.perf_counter() - begin, 1e-6)))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(repeats[name]):
                out = call()
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - begin) / repeats[name])
    return {name: statistics.median(t) for name, t in times.items()}


def speed(machine: Machine, case: Case, **options: Any) -> dict[str, Any]:
    """Times in microseconds, GB/s of the bytes that must move, ratios to XLA and to the copy."""
    assert case.base is not None  # only such cases are timed
    arrays = case.on_device()
    kernel, base = jax.jit(functools.partial(case.call, machine)), jax.jit(case.base)
    moved = sum(t.nbytes for t in (*arrays, *kernel(*arrays)))
    block = jax.random.normal(jax.random.key(1), (max(moved // 8, 1),))  # read and written: as many bytes
    copy = jax.jit(lambda t: -t)
    took = medians(
        {"kernel": lambda: kernel(*arrays), "xla": lambda: base(*arrays), "copy": lambda: copy(block)}, **options
    )
    return {
        "kernel": case.name, "bytes": moved, **{f"{name}_us": t * 1e6 for name, t in took.items()},
        "gb_per_s": moved / took["kernel"] / 1e9, "xla_over_kernel": took["xla"] / took["kernel"],
        "copy_over_kernel": took["copy"] / took["kernel"],
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A row of the table under `HEADER`."""
    return (
        f"{row['kernel']:34} {row['kernel_us']:9.1f} {row['xla_us']:9.1f} {row['copy_us']:9.1f} "
        f"{row['gb_per_s']:7.0f} {row['xla_over_kernel']:10.2f} {row['copy_over_kernel']:11.2f}"
    )


HEADER = f"{'kernel':34} {'us':>9} {'XLA us':>9} {'copy us':>9} {'GB/s':>7} {'XLA/kernel':>10} {'copy/kernel':>11}"
