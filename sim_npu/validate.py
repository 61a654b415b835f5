"""Measured against modelled: `python -m sim_npu.validate` prints every row, its error, and whether it was fitted.

Beside the model stands the naive formula, launch + bytes / bandwidth, fitted on the same rows in the same way.
Figures that miss a target are printed as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim_npu.calibration import (
    Row,
    add_report,
    log_correlation,
    mean_error,
    model_rows,
    refit,
    shipped_prior,
    terms,
)
from sim_npu.fitting import choose_strength, fit_line, leave_one_out
from sim_npu.measured import A2_ADD, B4_ADD, AddCase
from sim_npu.profiles import SHIPPED


def add_table(cases: Sequence[AddCase], limit: float) -> list[str]:
    """Lines of one add sample; `limit` is the error to stay below."""
    lines = [
        f"{'case':<20} {'measured us':>11} {'model us':>9} {'error':>7}   "
        + "  ".join(f"{u + ' us':>8} {'model':>8} {'error':>6}" for u in ("MTE2", "V", "MTE3"))
    ]
    worst = 0.0
    for case in cases:
        report = add_report(case)
        k = report.kernels[0]
        error = report.total_us / case.total - 1
        worst = max(worst, abs(error))
        units = []
        for unit, measured in (("MTE2", case.mte2), ("V", case.v), ("MTE3", case.mte3)):
            units.append(f"{measured:8.4g} {k.busy_us[unit]:8.4g} {k.busy_us[unit] / measured - 1:+6.0%}")
        lines.append(f"{case.label:<20} {case.total:11.5g} {report.total_us:9.5g} {error:+7.1%}   " + "  ".join(units))
    verdict = "within" if worst <= limit else "NOT within"
    lines.append(f"largest error of the total {worst:.1%}: {verdict} {limit:.0%} (all rows are fit rows)")
    return lines


def naive_fits(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[float, float]]:
    """(launch in µs, µs per byte) per chip and operator, on the fit rows."""
    table = {}
    for key in dict.fromkeys((r.case.chip, r.case.op) for r in rows):
        chosen = [r for r in rows if r.fitted and (r.case.chip, r.case.op) == key]
        a, b = fit_line([r.bytes / 1e6 for r in chosen], [r.case.us for r in chosen])
        table[key] = a, b / 1e6
    return table


def operator_tables(rows: Sequence[Row]) -> list[str]:
    """Lines per chip and operator, then the summary."""
    naive = naive_fits(rows)
    lines: list[str] = []
    summary = [
        f"{'chip':<7} {'operator':<19} {'rows':>9}  {'ideal':>12}  {'as_shipped':>12}  {'naive':>12}  {'log-corr':>21}",
        f"{'':<7} {'':<19} {'fit/held':>9}  {'fit   held':>12}  {'fit   held':>12}  {'fit   held':>12}  "
        f"{'ideal  tiled shipped':>21}",
    ]
    verdicts: list[str] = []
    for chip, op in naive:
        mine = [r for r in rows if (r.case.chip, r.case.op) == (chip, op)]
        lines += ["", f"{op} on {chip}", _HEADER]
        base, slope = naive[chip, op]
        table = [(r, r.ideal, SHIPPED[chip, op].us(r.core, r.moved), base + slope * r.bytes) for r in mine]
        for r, ideal, shipped, simple in table:
            shape = "x".join(map(str, r.case.shape))
            cells = "  ".join(f"{t:8.2f} {t / r.case.us - 1:+5.0%}" for t in (ideal, shipped, simple))
            kind = "fit" if r.fitted else "held out"
            lines.append(f"{r.case.case:>4} {shape:<18} {r.case.dtype:<9} {r.case.us:9.2f}  {cells}  {kind}")
        summary.append(_summary(chip, op, table))
        verdicts.append(_verdict(chip, op, table))
    lines += ["", "Mean error, and correlation of logarithms over all rows", *summary, "", *verdicts]
    lines += _correlations(rows)
    return lines


_HEADER = (
    f"{'case':>4} {'shape':<18} {'dtype':<9} {'measured':>9}  {'ideal':>8} {'err':>5}  {'shipped':>8} {'err':>5}  "
    f"{'naive':>8} {'err':>5}  rows"
)
_Table = list[tuple[Row, float, float, float]]


def _errors(table: _Table, column: int, *, fitted: bool) -> float:
    chosen = [t for t in table if t[0].fitted == fitted]
    return mean_error([t[column] for t in chosen], [t[0].case.us for t in chosen])  # type: ignore[misc]


def _summary(chip: str, op: str, table: _Table) -> str:
    cells = []
    for column in (1, 2, 3):
        cells.append(f"{_errors(table, column, fitted=True):5.1%} {_errors(table, column, fitted=False):6.1%}")
    measured = [t[0].case.us for t in table]
    ideal, shipped = (log_correlation([t[c] for t in table], measured) for c in (1, 2))  # type: ignore[misc]
    tiled = log_correlation([t[0].tiled for t in table], measured)
    n = sum(t[0].fitted for t in table)
    correlations = f"  {ideal:6.3f} {tiled:6.3f} {shipped:7.3f}"
    return f"{chip:<7} {op:<19} {n:>5}/{len(table) - n:<3}  " + "  ".join(cells) + correlations


def _verdict(chip: str, op: str, table: _Table) -> str:
    shipped, naive = _errors(table, 2, fitted=False), _errors(table, 3, fitted=False)
    beats = "below" if shipped < naive else "NOT below"
    small = "within" if shipped <= 0.20 else "NOT within"
    return f"{chip} {op}: held out {shipped:.1%}, {beats} the naive formula's {naive:.1%}, {small} 20 %"


def left_out(rows: Sequence[Row], *, fitted: bool) -> list[str]:
    """Error of each row under a fit to all others of its chip and operator, on average."""
    which = "the fit rows" if fitted else "all rows"
    lines = ["", f"Leave-one-out over {which}, mean error: as_shipped (strength of the prior), naive"]
    for chip, op in dict.fromkeys((r.case.chip, r.case.op) for r in rows):
        mine = [r for r in rows if (r.case.chip, r.case.op) == (chip, op) and (r.fitted or not fitted)]
        x, y = terms(mine)
        prior = shipped_prior(chip)
        strength = choose_strength(x, y, prior)
        shipped = leave_one_out(x, y, prior, strength)
        naive = leave_one_out(np.array([[1.0, r.bytes / 1e6] for r in mine]), y)
        lines.append(f"{chip:<7} {op:<19} {shipped:6.1%} ({strength:g}) {naive:6.1%}")
    return lines


def _correlations(rows: Sequence[Row]) -> list[str]:
    lines = []
    for chip in dict.fromkeys(r.case.chip for r in rows):
        held = [r for r in rows if r.case.chip == chip and not r.fitted]
        shipped = [SHIPPED[chip, r.case.op].us(r.core, r.moved) for r in held]
        measured = [r.case.us for r in held]
        best, tiled, fitted = (
            log_correlation(t, measured) for t in ([r.ideal for r in held], [r.tiled for r in held], shipped)
        )
        lines.append(
            f"{chip}, held-out rows of all operators: log-correlation of the best plan {best:.3f}, of the shipped "
            f"tiling {tiled:.3f} (neither has a constant per operator), of as_shipped {fitted:.3f}"
        )
    return lines


def validation_text() -> str:
    """All tables as text."""
    lines = ["This is a model; every measured figure is public (sim_npu/measured.py).", ""]
    lines += ["A2 add sample, 8192 x 8192 float16 (chip 910b1)", *add_table(A2_ADD, 0.05), ""]
    lines += ["910B4 add samples", *add_table(B4_ADD, 0.15)]
    rows = model_rows()
    lines += operator_tables(rows)
    lines += left_out(rows, fitted=True)
    lines += left_out(rows, fitted=False)
    return "\n".join(lines)


def refit_text() -> str:
    """The fitted table of `sim_npu.profiles`, computed anew."""
    table = refit(model_rows())
    return "\n".join(f'    ("{c}", "{o}"): {fit!r},' for (c, o), fit in table.items())


if __name__ == "__main__":
    print(validation_text())
