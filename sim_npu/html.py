"""A report as HTML: headline, hints, profiler table, pictures, operations; for notebooks, and as a page of its own."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sim_npu.hints import Hint
from sim_npu.pictures import lanes_svg, roofline_svg, ub_svg
from sim_npu.report import COLUMN, UNITS, operation_rows, profile_lines, source_lines, speed_of_light
from sim_npu.result import SimReport


def html_page(report: SimReport, hints: Sequence[Hint]) -> str:
    """The report and its hints as an HTML document."""
    title = f"{escape(report.name)} on {escape(report.chip.name)}"
    head = f"<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title></head>"
    return f"{head}\n<body style='margin:16px'>\n{html_report(report, hints)}\n</body></html>\n"


def html_report(report: SimReport, hints: Sequence[Hint] = ()) -> str:
    """The report as one self-contained block of HTML."""
    chip = report.chip
    parts = [
        "<div style='font-family:sans-serif;font-size:13px'>",
        f"<h3 style='margin:4px 0'>{escape(report.name)} on {escape(chip.name)}: {report.total_us:.2f} µs</h3>",
        f"<p style='margin:2px 0;color:#555'>A model, not a measurement. {chip.cores} vector cores at "
        f"{chip.clock_mhz:.0f} MHz; plan: {escape(report.plan.describe())}; profile {escape(report.profile)}; "
        f"cache {report.cache}.</p>",
        *(f"<p style='margin:2px 0;color:#555'>{escape(line)}</p>" for line in profile_lines(report)),
    ]
    if hints:
        items = "".join(f"<li>{escape(str(hint))}</li>" for hint in hints)
        parts.append(f"<p style='margin:6px 0 0'><b>What to change</b></p><ol style='margin:2px 0 8px'>{items}</ol>")
    parts.append(_table(report))
    for k in report.kernels:
        parts.append(f"<p style='margin:6px 0'><b>{escape(k.name)}</b>: {escape(speed_of_light(k))}</p>")
        parts.append(lanes_svg(k, chip.clock_mhz, max_us=_window(k.core_us)))
        parts.append(ub_svg(k))
        parts.append(_operations(report, k))
    parts.append(roofline_svg(report))
    parts.append(_details("constants and their sources", "\n".join(source_lines(report)[1:])))
    if report.unknown:
        rows = "\n".join(f"{op} at {where}" for op, where in report.unknown)
        parts.append(f"<p><b>Priced with the default cost:</b></p><pre>{escape(rows)}</pre>")
    parts.append("</div>")
    return "\n".join(parts)


def _window(core_us: float) -> float:
    """µs of the timeline to show: all of a short kernel, the start of a long one."""
    return min(core_us, max(10.0, core_us / 8))


def _row(cells: list[str], tag: str = "td") -> str:
    style = "text-align:right;vertical-align:bottom;padding:2px 7px"
    first = style.replace("right", "left", 1)
    texts = [escape(c) for c in cells]
    if tag == "th":  # the profiler's long names may break
        texts = [t.replace("_", "_<wbr>").replace("(us)", "<wbr>(us)") for t in texts]
    return (
        "<tr>" + "".join(f"<{tag} style='{style if i else first}'>{t}</{tag}>" for i, t in enumerate(texts)) + "</tr>"
    )


def _table(report: SimReport) -> str:
    heads = ["Op Name", "Task Duration(us)", "Block Dim", "aiv_time(us)"]
    heads += [f"{COLUMN[u]}_{what}" for u in UNITS for what in ("time(us)", "ratio")] + ["GB/s", "L2 hit", "of bound"]
    rows = [_row(heads, "th")]
    for k in report.kernels:
        cells = [k.name, f"{k.total_us:.2f}", f"{k.schedule.cores}", f"{k.core_us:.2f}"]
        for unit in UNITS:
            cells += [f"{k.busy_us[unit]:.2f}", f"{k.ratio(unit):.3f}"]
        cells += [f"{k.traffic.total / k.core_us / 1e3:.0f}", f"{k.traffic.l2_hit:.0%}", f"{k.fraction:.0%}"]
        rows.append(_row(cells))
    style = "border-collapse:collapse;font-size:12px;max-width:900px"
    return f"<table style='{style}'>{''.join(rows)}</table>"


def _operations(report: SimReport, k: object) -> str:
    rows = operation_rows(k)  # type: ignore[arg-type]
    whole = sum(r[4] for r in rows) or 1.0
    text = "\n".join(
        f"{op:<22} {kind:<15} {times:>8} {us:9.2f} us {us / whole:6.0%}  {where}" for op, kind, where, times, us in rows
    )
    return _details(f"{len(rows)} kinds of vector operation", text or "none")


def _details(summary: str, text: str) -> str:
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
