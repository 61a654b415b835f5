"""Choosing among plans: the fastest, the whole ranking, and why one plan is what it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sim_npu.arguments import deepest, shapes_of
from sim_npu.chips import ChipSpec, get_chip
from sim_npu.footprint import CapacityError
from sim_npu.hints import hints
from sim_npu.plan import TilePlan, enumerate_plans
from sim_npu.result import SimReport
from sim_npu.simulate import Kernel, programs_of, simulate


@dataclass(frozen=True)
class PlanSearch:
    """Plans of one call, fastest first.

    Attributes:
      reports: one per plan that fits.
      rejected: plans that do not fit, with the reason.
    """

    reports: tuple[SimReport, ...]
    rejected: tuple[tuple[TilePlan, str], ...]

    @property
    def best(self) -> SimReport:
        """The fastest plan's report."""
        return self.reports[0]

    def table(self, top: int = 10) -> str:
        """The `top` fastest plans as text.

        Raises:
          ValueError: if `top` is not positive.
        """
        if top < 1:
            raise ValueError(f"`top` must be at least 1; got {top}.")
        lines = [f"{'us':>10}  {'MTE2':>6} {'V':>6} {'MTE3':>6}  {'UB':>5}  plan"]
        for report in self.reports[:top]:
            k = max(report.kernels, key=lambda k: k.total_us)
            ratios = " ".join(f"{k.ratio(u):6.0%}" for u in ("MTE2", "V", "MTE3"))
            lines.append(
                f"{report.total_us:10.2f}  {ratios}  {k.ub.used / k.ub.capacity:5.0%}  {report.plan.describe()}"
            )
        if self.rejected:
            lines.append(f"{len(self.rejected)} plans do not fit the unified buffer")
        return "\n".join(lines)


def rank_plans(
    fn: Callable,
    *args: Any,
    chip: str | ChipSpec = "910b2",
    plans: Sequence[TilePlan] | None = None,
    cache: str = "warm",
    **kwargs: Any,
) -> PlanSearch:
    """Every plan of `plans` (by default the function's own space times queue depths), simulated and sorted.

    Raises:
      CapacityError: if no plan fits, or `plans` is empty; the text is that of the last one tried.
      ValueError: if `plans` holds something else, and as `simulate`.
    """
    if plans is None:
        programs_of(fn, *args, **kwargs)  # mistakes in the arguments are told before tilings are made of them
        limit = deepest(get_chip(chip))
        plans = [p for p in enumerate_plans(fn, *shapes_of(args)) if p.queue_depth <= limit]
    plans = plans if isinstance(plans, TilePlan) else list(plans)
    if isinstance(plans, TilePlan) or not all(isinstance(p, TilePlan) for p in plans):
        raise ValueError(f"`plans` must be TilePlans, at least one; got {plans!r}.")
    if not plans:
        raise CapacityError("`plans` must be TilePlans, at least one; got none, so none fits.")
    reports, rejected = [], []
    for plan in plans:
        try:
            reports.append(simulate(fn, *args, chip=chip, plan=plan, cache=cache, explain_capacity=False, **kwargs))
        except CapacityError as error:
            rejected.append((plan, str(error)))
    if not reports:
        simulate(fn, *args, chip=chip, plan=plans[-1], cache=cache, **kwargs)  # says what would fit
    return PlanSearch(tuple(sorted(reports, key=lambda r: r.total_us)), tuple(rejected))


def best_plan(
    fn: Callable,
    *args: Any,
    chip: str | ChipSpec = "910b2",
    plans: Sequence[TilePlan] | None = None,
    cache: str = "warm",
    **kwargs: Any,
) -> TilePlan:
    """The fastest plan that fits.

    >>> from sim_npu import demos
    >>> best_plan(demos.rms_norm, ((4096, 1024), "float16"), ((1024,), "float16")).queue_depth > 1
    True
    """
    return rank_plans(fn, *args, chip=chip, plans=plans, cache=cache, **kwargs).best.plan


def explain(
    fn: Kernel,
    *args: Any,
    chip: str | ChipSpec = "910b2",
    plan: TilePlan | None = None,
    profile: str = "ideal",
    cache: str = "warm",
    **kwargs: Any,
) -> str:
    """Why a plan takes the time it takes, and what would change it, in a few sentences; arguments as `simulate`."""
    report = simulate(fn, *args, chip=chip, plan=plan, profile=profile, cache=cache, **kwargs)
    lines = []
    for k in report.kernels:
        name, bound = k.limit
        lines.append(
            f"{k.name} takes {k.total_us:.2f} us on {k.schedule.cores} cores: {k.launch_us:.2f} us launch, "
            f"{k.core_us:.2f} us work. The {name} bound is {bound:.2f} us, so it runs at {k.fraction:.0%} of the speed "
            f"of light. {k.bottleneck} is busiest ({k.ratio(k.bottleneck):.0%} of the time)."
        )
        tenants = ", ".join(f"{t.name} {t.total / 1024:.0f} KiB" for t in k.ub.biggest())
        lines.append(f"  UB: {k.ub.used / 1024:.0f} of {k.ub.capacity / 1024:.0f} KiB, mostly {tenants}.")
    for hint in hints(fn, *args, chip=chip, plan=plan, report=report, cache=cache, **kwargs):
        lines.append(f"  {hint}")
    return "\n".join(lines)


def compare(reports: Sequence[SimReport]) -> str:
    """Reports side by side; changes are against the first.

    Raises:
      ValueError: for an empty list, or something that is no report.
    """
    if isinstance(reports, SimReport) or not (reports := list(reports)):
        raise ValueError(f"`reports` must be a list of reports, at least one; got {type(reports).__name__}.")
    for i, r in enumerate(reports):
        if not isinstance(r, SimReport):
            raise ValueError(f"`reports[{i}]` must be a SimReport, as `simulate` returns; got {r!r}.")
    first = reports[0].total_us
    lines = [f"{'us':>10} {'change':>8}  {'bytes MB':>9} {'MTE2':>6} {'V':>6} {'MTE3':>6}  what"]
    for r in reports:
        busy = {
            u: sum(k.busy_us[u] for k in r.kernels) / sum(k.core_us for k in r.kernels) for u in ("MTE2", "V", "MTE3")
        }
        ratios = " ".join(f"{busy[u]:6.0%}" for u in busy)
        what = f"{r.name} on {r.chip.name}, {r.plan.describe()}, {r.profile}, {r.cache}"
        lines.append(f"{r.total_us:10.2f} {r.total_us / first - 1:+8.1%}  {r.bytes / 1e6:9.2f} {ratios}  {what}")
    return "\n".join(lines)
