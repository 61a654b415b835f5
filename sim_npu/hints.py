"""What to change next: each hint is a plan, chip-independent advice or a known trap, with its gain simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim_npu.arguments import plan_for, shapes_of
from sim_npu.chips import ChipSpec, get_chip
from sim_npu.footprint import CapacityError, moves
from sim_npu.ir import TileProgram, VecOp, dtype_bytes, walk
from sim_npu.plan import TilePlan, is_tunable
from sim_npu.result import KernelResult, SimReport
from sim_npu.simulate import Kernel, simulate

GOOD_COPY = 16 * 1024  # bytes from which a copy reaches good bandwidth, AscendC manual


# What a field of a plan is called in articles about tuning Ascend operators.
KNOBS = {
    "queue_depth": "enable_double_buffer",
    "in_place": "enable_inplace",
    "cores": "scheduler_policy=balanced",
    "rows": "reduce_unit_size",
    "chunk": "reduce_unit_size",
    "residency": "reduce_unit_size",
}


@dataclass(frozen=True)
class Hint:
    """Advice: what to do, what it saves (µs, simulated; 0 where it was not), the plan, if it is one, and what articles
    call the knob that it turns, if they do."""

    text: str
    gain_us: float
    plan: TilePlan | None = None
    knob: str | None = None

    def __str__(self) -> str:
        return self.text if self.knob is None else f"{self.text} [{self.knob}]"


def hints(
    fn: Kernel,
    *args: Any,
    chip: str | ChipSpec = "910b2",
    plan: TilePlan | None = None,
    report: SimReport | None = None,
    cache: str = "warm",
    profile: str = "ideal",
    **kwargs: Any,
) -> list[Hint]:
    """Ranked hints for a call, largest gain first. Each change of plan is simulated before it is given.

    A `report` of the same call saves simulating it again; its profile holds for the changes as well.
    """
    plan = plan_for(plan, get_chip(chip))
    base = report or simulate(fn, *args, chip=chip, plan=plan, profile=profile, cache=cache, **kwargs)
    how: dict[str, Any] = dict(chip=chip, cache=cache, profile=base.profile, explain_capacity=False, **kwargs)
    found: list[Hint] = []

    def attempt(changed: TilePlan, what: Callable[[SimReport, float], str]) -> None:
        try:
            other = simulate(fn, *args, plan=changed, **how)
        except (CapacityError, ValueError):
            return
        gain = base.total_us - other.total_us
        if gain > 0.005 * base.total_us:
            turned = (KNOBS.get(name) for name in KNOBS if getattr(changed, name) != getattr(plan, name))
            found.append(Hint(what(other, gain), gain, changed, next(turned, None)))

    def effect(other: SimReport, gain: float) -> str:
        return f"-{gain / base.total_us:.0%} ({base.total_us:.1f} -> {other.total_us:.1f} us)"

    depth = plan.queue_depth + 1
    if any(moves(b, k.program.grid) for k in base.kernels for b in k.program.blocks):
        attempt(plan.replace(queue_depth=depth), lambda o, g: f"queue depth {depth} {_hidden(base, o)}, {effect(o, g)}")
    padding = "no bank padding" if plan.bank_pad else "bank padding"
    attempt(plan.replace(bank_pad=not plan.bank_pad), lambda o, g: f"{padding} removes conflicts, {effect(o, g)}")
    if not plan.in_place:
        attempt(plan.replace(in_place=True), lambda o, g: f"in-place operations save buffer, {effect(o, g)}")
    if plan.cores is not None:
        attempt(plan.replace(cores=None), lambda o, g: f"all cores, {effect(o, g)}")
    space = getattr(fn, "plan_space", None)
    if callable(fn) and is_tunable(fn) and space is not None:
        best: tuple[float, TilePlan] | None = None
        for tiling in space(*shapes_of(args)):
            candidate = tiling.replace(queue_depth=plan.queue_depth, cores=plan.cores)
            try:
                o = simulate(fn, *args, plan=candidate, **how)
            except (CapacityError, ValueError):
                continue
            if best is None or o.total_us < best[0]:
                best = (o.total_us, candidate)
        if best is not None:
            attempt(best[1], lambda o, g: f"tiling ({o.plan.describe()}), {effect(o, g)}")
    found.sort(key=lambda h: -h.gain_us)
    for kernel in base.kernels:
        found += _traps(kernel, base.chip)
    return found


def _hidden(base: SimReport, other: SimReport) -> str:
    """How much of the time the busiest unit waited is gone."""
    before = max(base.kernels, key=lambda k: k.core_us)
    after = max(other.kernels, key=lambda k: k.core_us)
    unit = before.bottleneck
    wait, left = before.core_us - before.busy_us[unit], after.core_us - after.busy_us[unit]
    return f"hides {max(0.0, 1 - left / wait):.0%} of the {unit} wait" if wait > 0 else "overlaps copies"


def _traps(k: KernelResult, chip: ChipSpec) -> list[Hint]:
    """Known traps of one kernel, without a simulated gain."""
    out = []
    small = [t for kind in k.schedule.kinds for t in kind.copies_in if 0 < t.bytes < GOOD_COPY]
    repeated = {t.queue for t in small if any(b.name == t.queue and moves(b, k.program.grid) for b in k.program.blocks)}
    if repeated and k.bottleneck == "MTE2":
        names = ", ".join(sorted(repeated))
        out.append(Hint(f"{k.name}: copies of {names} are below 16 KiB; larger blocks use the bandwidth better", 0.0))
    rows = [b for b in k.program.blocks if b.space == "ub" and (b.block_shape or (1,))[-1] * dtype_bytes(b.dtype) % 32]
    if rows and not chip.has_datacopypad:
        out.append(
            Hint(
                f"{k.name}: rows of {rows[0].name} are not a multiple of 32 B, and {chip.name} has no DataCopyPad", 0.0
            )
        )
    if k.conflict_us > 0.05 * k.core_us:
        out.append(
            Hint(
                f"{k.name}: bank conflicts take {k.conflict_us:.1f} us of V; move one operand by 256 B, or the result "
                "to another bank",
                0.0,
            )
        )
    idle = chip.cores - k.schedule.cores
    if idle > 0 and k.core_us > k.launch_us:
        out.append(Hint(f"{k.name}: {idle} of {chip.cores} cores have nothing to do; cut the grid finer", 0.0))
    if not chip.has_bf16_arith and _bf16_arithmetic(k.program):
        out.append(Hint(f"{k.name}: {chip.name} has no bf16 arithmetic; widen once instead of at each operation", 0.0))
    issue = k.vector_us - k.repeats_us
    if k.bottleneck == "V" and issue > 0.4 * k.vector_us:
        out.append(
            Hint(
                f"{k.name}: {issue / k.vector_us:.0%} of V is instruction heads; longer tiles per instruction help", 0.0
            )
        )
    return out


def _bf16_arithmetic(program: TileProgram) -> bool:
    ops = [s for s in walk(program.body) if isinstance(s, VecOp)]
    return any(op.dtype == "bfloat16" and op.kind in ("arith", "transcendental", "reduce") for op in ops)
