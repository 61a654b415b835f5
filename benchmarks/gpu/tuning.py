"""Which tile, how many warps and parts each large kernel is fastest with."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax

from benchmarks.cases import Case, large_cases
from benchmarks.gpu.correctness import REFUSALS, compiled
from benchmarks.gpu.speed import medians
from normlib.kernels.machine import Machine

Settings = dict[str, int]


def space(case: Case) -> Iterator[Settings]:
    """Settings of the machine worth trying for a case."""
    kind = kind_of(case.name)
    if kind == "columns":
        for lanes, rows, entries, parts in itertools.product((32, 64, 128), (64, 128, 256), (1024, 2048), (264, 528)):
            if 4096 <= lanes * rows <= 16384:
                yield {"column_lanes": lanes, "column_rows": rows, "column_warp_entries": entries, "parts": parts}
        return
    for entries, each in itertools.product((2048, 4096, 8192, 16384), (256, 512, 1024, 2048)):
        for parts in (264, 528, 1056) if kind == "grads" else (0,):
            if 2 <= entries // each <= 16:
                yield {"entries": entries, "warp_entries": each} | ({"parts": parts} if parts else {})


def kind_of(name: str) -> str:
    """Which settings a kernel shares with others: "columns", "grads" (sums over rows collected), "grad" or "rows"."""
    kernel = name.split("/")[0]
    if kernel.startswith(("column", "image")):
        return "columns"
    return {"layer_norm_grads": "grads", "layer_norm_grad": "grad"}.get(kernel, "rows")


def chosen(found: list[dict[str, Any]]) -> dict[str, Settings]:
    """The settings of each kind with the least geometric mean of time over the best, among those tried everywhere."""
    kinds: dict[str, dict[Any, dict[str, float]]] = {}
    for row in found:
        settings = tuple((k, v) for k, v in row.items() if k not in ("kernel", "us"))
        if settings and not row["kernel"].startswith("channel"):
            kinds.setdefault(kind_of(row["kernel"]), {}).setdefault(settings, {})[row["kernel"]] = row["us"]
    best: dict[str, Settings] = {}
    for kind, table in kinds.items():
        names = {name for times in table.values() for name in times}
        least = {name: min(t[name] for t in table.values() if name in t) for name in names}
        whole = {s: t for s, t in table.items() if len(t) == len(names) and math.inf not in t.values()}
        loss = {s: statistics.fmean(math.log(t[n] / least[n]) for n in names) for s, t in whole.items()}
        for settings in sorted(loss, key=loss.__getitem__)[:3]:
            worst = max(table[settings][n] / least[n] for n in names)
            print(
                f"{kind}: {dict(settings)}: {math.exp(loss[settings]):.3f} of the best in the mean, {worst:.2f} at most"
            )
        if loss:
            best[kind] = dict(min(loss, key=lambda s: loss[s]))
    return best


def run(machine: Machine, dry: bool, until: float) -> dict[str, Any]:
    """The fastest settings of every large case, with the time of the present ones."""
    todo = list(large_cases(fewer=8192, shorter=64))[:2] if dry else list(large_cases())
    options: dict[str, Any] = {"rounds": 1, "least": 0.0} if dry else {"rounds": 5, "least": 0.002}
    found: list[dict[str, Any]] = []
    pool = ThreadPoolExecutor(16)
    try:
        jobs = []
        for case in todo:
            settings = [{}, *list(space(case))[: 1 if dry else None]]
            structs = case.structs()
            programs = [
                compiled(pool, functools.partial(case.call, machine.replace(**s)), structs) for s in settings
            ]  # fmt: skip
            jobs.append((case, settings, programs))
        wait([p for *_, programs in jobs for p in programs], timeout=max(until - time.perf_counter(), 0))
        for case, settings, programs in jobs:
            if time.perf_counter() > until:
                break
            found += _timed(case, settings, programs, options)
            print(_best(case.name, found), flush=True)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return {"tuning": found, "chosen": chosen(found)}


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
