"""docs/claims.md: a row for every claim, and below the table what explains it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import jax

from benchmarks.claims.registry import BASES, CLAIMS, RULE, Claim, Outcome, Verdict

PATH = Path(__file__).resolve().parents[2] / "docs" / "claims.md"


def row(claim: Claim, outcome: Outcome) -> str:
    """The claim's line of the table."""
    figures = "<br>".join(map(str, outcome.figures))
    return f"| {claim.id} | {claim.words} | {outcome.ran} ({claim.basis}) | {figures} | **{outcome.verdict}** |"


def page(outcomes: Mapping[str, Outcome]) -> str:
    """The whole page for outcomes by claim id."""
    verdicts = [outcome.verdict for outcome in outcomes.values()]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in get_args(Verdict))
    lines = [
        "# Claims, put to the test",
        "",
        "What articles about fused, tiled and synchronised normalization claim, and what came out here. Written by "
        f"`make claims` (`python -m benchmarks.claims --write`) on {datetime.date.today()}, jax {jax.__version__}: "
        f"{counts}.",
        "",
        f"**Verdicts** follow a rule in code (`benchmarks/claims/registry.py`). {RULE}",
        "",
        *(f"- *{basis}*: {words}." for basis, words in BASES.items()),
        "",
        "| | claim | what we ran | figures | verdict |",
        "|---|---|---|---|---|",
        *(row(CLAIMS[id], outcome) for id, outcome in outcomes.items()),
        "",
        "What must be known to read a figure, and the cases behind it:",
    ]
    for id, outcome in outcomes.items():
        below = [text for text in (outcome.note, outcome.detail) if text]
        if below:
            lines += ["", f"## {id}", "", "\n\n".join(below)]
    return "\n".join(lines) + "\n"


def rows_of(text: str) -> dict[str, str]:
    """The lines of a page's first table by claim id."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.split(" | ")[0][2:] in CLAIMS}


def verdicts_of(text: str) -> dict[str, str]:
    """The verdicts of a page by claim id."""
    found = {id: re.search(r"\*\*([a-z ]+)\*\* \|$", row) for id, row in rows_of(text).items()}
    return {id: match[1] for id, match in found.items() if match}
