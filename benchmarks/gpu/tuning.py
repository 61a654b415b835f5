"""Which tile, how many warps and parts each large kernel is fastest with."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks.cases import Case, large_cases
from benchmarks.gpu.correctness import REFUSALS, compiled
from benchmarks.gpu.speed import medians
from normlib.kernels.machine import Machine

Settings = dict[str, int]


def space(case: Case) -> Iterator[Settings]:
    """Settings of the machine worth trying for a case."""
    kind = case.name.split("/")[0]
    if kind.startswith(("column", "image")):
        for lanes, entries, parts, warps in itertools.product(
            (64, 128, 256), (2048, 4096, 8192), (264, 1056), (4, 8)
        ):  # fmt: skip
            if kind != "image_moments" or lanes == 64:
                yield {"column_lanes": lanes, "entries": entries, "parts": parts, "num_warps": warps}
        return
    for entries, warps in itertools.product((1024, 2048, 4096, 8192, 16384), (2, 4, 8, 16)):
        if 4 <= entries // (32 * warps) <= 64:
            yield {"entries": entries, "num_warps": warps}


def run(machine: Machine, dry: bool, until: float) -> dict[str, Any]:
    """The fastest settings of every large case, with the time of the present ones."""
    todo = list(large_cases(fewer=8192, shorter=64))[:2] if dry else list(large_cases())
    options: dict[str, Any] = {"rounds": 1, "least": 0.0} if dry else {"rounds": 5, "least": 0.003}
    found: list[dict[str, Any]] = []
    pool = ThreadPoolExecutor(8)
    try:
        jobs = []
        for case in todo:
            settings = [{}, *list(space(case))[: 1 if dry else None]]
            structs = case.structs()
            programs = [
                compiled(pool, functools.partial(case.call, machine.replace(**s)), structs) for s in settings
            ]  # fmt: skip
            jobs.append((case, settings, programs))
        for case, settings, programs in jobs:
            if time.perf_counter() > until:
                break
            found += _timed(case, settings, programs, options)
            print(_best(case.name, found), flush=True)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return {"tuning": found}


def _timed(case: Case, settings: list[Settings], programs: list[Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    arrays = case.on_device()
    rows = []
    for setting, program in zip(settings, programs):
        us = math.inf
        try:
            call = program.result()
            us = 1e6 * medians({"t": lambda: call(*arrays)}, **options)["t"]  # noqa: B023
        except REFUSALS as problem:
            print(f"{case.name} {setting}: {' '.join(str(problem).split())[:150]}", flush=True)
        rows.append({"kernel": case.name, **setting, "us": us})
    jax.block_until_ready(arrays)
    return rows


def _best(name: str, found: list[dict[str, Any]]) -> str:
    mine = [r for r in found if r["kernel"] == name]
    best = sorted(mine, key=lambda r: r["us"])[:3]
    texts = [" ".join(f"{k}={v}" for k, v in r.items() if k not in ("kernel", "us")) + f": {r['us']:.1f}" for r in best]
    return f"{name:34} now {mine[0]['us']:8.1f} us; " + "; ".join(texts)
