"""Pictures as SVG text: roofline, pipe lanes, unified buffer. No drawing library is needed to make or show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from sim_npu.result import KernelResult, SimReport
from sim_npu.step_report import StepReport

COLORS = {"MTE2": "#3572b0", "V": "#d1702a", "MTE3": "#3d9156", "S": "#8a8a8a"}
KINDS = {"in": "#3572b0", "out": "#3d9156", "scratch": "#8562a8", "temporary": "#d1702a"}
FONT = "font-family='DejaVu Sans, Helvetica, Arial, sans-serif'"
INK, FAINT = "#222222", "#d8d8d8"


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' {FONT} font-size='12'>"
    return "\n".join([head, f"<rect width='{width:.0f}' height='{height:.0f}' fill='white'/>", *parts, "</svg>"])


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, color: str = INK) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' fill='{color}'>{escape(text)}</text>"
    )


def _box(x: float, y: float, w: float, h: float, color: str, title: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f"<rect x='{x:.2f}' y='{y:.1f}' width='{max(w, 0.5):.2f}' height='{h:.1f}' fill='{color}'>{inner}</rect>"


def _line(x1: float, y1: float, x2: float, y2: float, color: str = INK, width: float = 1.0, dash: str = "") -> str:
    style = f" stroke-dasharray='{dash}'" if dash else ""
    ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {ends} stroke='{color}' stroke-width='{width}'{style}/>"


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers between two bounds."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / count))
    step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= count)
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step) + 1)]


def lanes_svg(k: KernelResult, clock_mhz: float, *, max_us: float | None = None, width: int = 900) -> str:
    """What each unit of the busiest core does over time, from its start."""
    intervals = [i for i in k.timeline.intervals if max_us is None or i.start / clock_mhz < max_us]
    end = max((i.end / clock_mhz for i in intervals), default=1.0)
    end = end if max_us is None else min(end, max_us)
    left, top, lane, gap = 62, 34, 26, 10
    plot = width - left - 16
    parts = [_text(left, 18, f"{k.name}: one core's units over time, first {end:.1f} of {k.core_us:.1f} us", size=13)]
    bottom = top + 4 * (lane + gap)
    for tick in _ticks(0.0, end, 8):
        x = left + plot * tick / end
        parts += [_line(x, top - 4, x, bottom, FAINT), _text(x, bottom + 15, f"{tick:g}", anchor="middle", size=11)]
    parts.append(_text(left + plot, bottom + 30, "us", anchor="end", size=11))
    names = sorted({i.name for i in intervals if i.unit == "MTE2"})
    for row, unit in enumerate(("S", "MTE2", "V", "MTE3")):
        y = top + row * (lane + gap)
        parts.append(_text(left - 8, y + lane / 2 + 4, unit, anchor="end"))
        parts.append(_box(left, y, plot, lane, "#f4f4f4"))
        for i in intervals:
            if i.unit != unit:
                continue
            start, stop = i.start / clock_mhz, min(i.end / clock_mhz, end)
            x, w = left + plot * start / end, plot * (stop - start) / end
            title = f"{i.name}, step {i.step}: {start:.2f} to {i.end / clock_mhz:.2f} us"
            parts.append(_box(x, y, max(w - 0.6, 0.6), lane, _shade(COLORS[unit], i, names), title))
            label = f"{i.step}" if w < 34 else f"{i.name} {i.step}"
            if w > 7 * len(label) and i.name != "set-up":
                parts.append(_text(x + w / 2, y + lane / 2 + 4, label, anchor="middle", size=10, color="white"))
            elif i.name == "set-up" and w > 42:
                parts.append(_text(x + w / 2, y + lane / 2 + 4, "set-up", anchor="middle", size=10, color="white"))
    return _svg(width, bottom + 38, parts)


def _shade(color: str, interval: object, names: list[str]) -> str:
    """Inputs of one step in different depths of the lane's colour."""
    name = getattr(interval, "name", "")
    if name not in names or len(names) < 2:
        return color
    factor = 1.0 - 0.45 * names.index(name) / len(names)
    return "#" + "".join(f"{int(int(color[i : i + 2], 16) * factor):02x}" for i in (1, 3, 5))


def ub_svg(k: KernelResult, *, width: int = 900) -> str:
    """The unified buffer of one core, address from left to right; each copy of a tile is a box."""
    ub = k.ub
    left, top, height = 16, 34, 54
    plot = width - 2 * left
    scale = plot / max(ub.capacity, ub.used)
    title = f"{k.name}: unified buffer, {ub.used / 1024:.1f} of {ub.capacity / 1024:.1f} KiB"
    parts = [_text(left, 18, title, size=13), _box(left, top, ub.capacity * scale, height, "#f0f0f0")]
    for t in ub.tenants:
        color = KINDS.get(t.kind.removeprefix("queue "), "#777777")
        for copy in range(t.copies):
            x, w = left + (t.address + copy * t.bytes) * scale, t.bytes * scale
            hint = (
                f"{t.name} ({t.kind}), copy {copy + 1} of {t.copies}: {t.bytes:,} B at {t.address + copy * t.bytes:,}"
            )
            parts.append(_box(x, top, w - 0.8, height, color, hint))
            label = t.name if t.copies == 1 else f"{t.name}.{copy}"
            if w > 7.5 * len(label):
                parts.append(_text(x + w / 2, top + 25, label, anchor="middle", color="white"))
            if w > 58:
                size = f"{t.bytes / 1024:.1f} KiB"
                parts.append(_text(x + w / 2, top + 42, size, anchor="middle", size=10, color="white"))
    edge = left + ub.capacity * scale
    parts.append(_line(edge, top - 6, edge, top + height + 6, "#b00020", 2))
    for tick in _ticks(0, max(ub.capacity, ub.used) / 1024, 8):
        x = left + tick * 1024 * scale
        parts.append(_text(x, top + height + 16, f"{tick:g}", anchor="middle", size=11))
    parts.append(_text(left + plot, top + height + 32, "KiB", anchor="end", size=11))
    x = left
    present = {t.kind.removeprefix("queue ") for t in ub.tenants}
    for kind, color in ((k, c) for k, c in KINDS.items() if k in present):
        parts += [_box(x, top + height + 24, 11, 11, color), _text(x + 16, top + height + 34, kind, size=11)]
        x += 22 + 7.5 * len(kind) + 14
    return _svg(width, top + height + 42, parts)


def roofline_svg(report: SimReport, *, width: int = 620, height: int = 380) -> str:
    """Element operations per second over operations per byte: the chip's roofs, and each kernel.

    The flat roof is every lane at work, as often as the chip issues, on all cores; the slopes are HBM and L2.
    """
    chip = report.chip
    peak = chip.cores * chip.clock_mhz * 64 * chip.vector_issue / 1e3  # Gop/s of float32
    points = []
    for k in report.kernels:
        lanes = sum(
            float(n) * r.times * r.cost.repeats * 64 for n, b in zip(k.schedule.counts, k.bodies) for r in b.rows
        )
        work = lanes * k.schedule.cores
        if work and k.traffic.total:
            points.append((k, work / k.traffic.total, work / k.total_us / 1e3))
    lows = [p[1] for p in points] + [peak / chip.l2_gbps]
    highs = [p[1] for p in points] + [peak / chip.chip_gbps]
    x0, x1 = math.log10(min(lows) / 8), math.log10(max(highs) * 8)
    y1 = math.log10(peak * 2)
    y0 = min(math.log10(chip.chip_gbps) + x0, *(math.log10(p[2] / 3) for p in points)) if points else y1 - 3
    left, right, top, bottom = 66, 20, 34, 46

    def at(x: float, y: float) -> tuple[float, float]:
        px = left + (math.log10(x) - x0) / (x1 - x0) * (width - left - right)
        py = height - bottom - (math.log10(y) - y0) / (y1 - y0) * (height - top - bottom)
        return px, max(py, top)

    title = f"{report.name} on {chip.name}: roofline of the vector unit, {chip.cores} cores"
    parts = [_text(left, 20, title, size=13)]
    for e in range(math.ceil(x0), math.floor(x1) + 1):
        x, y = at(10**e, 10**y0)
        parts += [_line(x, top, x, y, FAINT), _text(x, y + 16, f"{10.0**e:g}", anchor="middle", size=11)]
    for e in range(math.ceil(y0), math.floor(y1) + 1):
        x, y = at(10**x0, 10**e)
        parts += [_line(x, y, width - right, y, FAINT), _text(x - 6, y + 4, f"{10.0**e:g}", anchor="end", size=11)]
    parts.append(_text((left + width) / 2, height - 10, "element operations per byte", anchor="middle", size=11))
    parts.append(_text(8, 24, "Gop/s", size=11))
    for name, rate, color in (("HBM", chip.chip_gbps, "#3572b0"), ("L2", chip.l2_gbps, "#5aa0c8")):
        start, knee = max(10**x0, 10**y0 / rate), peak / rate
        (ax, ay), (bx, by) = at(start, start * rate), at(knee, peak)
        parts.append(_line(ax, ay, bx, by, color, 2))
        mx, my = at(math.sqrt(start * knee), math.sqrt(start * knee) * rate)
        anchor, dx, dy = ("start", 10, 12) if name == "HBM" else ("end", -10, -4)
        parts.append(_text(mx + dx, my + dy, f"{name} {rate:.0f} GB/s", anchor=anchor, size=11, color=color))
    (ax, ay), (bx, by) = at(peak / chip.l2_gbps, peak), at(10**x1, peak)
    parts.append(_line(ax, ay, bx, by, "#d1702a", 2))
    parts.append(_text(bx - 4, by - 6, f"vector {peak:.0f} Gop/s", anchor="end", size=11, color="#d1702a"))
    for k, intensity, rate in points:
        px, py = at(intensity, rate)
        parts.append(
            f"<circle cx='{px:.1f}' cy='{py:.1f}' r='6' fill='#b00020'><title>{escape(k.name)}</title></circle>"
        )
        side, shift = ("end", -10) if px > 0.6 * width else ("start", 10)
        parts.append(_text(px + shift, py + 14, f"{k.name}: {k.fraction:.0%} of its bound", anchor=side))
    return _svg(width, height, parts)


STEP_COLORS = ("#d1702a", "#8562a8", "#3d9156", "#b0a030", "#777777", "#b5577f")


def step_svg(step: StepReport, *, width: int = 900) -> str:
    """A step's kernels one after another on the cube and the vector cores; colours are kinds of kernel."""
    left, top, lane, gap = 62, 34, 34, 10
    plot = width - left - 16
    total = step.total_us or 1.0
    kinds = [k for k in step.shares() if k not in ("matrix product", "convolution")]
    colors = {"matrix product": "#3572b0", "convolution": "#3572b0"}
    colors |= {k: STEP_COLORS[i % len(STEP_COLORS)] for i, k in enumerate(kinds)}
    title = f"{step.name} on {step.chip.name}: {total:.0f} us, cube and vector cores (rules assumed)"
    parts = [_text(left, 18, title, size=13)]
    rows = {"cube": top, "vector": top + lane + gap}
    bottom = top + 2 * lane + gap
    for tick in _ticks(0.0, total, 8):
        x = left + plot * tick / total
        parts += [_line(x, top - 4, x, bottom + 4, FAINT), _text(x, bottom + 18, f"{tick:g}", anchor="middle", size=11)]
    parts.append(_text(left + plot, bottom + 32, "us", anchor="end", size=11))
    for unit, y in rows.items():
        parts += [_text(left - 8, y + lane / 2 + 4, unit, anchor="end"), _box(left, y, plot, lane, "#f4f4f4")]
    now = 0.0
    for op in step.ops:
        x, w = left + plot * now / total, plot * op.us / total
        hint = f"{op.name} ({op.kind}) x {op.times}: {op.us:.1f} us, {op.where}"
        parts.append(_box(x, rows[op.unit], max(w - 0.3, 0.4), lane, colors[op.kind], hint))
        now += op.us
    x = float(left)
    for kind, us in step.shares().items():
        label = f"{kind} {us / total:.0%}"
        parts += [_box(x, bottom + 40, 11, 11, colors[kind]), _text(x + 16, bottom + 50, label, size=11)]
        x += 30 + 6.6 * len(label)
    return _svg(width, bottom + 62, parts)
