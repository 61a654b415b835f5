"""`simulate`: from a function or a program to a report, without running it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from sim_npu import pallas_adapter
from sim_npu.arguments import check_call, plan_for, refuse_empty, shapes_of
from sim_npu.chips import ChipSpec, get_chip
from sim_npu.cost import BodyCost, body_cost
from sim_npu.explicit import check_copies, explicit_events, with_explicit_copies
from sim_npu.footprint import CapacityError, UbMap, clipped, queue_depths, ub_map
from sim_npu.ir import TileProgram, dtype_bytes
from sim_npu.memory import Traffic, copy_cycles, core_rates, gap_cost, traffic
from sim_npu.oprules import FREE
from sim_npu.plan import TilePlan, is_tunable
from sim_npu.profiles import shipped_us
from sim_npu.result import KernelResult, SimReport
from sim_npu.schedule import Schedule, StepKind, schedule
from sim_npu.timeline import RECORDED, CoreTimeline, Event, run_core
from sim_npu.translate import translate

Kernel = Callable | TileProgram | Sequence[TileProgram]


def simulate(
    fn: Kernel,
    *args: Any,
    chip: str | ChipSpec = "910b2",
    plan: TilePlan | None = None,
    profile: str = "ideal",
    cache: str = "warm",
    explain_capacity: bool = True,
    **kwargs: Any,
) -> SimReport:
    """Time, traffic and buffer use of `fn(*args)` on one chip. `fn` is traced, never run.

    Args:
      fn: a function that calls Pallas kernels, or a `TileProgram` (or several) from `sim_npu.builder`.
      args: arrays, ShapeDtypeStructs, or `(shape, dtype)` pairs.
      chip: preset name or ChipSpec.
      plan: tiling; passed to `fn` if it takes `plan`. Depth and cores apply to every kernel.
      profile: "ideal" (this plan, executed as well as the hardware allows), "as_shipped" (with overheads fitted to
        public measurements of shipped kernels on that chip) or "as_shipped:rms_norm" (of that operator).
      cache: "warm", "cold", or "bypass" (inputs do not enter L2).
      explain_capacity: search for a plan that fits before raising CapacityError.
      kwargs: passed to `fn`.

    Raises:
      CapacityError: if the plan does not fit the unified buffer (names the biggest tenants and a plan that fits), or
        arrays do not fit the chip's memory.
      TypeError: for arguments that `fn` does not take.
      UnsupportedKernel: for a kernel without a rule, with primitive and line.
      ValueError: for an unknown chip, profile or cache, a plan deeper than the chip's queues, an array without
        elements, or a function without kernels.

    >>> from sim_npu import demos
    >>> report = simulate(demos.rms_norm, ((4096, 4096), "bfloat16"), ((4096,), "bfloat16"), chip="910b2")
    >>> report.kernels[0].name, report.kernels[0].traffic.writes
    ('rms_norm', 33554432)
    """
    spec = get_chip(chip)
    if not isinstance(profile, str) or profile.partition(":")[0] not in ("ideal", "as_shipped"):
        raise ValueError(f"`profile` must be 'ideal', 'as_shipped' or 'as_shipped:operator'; got {profile!r}.")
    plan = plan_for(plan, spec)
    programs = programs_of(fn, *args, plan=plan, **kwargs)
    name = programs[0].name if not callable(fn) else getattr(fn, "__name__", programs[0].name)
    kernels = []
    for program in programs:
        _check_memory(program, spec)
        ub = ub_map(program, spec, plan)
        if not ub.fits:
            text = f"kernel `{program.name}` with plan ({plan.describe()}) {ub.complaint()}."
            raise CapacityError(_remedy(text, spec, plan, fn, args, kwargs) if explain_capacity else text)
        kernels.append(simulate_program(program, spec, plan, cache, ub))
    total = sum(k.total_us for k in kernels)
    if profile != "ideal":
        total = shipped_us(profile, spec, kernels)
    return SimReport(name, spec, plan, profile, cache, tuple(kernels), total)


def programs_of(fn: Kernel, *args: Any, plan: TilePlan | None = None, **kwargs: Any) -> tuple[TileProgram, ...]:
    """The kernels of `fn(*args)` in the simulator's form; traced once per tiling."""
    if not callable(fn):
        return _given(fn, args, kwargs)
    shaped = shapes_of(args)
    check_call(fn, shaped, kwargs)
    refuse_empty(shaped)
    if is_tunable(fn):
        kwargs = kwargs | {"plan": (plan or TilePlan()).tiling()}
    try:
        key = (jax.tree.structure(shaped), tuple(jax.tree.leaves(shaped)), tuple(sorted(kwargs.items())))
        hash(key)
    except TypeError:  # a keyword that cannot be a key: trace anew
        return _trace(fn, shaped, kwargs)
    return _trace_cached(fn, key)


def _given(fn: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[TileProgram, ...]:
    """Programs that were written, not traced."""
    programs = (fn,) if isinstance(fn, TileProgram) else tuple(fn) if isinstance(fn, list | tuple) else ()
    if not programs or not all(isinstance(p, TileProgram) for p in programs):
        raise ValueError(
            f"`fn` must be a function that calls Pallas kernels, a TileProgram, or a sequence of them; got {fn!r}."
        )
    if args or kwargs:
        raise ValueError(
            f"`args` and keywords are a function's; a TileProgram has its shapes already: got {len(args)} arguments"
            f"{' and ' + ', '.join(kwargs) if kwargs else ''}."
        )
    return programs


def _check_memory(program: TileProgram, chip: ChipSpec) -> None:
    """At least the outputs, and the largest input, lie in the chip's memory at once."""
    sizes = [(b.role, math.prod(b.array_shape) * dtype_bytes(b.dtype)) for b in program.blocks]
    least = max(sum(s for role, s in sizes if role == "out"), max((s for _, s in sizes), default=0))
    if least > chip.hbm_bytes:
        raise CapacityError(
            f"`args`: the arrays of kernel `{program.name}` take at least {least / 1e9:,.1f} GB, and {chip.name} has "
            f"{chip.hbm_bytes / 1e9:,.1f} GB of memory. Use smaller arrays, or a chip with more `hbm_bytes`."
        )


@functools.lru_cache(maxsize=512)
def _trace_cached(fn: Callable, key: tuple) -> tuple[TileProgram, ...]:
    structure, leaves, kwargs = key
    return _trace(fn, jax.tree.unflatten(structure, leaves), dict(kwargs))


def _trace(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[TileProgram, ...]:
    jaxpr = pallas_adapter.trace(fn, *args, **kwargs).jaxpr
    calls = pallas_adapter.calls_in(jaxpr)
    if not calls:
        name = getattr(fn, "__name__", fn)
        raise ValueError(
            f"`fn` ({name}) calls no Pallas kernel; lay out a whole step with `sim_npu.simulate_step` instead."
        )
    programs = [translate(call) for call in calls]
    outside = Counter(pallas_adapter.outside_kernels(jaxpr, FREE))
    if outside:
        names = ", ".join(name if n == 1 else f"{name} ({n})" for name, n in outside.items())
        note = f"Outside the kernels, not included (see simulate_step): {names}."
        programs[0] = dataclasses.replace(programs[0], notes=(*programs[0].notes, note))
    return tuple(programs)


def simulate_program(
    program: TileProgram, chip: ChipSpec, plan: TilePlan, cache: str = "warm", ub: UbMap | None = None
) -> KernelResult:
    """One kernel; the plan must fit (`ub_map(...).fits`)."""
    ub = ub or ub_map(program, chip, plan)
    check_copies(program, chip)
    sched = schedule(program, chip, plan)
    bodies = [body_cost(program.body, chip, ub, kind.choose) for kind in sched.kinds]
    depth = queue_depths(program, chip, plan)
    notes = [
        f"Block {name} lies behind the end of its array at {n} steps: nothing is copied there, hardware may read it."
        for name, n in sched.beyond.items()
    ]
    notes += [note for note in [clipped(depth, program, chip, plan)] if note]
    program = dataclasses.replace(program, notes=(*program.notes, *notes)) if notes else program
    if program.queues:
        sched = with_explicit_copies(program, sched)
    moved = traffic(program, sched, chip, cache)
    setup = chip.setup_us * chip.clock_mhz
    duty: tuple[float, float] = (1.0, 1.0)
    events: list[list[Event]] = []
    for _ in range(5):  # the copy rates depend on how busy the copy units are, and the reverse
        rates = core_rates(moved, sched.cores, duty, chip)
        events = [_events(program, k, b, rates, chip, ub, sched.cores) for k, b in zip(sched.kinds, bodies)]
        timeline = run_core(sched.codes, events, depth, scalar_step=chip.scalar_step, setup=setup)
        busy, active = _busy(sched, events), max(timeline.cycles - setup, 1.0)
        seen = busy["MTE2"] / active, busy["MTE3"] / active
        if max(abs(a - b) for a, b in zip(seen, duty)) < 0.01:
            break
        duty = 0.5 * (duty[0] + seen[0]), 0.5 * (duty[1] + seen[1])
    timeline = run_core(sched.codes, events, depth, scalar_step=chip.scalar_step, setup=setup, record=RECORDED)
    return _result(program, chip, plan, ub, sched, bodies, moved, timeline, _busy(sched, events))


def _result(
    program: TileProgram,
    chip: ChipSpec,
    plan: TilePlan,
    ub: UbMap,
    sched: Schedule,
    bodies: list[BodyCost],
    moved: Traffic,
    timeline: CoreTimeline,
    busy: dict[str, float],
) -> KernelResult:
    launch = chip.launch_us + chip.core_start_us * sched.cores / chip.cores
    core_us = max(chip.us(timeline.cycles), chip.setup_us + moved.bound_us)
    counts = sched.counts
    return KernelResult(
        name=program.name,
        program=program,
        plan=plan,
        ub=ub,
        schedule=sched,
        traffic=moved,
        timeline=timeline,
        launch_us=launch,
        core_us=core_us,
        busy_us={unit: chip.us(cycles) for unit, cycles in busy.items()},
        vector_us=chip.us(_sum(c * (b.vector - b.conflict) for c, b in zip(counts, bodies))),
        repeats_us=chip.us(_sum(c * sum(r.times * r.cost.busy for r in b.rows) for c, b in zip(counts, bodies))),
        conflict_us=chip.us(_sum(c * b.conflict for c, b in zip(counts, bodies))),
        instructions=int(_sum(c * b.instructions for c, b in zip(counts, bodies))),
        repeats=int(_sum(c * b.repeats for c, b in zip(counts, bodies))),
        cube_us=_sum(c * b.cube_flops for c, b in zip(counts, bodies)) * sched.cores / (chip.cube_tflops() * 1e6),
        vec_head=chip.vec_head,
        bodies=tuple(bodies),
    )


def _sum(terms: Iterable) -> float:
    """A Python float, whatever NumPy scalars are added."""
    return float(sum(terms))


def _events(
    program: TileProgram,
    kind: StepKind,
    body: BodyCost,
    rates: tuple[float, float],
    chip: ChipSpec,
    ub: UbMap,
    cores: int,
) -> list[Event]:
    """What a step does, in program order: copies in, the body with its explicit copies, copies out."""
    read, write = rates
    events: list[Event] = []
    for t in kind.copies_in:
        gap = gap_cost(t.gap, chip.gap_read_cycles)
        events.append(("in", t.queue, copy_cycles(t.bursts, t.bytes, chip.mte2_head, read, chip, gap)))
    events += [("open", name) for name in kind.opens]
    if program.queues:
        events += explicit_events(program, program.body, kind.choose, rates, chip, ub, cores)
    else:
        events.append(("vec", body.vector + body.loops))
    events += [("free", name) for name in kind.closes]
    for t in kind.copies_out:
        gap = gap_cost(t.gap, chip.gap_write_cycles)
        events.append(("out", t.queue, copy_cycles(t.bursts, t.bytes, chip.mte3_head, write, chip, gap)))
    return events


def _busy(sched: Schedule, events: Sequence[Sequence[Event]]) -> dict[str, float]:
    """Busy cycles of each unit on the core with the most work."""
    unit = {"in": "MTE2", "more": "MTE2", "out": "MTE3", "vec": "V"}
    busy = {"MTE2": 0.0, "V": 0.0, "MTE3": 0.0}
    for count, step in zip(sched.counts, events):
        for event in step:
            if event[0] in unit:
                busy[unit[event[0]]] += float(count) * event[-1]
    return busy


def _remedy(text: str, chip: ChipSpec, plan: TilePlan, fn: Kernel, args: tuple, kwargs: dict[str, Any]) -> str:
    near = nearest_plan(fn, *args, chip=chip, plan=plan, **kwargs)
    if near is None:
        return f"{text} No smaller queue depth or tiling of this function fits; use smaller blocks."
    return f"{text} The nearest plan that fits: {near.describe()}."


def nearest_plan(fn: Kernel, *args: Any, chip: str | ChipSpec, plan: TilePlan, **kwargs: Any) -> TilePlan | None:
    """The plan closest to `plan` that fits: fewer rows first, then depth 1, then the function's own space."""
    spec = get_chip(chip)

    def fits(candidate: TilePlan) -> bool:
        programs = programs_of(fn, *args, plan=candidate, **kwargs)
        return all(ub_map(p, spec, candidate).fits for p in programs)

    candidates = []
    if callable(fn) and is_tunable(fn):
        rows = (plan.rows or 64) // 2
        while rows:
            candidates.append(plan.replace(rows=rows))
            rows //= 2
        candidates += [c.replace(queue_depth=1) for c in (plan, *candidates)]
        space = getattr(fn, "plan_space", None)
        if space is not None:
            candidates += [c.replace(queue_depth=plan.queue_depth, cores=plan.cores) for c in space(*shapes_of(args))]
    else:
        candidates = [plan.replace(queue_depth=d) for d in range(plan.queue_depth - 1, 0, -1)]
    return next((c for c in candidates if fits(c)), None)
