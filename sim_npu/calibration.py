"""Fitting and judging: the split of measured rows, two-parameter fits, and the kernels that stand for the operators.

The rule of the split is fixed: odd cases fit, even cases are held out. Of two operators only odd cases were
published (GroupNorm, BatchNormGradV3); there the position in the published list takes the place of the number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim_npu import demos
from sim_npu.builder import Builder
from sim_npu.chips import ChipSpec, get_chip
from sim_npu.demos import published_grad, published_group
from sim_npu.fitting import Prior, choose_strength, fit_terms, leave_one_out
from sim_npu.footprint import CapacityError
from sim_npu.ir import TileProgram, dtype_bytes
from sim_npu.measured import OPERATORS, AddCase, Measured
from sim_npu.plan import TilePlan
from sim_npu.profiles import Shipped, core_and_bytes
from sim_npu.result import SimReport
from sim_npu.search import rank_plans
from sim_npu.simulate import simulate

SETUP_US = 3.0  # scalar set-up of a kernel: 2.6 to 3.3 µs in the 910B4 samples
KERNELS = {"rms_norm": demos.rms_norm, "group_norm": demos.group_norm, "batch_norm_grad_v3": demos.channel_grad}


@dataclass(frozen=True)
class Row:
    """A measured case with the model's times, µs: best plan, shipped tiling, and that without launch.

    `moved` is every byte of the kernel's arrays once, `bytes` those of the large arrays (the naive formula's).
    """

    case: Measured
    fitted: bool
    ideal: float
    tiled: float
    core: float
    moved: float
    bytes: float


def is_fit(case: Measured, cases: Sequence[Measured] = OPERATORS) -> bool:
    """Whether a case belongs to the fit rows.

    >>> [is_fit(c) for c in OPERATORS[:3]]
    [True, False, True]
    """
    same = [c for c in cases if (c.chip, c.op) == (case.chip, case.op)]
    if all(c.case % 2 for c in same):
        return same.index(case) % 2 == 0
    return case.case % 2 == 1


def naive_bytes(case: Measured) -> float:
    """Each array once: x and y; dy, x and dx of a gradient in training, dy and dx of one in inference."""
    return math.prod(case.shape) * dtype_bytes(case.dtype) * (3 if dict(case.attrs).get("training") else 2)


def arguments(case: Measured) -> tuple[Any, tuple, dict[str, Any]]:
    """(kernel, arrays, keywords) that compute what was measured."""
    attrs = dict(case.attrs)
    if case.op == "batch_norm_grad_v3" and not attrs.pop("training"):
        return demos.channel_scale, demos.channel_scale.example_arrays(case.shape, case.dtype), {}  # type: ignore[attr-defined]
    fn = KERNELS[case.op]
    return fn, fn.example_arrays(case.shape, case.dtype), attrs  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=256)
def ideal_report(case: Measured, chip: ChipSpec | None = None) -> SimReport:
    """The best plan of double-buffered tilings for a measured case; `chip` replaces the preset."""
    fn, arrays, attrs = arguments(case)
    plans = [TilePlan(), *fn.plan_space(*arrays)]
    return rank_plans(fn, *arrays, chip=chip or case.chip, plans=plans, **attrs).best


def shipped_tiling(case: Measured) -> tuple[TilePlan, dict[str, Any]] | None:
    """The tiling (and keywords of our kernel) the measured operator is documented to use, or None: then the best plan.

    RmsNorm on A2 (ops-nn tiling templates): D up to 2000 merges UB / (16 D + 260) rows per loop, longer rows go one by
    one; neither overlaps copies with work. GroupNorm on A2 runs the kernel of GroupNormSilu (ops-nn, `aclnnGroupNorm`):
    8192 elements at a time, E[x²] - mean². Of GroupNorm and BatchNormGradV3 on 950 see `shipped_program`; RmsNorm's
    templates there leave the model's choice.
    """
    if case.chip != "910b2":
        return None
    if case.op == "group_norm":
        return TilePlan(chunk=8192, residency="stream"), {"about_first": False}
    d = -(-case.shape[-1] // 16) * 16
    if d > 2000:
        return TilePlan(rows=1, residency="row", queue_depth=1), {}
    merged = get_chip(case.chip).ub_bytes // (16 * d + 260)
    return TilePlan(rows=max(1, merged), residency="row", queue_depth=1), {}


def published_program(case: Measured, chip: ChipSpec | None = None) -> TileProgram | None:
    """The published kernel of a measured case on 950, laid out queue by queue; None for RmsNorm and A2."""
    spec, attrs = chip or get_chip(case.chip), dict(case.attrs)
    if case.chip != "950" or case.op == "rms_norm":
        return None
    if case.op == "group_norm":
        return published_group.group_norm(case.shape, case.dtype, spec, groups=attrs["groups"])
    grad = published_grad.channel_grad if attrs["training"] else published_grad.channel_scale
    return grad(case.shape, case.dtype, spec)


def shipped_program(case: Measured, chip: ChipSpec | None = None) -> TileProgram | None:
    """The published kernel that stands for a measured case, or None: then its tiling.

    A published template stands unless the fit rows speak against it: they do for both templates of GroupNorm and for
    `infer` with channels first (docs/simulator_validation.md has the figures).
    """
    training, last = dict(case.attrs).get("training"), len(case.shape) == 2
    stands = case.op == "batch_norm_grad_v3" and (training or last)
    return published_program(case, chip) if stands else None


@functools.lru_cache(maxsize=256)
def shipped_report(case: Measured, chip: ChipSpec | None = None) -> SimReport:
    """The published kernel of a measured case, or its tiling: rows or chunk are halved until our kernel fits."""
    program = shipped_program(case, chip)
    if program is not None:
        return simulate(program, chip=chip or case.chip, plan=TilePlan(bank_pad=False))
    tiling = shipped_tiling(case)
    if tiling is None:
        return ideal_report(case, chip)
    fn, arrays, attrs = arguments(case)
    plan, keywords = tiling
    while True:
        try:
            return simulate(fn, *arrays, chip=chip or case.chip, plan=plan, explain_capacity=False, **attrs, **keywords)
        except CapacityError:
            if plan.rows == 1:
                raise
            plan = plan.replace(chunk=plan.chunk // 2) if plan.chunk else plan.replace(rows=(plan.rows or 2) // 2)


def model_rows(cases: Sequence[Measured] = OPERATORS) -> list[Row]:
    """Every case with the model's times."""
    rows = []
    for case in cases:
        shipped = shipped_report(case)
        core, moved = core_and_bytes(shipped.kernels)
        ideal = ideal_report(case).total_us
        rows.append(Row(case, is_fit(case), ideal, shipped.total_us, core, moved, naive_bytes(case)))
    return rows


def constants_loss(chip: ChipSpec, preset: str) -> float:
    """What a chip's constants are fitted by: leave-one-out error of `as_shipped` on the fit rows, mean of operators.

    Each operator has its own launch, factor and µs/MB, so the constants of the chip answer for what varies with shape.
    """
    points: dict[str, list[tuple[list[float], float]]] = {}
    for case in (c for c in OPERATORS if c.chip == preset and is_fit(c)):
        core, moved = core_and_bytes(shipped_report(case, chip).kernels)
        points.setdefault(case.op, []).append(([1.0, core, moved / 1e6], case.us))
    errors = []
    for rows in points.values():
        x, y = np.array([a for a, _ in rows]), np.array([b for _, b in rows])
        prior = shipped_prior(preset)
        errors.append(leave_one_out(x, y, prior, choose_strength(x, y, prior)))
    return float(np.mean(errors))


def terms(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """The terms of `as_shipped` `[rows, 3]` (1, core µs, MB) and the measured times, µs."""
    return np.array([[1.0, r.core, r.moved / 1e6] for r in rows]), np.array([r.case.us for r in rows])


def shipped_prior(chip: str) -> Prior:
    """As shipped equals ideal; one more set-up, a factor of 2, the bytes once more at the L2 rate are one step away."""
    spec = get_chip(chip)
    launch = spec.launch_us + spec.core_start_us
    return Prior(np.array([launch, 1.0, 0.0]), np.array([SETUP_US, 1.0, 1e3 / spec.l2_gbps]))


def refit(rows: Sequence[Row]) -> dict[tuple[str, str], Shipped]:
    """The table of `sim_npu.profiles`, from the fit rows."""
    table = {}
    for chip, op in dict.fromkeys((r.case.chip, o) for r in rows for o in ("", r.case.op)):
        x, y = terms([r for r in rows if r.fitted and r.case.chip == chip and op in ("", r.case.op)])
        prior = shipped_prior(chip)
        strength = choose_strength(x, y, prior)
        launch, factor, per_mb = (float(t) for t in fit_terms(x, y, prior, strength))
        table[chip, op] = Shipped(round(launch, 4), round(factor, 4), round(per_mb, 4), strength)
    return table


def add_program(elements: int, tile: int, depth: int, adds: int = 1) -> TileProgram:
    """The vector add of the samples: z = x + y (`adds` times) tile by tile, float16."""
    b = Builder("add", grid=(elements // tile,))
    x = b.queue_in("x", (tile,), "float16", depth=depth, array=(elements,))
    y = b.queue_in("y", (tile,), "float16", depth=depth, array=(elements,))
    z = b.queue_out("z", (tile,), "float16", depth=depth, array=(elements,))
    b.data_copy(x)
    b.data_copy(y)
    for _ in range(adds):
        b.vector("Add", z, x, y)
    b.data_copy(z)
    return b.build()


def add_report(case: AddCase) -> SimReport:
    """The model of one add sample. The samples fill all 192 KiB, so the 256 B reserved on A2 are given back."""
    chip = get_chip(case.chip).replace(ub_bytes=194 * 1024)
    plan = TilePlan(queue_depth=case.depth, cores=case.cores, bank_pad=case.bank_free)
    program = add_program(case.elements, case.tile, case.depth, case.adds)
    return simulate(program, chip=chip, plan=plan, cache="bypass" if case.bypass else "cold")


def mean_error(model: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of |model / measured - 1|."""
    return float(np.mean(np.abs(np.asarray(model) / np.asarray(measured) - 1.0))) if len(measured) else math.nan


def log_correlation(model: Sequence[float], measured: Sequence[float]) -> float:
    """Pearson correlation of logarithms."""
    if len(measured) < 2:
        return math.nan
    return float(np.corrcoef(np.log(np.asarray(model)), np.log(np.asarray(measured)))[0, 1])
