"""Which tiling ops-nn's rules pick for a norm, which one the simulator picks for ours, and what each would take.

Norms of rows here, those over channels in `benchmarks.channel_templates`.

python -m benchmarks.templates [--write]      # --write: docs/kernel_templates.md
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import sim_npu
from benchmarks.channel_templates import rows as channel_rows
from benchmarks.channel_templates import section
from normlib import kernels
from sim_npu import TilePlan
from sim_npu.footprint import CapacityError

PATH = Path(__file__).resolve().parents[1] / "docs" / "kernel_templates.md"
LENGTHS = (40, 64, 256, 768, 1024, 2000, 4096, 8192, 12288, 16384, 32768, 65536, 262_144)
ROWS = 4096
UB = 192 * 1024


@dataclass(frozen=True)
class Rule:
    """ops-nn's choice for one operator on A2: (template, how our kernel is tiled to do the same)."""

    kernel: Callable[..., Any]
    choose: Callable[[int, int, str], tuple[str, TilePlan]]


def _several(rows: int) -> TilePlan:
    return TilePlan(rows=max(1, rows), residency="row")


def _split(chunk: int) -> TilePlan:
    return TilePlan(rows=1, chunk=chunk, residency="stream")


def rms_norm_rule(rows: int, d: int, dtype: str) -> tuple[str, TilePlan]:
    """RmsNorm on A2: MERGE_N for short rows, NORMAL while a row fits the buffer factor, else SPLIT_D.

    Source: ops-nn's tiling code, restated: D <= 2000: rows per loop = UB / (D * 16 + 260); D <= 12288 (16-bit) or 10240
    (32-bit): a row at a time; above, the row is split.
    """
    aligned = -(-d // 16) * 16
    factor = 12288 if dtype != "float32" else 10240
    if d <= 2000:
        return "MERGE_N", _several(min(UB // (aligned * 16 + 260), -(-rows // 48)))
    if d <= factor:
        return "NORMAL", TilePlan(rows=1, chunk=None if d <= 4096 else 4096, residency="row")
    return "SPLIT_D", _split(factor // 2)


def layer_norm_rule(rows: int, d: int, dtype: str) -> tuple[str, TilePlan]:
    """LayerNormV4 on A2: Transpose for short unaligned rows, MergeN for several rows a loop, else Common.

    Source: ops-nn's tiling code, restated: D <= 64 and no multiple of 16: Transpose; more than two rows per core and
    (D * bytes < (UB - 2 KiB) / 8 or D <= 1280): MergeN; else the library's LayerNorm, a row at a time or in pieces.
    """
    size = 2 if dtype != "float32" else 4
    if d <= 64 and d % 16:
        return "Transpose", _several(min(64, -(-rows // 48)))
    if rows > 96 and (d * size < (UB - 2048) // 8 or d <= 1280):
        return "MergeN", _several(min(UB // (d * 20 + 640), -(-rows // 48)))
    return "Common", TilePlan(rows=1, chunk=2048, residency="row") if d <= 8192 else _split(4096)


def add_rms_norm_rule(rows: int, d: int, dtype: str) -> tuple[str, TilePlan]:
    """AddRmsNorm on A2: MERGE_N for short rows, NORMAL while a row fits the buffer factor, else CUT_D.

    Source: ops-nn's tiling code, restated: 18 bytes an element (16-bit) or 24, plus 260 a row; factor 12096 or 9696.
    """
    wide = dtype == "float32"
    if d <= 2000:
        aligned = -(-d // 16) * 16
        return "MERGE_N", _several(min(UB // (aligned * (24 if wide else 18) + 260), -(-rows // 48)))
    if d <= (9696 if wide else 12096):
        return "NORMAL", TilePlan(rows=1, chunk=2048, residency="row")
    return "CUT_D", _split(4096)


RULES = {
    "RmsNorm": Rule(kernels.rms_norm, rms_norm_rule),
    "LayerNormV4": Rule(kernels.layer_norm, layer_norm_rule),
    "AddRmsNorm": Rule(kernels.add_rms_norm, add_rms_norm_rule),
}


@dataclass(frozen=True)
class Row:
    """One shape: what either picks and what our kernel takes that way, µs (None: it does not fit)."""

    operator: str
    d: int
    dtype: str
    theirs: str
    their_us: float | None
    ours: str
    our_us: float
    default_us: float


def template(plan: TilePlan, d: int) -> str:
    """The kind of a plan, in ops-nn's terms."""
    if plan.residency == "stream":
        return f"split row, {plan.rows} × {plan.chunk}"
    kind = "several rows" if (plan.rows or 1) > 1 else "one row"
    return f"{kind}, {plan.rows} × {d if plan.chunk is None else plan.chunk}"


def rows(chip: str = "910b2", lengths: Sequence[int] = LENGTHS, dtypes=("bfloat16", "float32")) -> Iterator[Row]:
    """Every operator, length and dtype."""
    for name, rule in RULES.items():
        for dtype in dtypes:
            for d in lengths:
                shapes = rule.kernel.example_arrays((ROWS, d), jnp.dtype(dtype))  # type: ignore[attr-defined]
                label, plan = rule.choose(ROWS, d, dtype)
                search = sim_npu.rank_plans(
                    rule.kernel, *shapes, chip=chip, plans=[p for p in rule.kernel.plan_space(*shapes) if p.rows]  # type: ignore[attr-defined]
                )  # fmt: skip
                default = sim_npu.simulate(rule.kernel, *shapes, chip=chip).total_us
                yield Row(
                    name, d, dtype, label, _us(rule.kernel, shapes, plan, chip), template(search.best.plan, d),
                    search.best.total_us, default,
                )  # fmt: skip


def _us(kernel: Callable[..., Any], shapes: Sequence[Any], plan: TilePlan, chip: str) -> float | None:
    """Time under a plan, with fewer rows where so many do not fit beside what our kernel keeps."""
    while True:
        try:
            return sim_npu.simulate(kernel, *shapes, chip=chip, plan=plan, explain_capacity=False).total_us
        except CapacityError:
            if not plan.rows or plan.rows == 1:
                return None
            plan = plan.replace(rows=plan.rows // 2)


def page(found: Sequence[Row], chip: str) -> str:
    """docs/kernel_templates.md."""
    today = datetime.date.today()
    faster = [r.their_us / r.our_us for r in found if r.their_us]
    median = sorted(faster)[len(faster) // 2]
    lines = [
        f"""# Templates of the kernels

Written by `python -m benchmarks.templates --write` on {today}, chip {chip}.

## Norms of rows, {ROWS} of them

ops-nn picks a kernel template by rules on the row's length (column *ops-nn*, its A2 rules restated in the code). Here
one kernel is tiled by a plan, and `sim_npu.best_plan` picks the plan (column *ours*). Both columns of µs are **our
kernel on the simulator** under either choice, so they compare choices, not implementations; «–»: the template leaves no
room for what our kernel keeps (float32 of x and of the sum). *default* is what a norm gets without a search
(`NpuPass(tune=True)` searches once per shape).

Over {len(faster)} shapes our choice is {min(faster):.2f} to {max(faster):.2f} times as fast as ops-nn's, median
{median:.2f}. Where they differ, the reason is one of three:

- several rows per tile pay as long as two fit, since every vector instruction has a fixed cost: ops-nn's factor (12288
  elements) keeps one row resident where two would fit in pieces;
- long rows are split with two or more rows side by side, for the same reason; ops-nn splits one row at a time;
- short unaligned rows are padded in the buffer by the copy unit; a transposition is not needed to fill lanes when many
  rows make one instruction long.

| operator | dtype | D | ops-nn | µs | ours | µs | default µs |
|---|---|---|---|---|---|---|---|"""
    ]
    for r in found:
        theirs = "–" if r.their_us is None else f"{r.their_us:.1f}"
        lines.append(
            f"| {r.operator} | {r.dtype} | {r.d} | {r.theirs} | {theirs} | {r.ours} | {r.our_us:.1f} "
            f"| {r.default_us:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, write docs/kernel_templates.md, or fail where the page's rows are others."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.templates", description=main.__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PATH.name}")
    parser.add_argument("--check", action="store_true", help=f"fail where a row is not in {PATH.name}")
    parser.add_argument("--chip", default="910b2", help="chip of the simulator")
    options = parser.parse_args(arguments)
    text = page(list(rows(options.chip)), options.chip) + section(list(channel_rows(options.chip)))
    if options.write:
        PATH.write_text(text, encoding="utf-8")
    if options.check:
        table = [line for line in text.splitlines() if line.startswith("| ")]
        written = set(PATH.read_text(encoding="utf-8").splitlines())
        other = [line for line in table if line not in written]
        print(*other, f"{len(table) - len(other)} of {len(table)} rows as written", sep="\n")
        return int(bool(other))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
