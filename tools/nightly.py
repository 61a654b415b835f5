"""Run what is too long for every change, one step after another, and keep the figures.

Each step's output goes to runs/nightly/STEP.log, its figures to runs/nightly/figures.json, and with --write the table
of the last run of every step to docs/nightly.md. A step that was never run is named there as such.

usage: python tools/nightly.py [--write] [--list] [STEP ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "runs" / "nightly"
FIGURES = LOGS / "figures.json"
PAGE = ROOT / "docs" / "nightly.md"
LIMIT = 4 * 3600  # seconds; a step that hangs must not take the rest with it


@dataclasses.dataclass(frozen=True)
class Step:
    """A command, what it shows, and the environment it adds."""

    what: str
    command: tuple[str, ...]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Figure:
    """What a step gave: seconds of wall time, its result, counts, and what it ran on."""

    seconds: float
    result: str  # passed, failed or stopped
    counts: dict[str, int]
    date: str
    commit: str
    jax: str


PYTHON = (sys.executable, "-m")
FINITE = "values_and_gradients or large_means or the_other_rules or rounded_once or gradient_of_gradient or row_length"
STEPS = {
    "lint": Step("Style and types.", ("make", "lint")),
    "tests": Step("Every test, full products included.", ("make", "test", "SELECT=")),
    "tests-new": Step(
        "`fast` and `family`, full products included, on the newer JAX.", ("make", "test-new", "SELECT=fast or family")
    ),
    "checks": Step(
        "`fast` with JAX's internal checks (`jax_enable_checks`).",
        ("make", "test", "SELECT=fast and not nightly"), {"JAX_ENABLE_CHECKS": "1"},
    ),
    "leaks": Step(
        "Moments and engine with `jax_check_tracer_leaks`.",
        (*PYTHON, "pytest", "tests/test_moments.py", "tests/test_engine.py", "-m", "not nightly"),
        {"JAX_CHECK_TRACER_LEAKS": "1"},
    ),
    "nans": Step(
        "Operators on finite data with `jax_debug_nans`: no program's result holds a NaN.",
        (*PYTHON, "pytest", "tests/test_matrix.py", "tests/test_composites.py", "-m", "not nightly", "-k", FINITE),
        {"JAX_DEBUG_NANS": "1"},
    ),
    "peers": Step("Comparisons with PyTorch.", ("make", "peers")),
    "demo": Step("The README's demo.", ("make", "demo")),
    "notebooks": Step("Every notebook, executed.", ("make", "notebooks-check")),
    "claims": Step("Every claim run again: the verdicts of docs/claims.md.", (*PYTHON, "benchmarks.claims", "--check")),
    "templates": Step(
        "docs/kernel_templates.md, computed again.", (*PYTHON, "benchmarks.templates", "--check")
    ),
    "compile-tpu": Step("Every kernel through the TPU compiler.", ("make", "compile-tpu")),
    "compile-gpu": Step("Every kernel through Triton and ptxas, for an H200.", ("make", "compile-gpu")),
}  # fmt: skip


def counts(text: str) -> dict[str, int]:
    """What an output says was counted: tests, notebooks, kernels, rows; {} where it counts nothing.

    >>> counts("== 3 passed, 1 skipped, 2 warnings in 4.20s ==")
    {'passed': 3, 'skipped': 1}
    >>> counts("a.ipynb: ran in 3 s\\nb.ipynb: failed")
    {'passed': 1, 'failed': 1}
    >>> counts("7 of 9 compiled")
    {'passed': 7, 'failed': 2}
    """
    summaries = re.findall(r"^=* ?((?:\d+ \w+, )*\d+ \w+) in [\d.]+s", text, re.M)
    if summaries:
        kept = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", summaries[-1])
        return {name.removesuffix("s") if name == "errors" else name: int(n) for n, name in kept}
    shares = re.findall(r"^(\d+) of (\d+) (?:compiled|verdicts as written|rows as written)", text, re.M)
    if shares:
        good, all_ = map(int, shares[-1])
        return {"passed": good, "failed": all_ - good}
    good, bad = (len(re.findall(rf"^\S+\.ipynb: {word}", text, re.M)) for word in ("ran in", "failed"))
    return {name: n for name, n in (("passed", good), ("failed", bad)) if n}


def version(step: str) -> str:
    """Of the JAX that a step runs on."""
    own = {"tests-new": ".venv-new", "compile-tpu": ".venv-tpu", "compile-gpu": ".venv-gpu"}
    python = f"{own[step]}/bin/python" if step in own else sys.executable
    asked = "import jax; print(jax.__version__)"
    try:
        found = subprocess.run([python, "-c", asked], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "–"
    return found.stdout.strip() or "–"


def commit() -> str:
    """The short name of the commit that is checked out, with a + where files differ from it."""
    name = ("git", "describe", "--always", "--dirty=+", "--exclude=*")
    return subprocess.run(name, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "–"


def run(name: str) -> Figure:
    """Run one step to its end; what it prints is kept in its log."""
    step, begin = STEPS[name], time.monotonic()
    environment = {"JAX_PLATFORMS": "cpu", **os.environ, **step.environment}
    with open(LOGS / f"{name}.log", "w+", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                step.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT
            )
            result = "failed" if done.returncode else "passed"
        except subprocess.TimeoutExpired:
            result = "stopped"
        log.seek(0)
        text = log.read()
    if result == "passed" and re.search(rf"^{re.escape(name)}: skipped|: skipped, no Python", text, re.M):
        result = "skipped"
    date = datetime.date.today().isoformat()
    return Figure(round(time.monotonic() - begin, 1), result, counts(text), date, commit(), version(name))


def rows_of(text: str) -> dict[str, str]:
    """The rows of a page by step, those of steps that ran."""
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    return {name: line for name, line in rows.items() if name in STEPS and "| not run |" not in line}


def page(figures: dict[str, Figure], before: str = "") -> str:
    """docs/nightly.md: a row for every step, run or not; of steps without a figure here the row of the page `before`,
    which another checkout may have written."""
    kept = rows_of(before)
    missing = [name for name in STEPS if name not in figures and name not in kept]
    lines = [
        "# The long run",
        "",
        "Written by `make nightly` (`tools/nightly.py --write`): steps too long for every change, and what each gave",
        "when it last ran. Steps may be run one by one (`python tools/nightly.py --write lint peers`), so rows may",
        "differ in date and commit; a + behind the commit means that files differed from it.",
        "",
        f"**Not run yet:** {', '.join(missing)}." if missing else "Every step has run.",
        "",
        "| step | what | result | passed | failed | skipped | s | JAX | date | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, step in STEPS.items():
        if name not in figures and name in kept:
            lines.append(kept[name])
            continue
        if name in figures:
            f = figures[name]
            failed = f.counts.get("failed", 0) + f.counts.get("error", 0) if f.counts else "–"
            numbers = [f.counts.get("passed", "–"), failed, f.counts.get("skipped", "–")]
            cells = [f"**{f.result}**", *numbers, f"{f.seconds:.0f}", f.jax, f.date, f.commit]
        else:
            cells = ["not run", *["–"] * 7]
        lines.append(f"| {name} | {step.what} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--list", action="store_true", help="list the steps and run none")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="all where none is named")
    options = parser.parse_args()
    if unknown := [name for name in options.steps if name not in STEPS]:
        parser.error(f"no step {unknown[0]!r}; the steps are {', '.join(STEPS)}")
    if options.list:
        for name, step in STEPS.items():
            print(f"{name:12} {step.what}")
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    figures = {}
    if FIGURES.exists():
        figures = {name: Figure(**f) for name, f in json.loads(FIGURES.read_text()).items() if name in STEPS}
    chosen = options.steps or list(STEPS)
    for name in chosen:
        print(f"{name}: {STEPS[name].what}", flush=True)
        figures[name] = f = run(name)
        print(f"  {f.result} after {f.seconds:.0f} s {f.counts or ''}", flush=True)
        FIGURES.write_text(json.dumps({n: dataclasses.asdict(f) for n, f in figures.items()}, indent=1))
        if options.write:
            before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
            PAGE.write_text(page(figures, before), encoding="utf-8")
    return int(any(figures[name].result in ("failed", "stopped") for name in chosen))


if __name__ == "__main__":
    sys.exit(main())
