"""What a claim is, and the rule that turns its figures into a verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["confirmed", "partly", "not confirmed"]
Basis = Literal["model", "count", "measured"]
ENOUGH, PARTLY = 0.9, 0.5  # shares of the claimed figure

RULE = (
    "A figure reaches its claim at 90 % of what is asked and half-reaches it at 50 %; a threshold (a figure given as "
    "“at least”) is reached exactly or not at all. All figures reached: confirmed. None even half-reached: not "
    "confirmed. Anything else: partly. The lower end of a claimed range is what is asked; of an “up to”, the best case "
    "is compared."
)
BASES = {
    "model": "laid out by sim_npu on the chip 910b2; assumed constants and all, a model and not a measurement",
    "count": "counted by the compiler or from shapes; exact for what is counted",
    "measured": "run on CPU",
}


@dataclass(frozen=True)
class Figure:
    """One number of ours, and what the claim asks of it.

    Attributes:
      name: what it is.
      value: larger is better.
      asked: the claimed figure in the same unit; None for a figure that is only shown.
      unit: written after the number.
      threshold: reached exactly or not at all.

    >>> Figure("faster", 11.0, asked=20.0).reached
    0.55
    """

    name: str
    value: float
    asked: float | None = None
    unit: str = " %"
    threshold: bool = False

    @property
    def reached(self) -> float:
        """Share of the claimed figure; 0 for one in the wrong direction, and below a threshold."""
        assert self.asked is not None
        share = self.value / self.asked
        return (1.0 if share >= 1 else 0.0) if self.threshold else max(share, 0.0)

    def __str__(self) -> str:
        number = (f"{self.value:.3g}" if abs(self.value) < 100 else f"{self.value:.0f}").replace("-", "−")
        asked = "" if self.asked is None else f" ({'at least ' if self.threshold else ''}{self.asked:g} asked)"
        return f"{self.name}: {number}{self.unit}{asked}"


@dataclass(frozen=True)
class Outcome:
    """What came out.

    Attributes:
      ran: what we ran, in a sentence.
      figures: in order of importance.
      note: what a reader must know to read the figures; shown below the table.
      detail: the cases as a table in markdown, shown there too.
    """

    ran: str
    figures: tuple[Figure, ...]
    note: str = ""
    detail: str = ""

    @property
    def verdict(self) -> Verdict:
        """By `RULE`."""
        reached = [figure.reached for figure in self.figures if figure.asked is not None]
        if all(share >= ENOUGH for share in reached):
            return "confirmed"
        return "not confirmed" if all(share < PARTLY for share in reached) else "partly"


@dataclass(frozen=True)
class Claim:
    """A claim of section 5 of the operators' description, or a part of one that is judged by itself.

    Attributes:
      id: short name.
      words: what is claimed, with its figure.
      basis: how it was tested.
      seconds: about how long it takes on 2 cores; claims of a few seconds are tested to reproduce.
      run: does it.
    """

    id: str
    words: str
    basis: Basis
    seconds: int
    run: Callable[[], Outcome]


CLAIMS: dict[str, Claim] = {}


def claim(id: str, words: str, *, basis: Basis, seconds: int) -> Callable[[Callable[[], Outcome]], Callable]:
    """Decorator that registers a function as the test of a claim.

    Raises:
      ValueError: when `id` is taken.
    """

    def register(run: Callable[[], Outcome]) -> Callable[[], Outcome]:
        if id in CLAIMS:
            raise ValueError(f"`id` {id!r} is taken by {CLAIMS[id].run.__name__}; give the claim another.")
        CLAIMS[id] = Claim(id, words, basis, seconds, run)
        return run

    return register


def less(before: float, after: float) -> float:
    """Per cent saved: 100 · (1 − after / before)."""
    return 100 * (1 - after / before)


def faster(before: float, after: float) -> float:
    """Per cent gained in speed: 100 · (before / after − 1)."""
    return 100 * (before / after - 1)


def change(before: float, after: float) -> str:
    """Change in per cent, signed.

    >>> change(4.0, 3.0), change(3.0, 4.0)
    ('−25 %', '+33 %')
    """
    return f"{100 * (after / before - 1):+.0f} %".replace("-", "−")
