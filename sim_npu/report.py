"""Text of a report: profiler column names and units, speed of light, stalls, buffer, operations, sources."""

from __future__ import annotations

from collections.abc import Sequence

from sim_npu.chips import CHIPS
from sim_npu.cost import OpRow
from sim_npu.footprint import moves
from sim_npu.profiles import core_and_bytes, shipped
from sim_npu.result import KernelResult, SimReport

UNITS = ("MTE2", "V", "MTE3")
COLUMN = {"MTE2": "aiv_mte2", "V": "aiv_vec", "MTE3": "aiv_mte3"}
BAR = 32


def text_report(report: SimReport) -> str:
    """The whole report as text; `print(report)` shows it."""
    chip = report.chip
    lines = [
        f"{report.name} on {chip.name}: {report.total_us:.2f} us   (a model, not a measurement)",
        f"chip {chip.cores} vector cores, {chip.clock_mhz:.0f} MHz, {chip.ub_bytes / 1024:.0f} KiB UB; "
        f"plan: {report.plan.describe()}; profile {report.profile}; cache {report.cache}",
        *profile_lines(report),
        "",
        *profiler_table(report),
    ]
    for kernel in report.kernels:
        lines += ["", *kernel_lines(kernel, report)]
    lines += ["", *source_lines(report)]
    return "\n".join(lines)


def profile_lines(report: SimReport) -> list[str]:
    """How the total follows from the kernels, where it is not their sum."""
    if report.profile == "ideal":
        return []
    fit = shipped(report.profile, report.chip)
    core, moved = core_and_bytes(report.kernels)
    preset = CHIPS.get(report.chip.name)
    changed = [] if report.chip == preset else ["fitted on the chip of that name as it is sold; this one was changed"]
    return [
        f"as shipped: {report.total_us:.2f} us = {fit.launch:.2f} launch + {fit.factor:.2f} x {core:.2f} without "
        f"launch + {fit.per_mb:.3f} x {moved / 1e6:.2f} MB; the kernels below are ideal",
        *changed,
    ]


def profiler_table(report: SimReport) -> list[str]:
    """One line per kernel in the profiler's columns; times in µs."""
    names = [k.name for k in report.kernels]
    width = max(len("Op Name"), *(len(n) for n in names))
    heads = ["Task Duration(us)", "Block Dim", "aiv_time(us)"]
    heads += [f"{COLUMN[u]}_{what}" for u in UNITS for what in ("time(us)", "ratio")]
    lines = [f"{'Op Name':<{width}}  " + "  ".join(heads)]
    for k in report.kernels:
        cells = [f"{k.total_us:.2f}", f"{k.schedule.cores}", f"{k.core_us:.2f}"]
        for unit in UNITS:
            cells += [f"{k.busy_us[unit]:.2f}", f"{k.ratio(unit):.3f}"]
        lines.append(f"{k.name:<{width}}  " + "  ".join(f"{c:>{len(h)}}" for c, h in zip(cells, heads)))
    return lines


def speed_of_light(k: KernelResult) -> str:
    """How near the kernel comes to its larger bound, and which unit is in the way."""
    name, bound = k.limit
    return f"speed of light: {k.fraction:.0%} of the {name} bound ({bound:.2f} us); bound by {k.bottleneck}"


def kernel_lines(k: KernelResult, report: SimReport) -> list[str]:
    """Utilisation, stalls, buffer and operations of one kernel."""
    t = k.traffic
    achieved = t.total / k.core_us / 1e3 if k.core_us else 0.0
    heads = k.vector_us - k.repeats_us
    lines = [
        f"-- {k.name}: {speed_of_light(k)}",
        f"   time    launch {k.launch_us:.2f} us, core {k.core_us:.2f} us, {k.timeline.steps} steps on that core",
        f"   memory  in {t.reads / 1e6:.3f} MB, out {t.writes / 1e6:.3f} MB; {achieved:.0f} GB/s of {t.chip_gbps:.0f} "
        f"({achieved / t.chip_gbps:.0%}); {t.l2_hit:.0%} of it in L2",
        f"   vector  {k.instructions} instructions, {k.repeats} repeats; issue efficiency "
        f"{k.repeats_us / max(k.vector_us + k.conflict_us, 1e-9):.0%} (heads {heads:.2f} us, bank conflicts "
        f"{k.conflict_us:.2f} us)",
    ]
    for unit in UNITS:
        busy = k.ratio(unit)
        lines.append(f"   {unit:<5} {_bar(busy)} active {busy:4.0%}, stall {1 - busy:4.0%}")
    lines += ["", *(f"   {line}" for line in ub_lines(k))]
    lines += ["", *(f"   {line}" for line in operation_lines(k))]
    short = [t.name for t in k.ub.tenants if t.kind in ("in", "out") and 1 < k.plan.queue_depth > t.copies > 0]
    moving = {b.name for b in k.program.blocks if moves(b, k.program.grid)}
    if short := [name for name in short if name in moving]:
        lines.append(f"   note: {', '.join(short)} have fewer buffers than the plan's depth; a queue position has few")
    for note in k.program.notes:
        lines.append(f"   note: {note}")
    for op, where in k.program.unknown():
        cost = report.chip.cycles_per_repeat["unknown"]
        lines.append(f"   unknown operation `{op}` at {where}: default cost, {cost:g} cycles per 64 elements")
    return lines


def ub_lines(k: KernelResult) -> list[str]:
    """The unified buffer's tenants."""
    ub = k.ub
    lines = [f"UB      {ub.used:,} of {ub.capacity:,} B ({ub.used / ub.capacity:.0%})"]
    for tenant in ub.tenants:
        share = tenant.total / ub.capacity
        what = f"{tenant.copies} x {tenant.bytes:,} B"
        lines.append(f"{tenant.address:>8}  {_bar(share)} {share:4.0%}  {tenant.name:<12} {tenant.kind:<10} {what}")
    return lines


def operation_rows(k: KernelResult) -> list[tuple[str, str, str, int, float]]:
    """(operation, class, source line, times, µs) of the busiest core, most expensive first."""
    total: dict[tuple[str, str, str], list[float]] = {}
    chip_us = k.core_us / k.timeline.cycles if k.timeline.cycles else 0.0
    for count, body in zip(k.schedule.counts, k.bodies):
        for row in body.rows:
            entry = total.setdefault((row.op, row.kind, row.where), [0, 0.0])
            entry[0] += int(count) * row.times
            entry[1] += float(count) * row.times * _row_cycles(row, k)
    rows = [(op, kind, where, int(n), cycles * chip_us) for (op, kind, where), (n, cycles) in total.items()]
    return sorted(rows, key=lambda r: -r[4])


def _row_cycles(row: OpRow, k: KernelResult) -> float:
    return row.cost.instructions * k.vec_head + row.cost.busy + row.cost.conflict


def operation_lines(k: KernelResult, top: int = 8) -> list[str]:
    """The most expensive operations."""
    rows = operation_rows(k)
    if not rows:
        return ["no vector operations"]
    whole = sum(r[4] for r in rows) or 1.0
    lines = [f"{'operation':<22} {'class':<15} {'times':>8} {'us':>9} {'share':>6}  where"]
    for op, kind, where, times, us in rows[:top]:
        lines.append(f"{op:<22} {kind:<15} {times:>8} {us:9.2f} {us / whole:6.0%}  {where}")
    if len(rows) > top:
        rest = sum(r[4] for r in rows[top:])
        lines.append(f"{f'... {len(rows) - top} more':<22} {'':<15} {'':>8} {rest:9.2f} {rest / whole:6.0%}")
    return lines


def source_lines(report: SimReport) -> list[str]:
    """Constants by confidence, so that nobody takes an assumption for a measurement."""
    names = (
        "cores",
        "clock_mhz",
        "ub_bytes",
        "chip_gbps",
        "l2_gbps",
        "mte2_bytes_per_cycle",
        "mte2_head",
        "vec_head",
        "vector_issue",
        "cycles_per_repeat",
        "launch_us",
        "setup_us",
        "scalar_step",
        "sync_us",
    )
    lines = ["constants"]
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        p = report.chip.provenance(name)
        value = getattr(report.chip, name)
        shown = name if isinstance(value, dict) else f"{name} {value:g}"
        groups.setdefault((p.confidence, p.source), []).append(shown)
    for (confidence, source), shown_names in sorted(groups.items()):
        lines.append(f"  {confidence:<10} {', '.join(shown_names)}  [{source}]")
    return lines


def _bar(share: float) -> str:
    filled = round(max(0.0, min(1.0, share)) * BAR)
    return "#" * filled + "." * (BAR - filled)


def hint_lines(found: Sequence) -> list[str]:
    """Hints as a numbered list."""
    if not found:
        return ["hints: none; no change tried is faster"]
    return ["hints", *(f"  {i}. {hint}" for i, hint in enumerate(found, 1))]
