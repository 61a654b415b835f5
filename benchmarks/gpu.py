"""The tile kernels on a GPU: are they right, and how fast beside XLA and a copy of the same bytes.

First every kernel against float64 NumPy, then the large ones in turns with XLA's version and a device copy: medians of
rounds, so that all three see the same clock and the same neighbours. Ends within the time given (five minutes), and
says what it did not reach. A TPU works too.

usage: python -m benchmarks.gpu [--seconds 300] [--json FILE]
       python -m benchmarks.gpu --dry-run      tiny shapes, interpreted on CPU: checks the script, measures nothing
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import Case, cases, large_cases
from normlib.kernels.machine import MACHINES, Machine

ROUNDS = 15
ROUND_SECONDS = 0.01


def spread(items: Sequence[Case], step: int = 29) -> Iterator[Case]:
    """All items, far apart ones first: what is reached before the time is over covers all kinds."""
    for first in range(step):
        yield from items[first::step]


def correctness(machine: Machine, chosen: Sequence[Case], until: float) -> list[dict[str, Any]]:
    """One row a case: the largest error in units of its bound, and how long it took to compile and run."""
    rows = []
    for case in chosen:
        if time.perf_counter() > until:
            break
        begin, arrays = time.perf_counter(), case.arrays()
        error, reason = float("inf"), ""
        try:
            found = jax.jit(functools.partial(case.call, machine))(*arrays)
            error = case.error(arrays, jax.device_get(found))
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as problem:
            reason = " ".join(str(problem).split())[:200]
        seconds = time.perf_counter() - begin
        rows.append({"kernel": case.name, "ok": error <= 1, "error": error, "seconds": seconds, "reason": reason})
        if error > 1:
            print(f"WRONG {case.name}: {error:.2f} times the bound {reason}", flush=True)
    return rows


def medians(
    calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS, least: float = ROUND_SECONDS
) -> dict[str, float]:
    """Median seconds of each call, the calls taking turns."""
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
    """Times in microseconds, GB/s of the bytes that must move, ratios to XLA and to the copy; the error too."""
    assert case.base is not None  # only such cases are timed
    host = case.arrays()
    arrays = [jnp.asarray(t) for t in host]
    kernel, base = jax.jit(functools.partial(case.call, machine)), jax.jit(case.base)
    results = kernel(*arrays)
    error = case.error(host, jax.device_get(results))
    moved = sum(t.nbytes for t in (*arrays, *results))
    block = jnp.zeros(moved // 2, jnp.int8)  # read and written: as many bytes as the kernel moves
    copy = jax.jit(lambda t: t ^ jnp.int8(1))
    took = medians(
        {"kernel": lambda: kernel(*arrays), "xla": lambda: base(*arrays), "copy": lambda: copy(block)}, **options
    )
    return {
        "kernel": case.name, "ok": error <= 1, "error": error, "bytes": moved,
        **{f"{name}_us": t * 1e6 for name, t in took.items()}, "gb_per_s": moved / took["kernel"] / 1e9,
        "xla_over_kernel": took["xla"] / took["kernel"], "copy_over_kernel": took["copy"] / took["kernel"],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    begin = time.perf_counter()
    platform = jax.default_backend()
    if args.dry_run:
        machine = MACHINES["gpu"].replace(interpret=True)
        small, large, options = list(cases())[::101], list(large_cases(scale=64))[::5], {"rounds": 1, "least": 0.0}
    elif platform in ("gpu", "tpu"):
        machine = MACHINES[platform]
        small, large, options = list(spread(list(cases()))), list(large_cases()), {}
        if platform == "tpu":
            small = [c for c in small if all(d != jnp.float16 for _, d in c.shapes)]
    else:
        raise SystemExit(f"no GPU here (JAX runs on {platform}); --dry-run checks the script on CPU")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}{', dry run' if args.dry_run else ''}")
    checked = correctness(machine, small, begin + args.seconds * 0.55)
    right = sum(row["ok"] for row in checked)
    print(f"{right} of {len(checked)} kernels right; {len(small) - len(checked)} not reached in time")
    print(f"{'kernel':34} {'us':>9} {'XLA us':>9} {'copy us':>9} {'GB/s':>7} {'XLA/kernel':>10} {'copy/kernel':>11}")
    timed = []
    for case in large:
        if time.perf_counter() - begin > args.seconds * 0.92:
            break
        row = speed(machine, case, **options)
        timed.append(row)
        print(
            f"{row['kernel']:34} {row['kernel_us']:9.1f} {row['xla_us']:9.1f} {row['copy_us']:9.1f} "
            f"{row['gb_per_s']:7.0f} {row['xla_over_kernel']:10.2f} {row['copy_over_kernel']:11.2f}"
            f"{'' if row['ok'] else '  WRONG'}", flush=True,
        )  # fmt: skip
    report = {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__, "dry_run": args.dry_run,
        "seconds": time.perf_counter() - begin, "correctness": checked, "speed": timed,
        "not_reached": [case.name for case in (*small[len(checked) :], *large[len(timed) :])],
    }  # fmt: skip
    if timed:
        print(f"geometric mean XLA/kernel {np.exp(np.mean([np.log(r['xla_over_kernel']) for r in timed])):.2f}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    found = main()
    raise SystemExit(0 if all(row["ok"] for row in (*found["correctness"], *found["speed"])) else 1)
