"""Fits of a few non-negative terms to a few measured times, and how strongly to hold them to a prior.

    minimise  Σ |Xθ / y − 1|  +  strength · Σ ((θ − prior) / scale)²,   θ ≥ 0

Absolute relative errors let one odd row go; the prior speaks where rows are few. The strength is chosen among
`STRENGTHS` by leave-one-out error on the rows of the fit, so that nothing else is looked at.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STRENGTHS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
_FLOOR = 0.02  # relative errors below this weigh alike
_TURNS = 30


@dataclass(frozen=True)
class Prior:
    """What θ is without measurements, and by how much each term may differ from it."""

    value: np.ndarray
    scale: np.ndarray


def fit_terms(x: np.ndarray, y: np.ndarray, prior: Prior | None = None, strength: float = 0.0) -> np.ndarray:
    """θ of the fit above, by reweighted least squares.

    Args:
      x: `[rows, terms]`.
      y: `[rows]`, measured, positive.
      prior: needed where `strength` is not 0.
      strength: how strongly θ is held to the prior.

    >>> fit_terms(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]]), np.array([5.0, 7.0, 11.0])).round(6)
    array([3., 2.])
    """
    if strength and prior is None:
        raise ValueError(f"`prior` is needed with `strength` {strength}; pass a Prior or strength=0.")
    relative = x / y[:, None]
    weight = np.ones(len(y))
    theta = np.zeros(x.shape[1])
    for _ in range(_TURNS):
        rows, target = relative * weight[:, None], weight
        if prior is not None and strength:
            pull = np.sqrt(strength) / prior.scale
            rows, target = np.vstack([rows, np.diag(pull)]), np.concatenate([weight, pull * prior.value])
        before, theta = theta, _non_negative(rows, target)
        if (np.abs(theta - before) <= 1e-6 * theta).all():
            break
        weight = 1.0 / np.sqrt(np.maximum(np.abs(relative @ theta - 1.0), _FLOOR))
    return theta


def _non_negative(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with θ ≥ 0: the best of all choices of terms that are not 0 (three terms at most)."""
    terms = rows.shape[1]
    # Normal equations of the terms scaled to length 1; a trace of the diagonal more lets fewer rows than terms pass.
    length = np.sqrt(np.einsum("rt,rt->t", rows, rows))
    length = np.where(length > 0, length, 1.0)
    unit = rows / length
    gram, right = unit.T @ unit + 1e-12 * np.eye(terms), unit.T @ target
    best, least = np.zeros(terms), float(target @ target)
    for chosen in _choices(terms):
        part = np.linalg.solve(gram[np.ix_(chosen, chosen)], right[chosen])
        if (part < 0).any():
            continue
        error = unit[:, chosen] @ part - target
        if (size := float(error @ error)) < least * (1 - 1e-12):
            best, least = np.zeros(terms), size
            best[chosen] = part / length[chosen]
    return best


@functools.cache
def _choices(terms: int) -> list[np.ndarray]:
    """Every set of terms but the empty one, as indices, small sets first."""
    sets = (c for count in range(1, terms + 1) for c in itertools.combinations(range(terms), count))
    return [np.array(c) for c in sets]


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(a, b), both not negative, for y ≈ a + b·x by least absolute relative error.

    >>> fit_line([1.0, 2.0, 4.0], [5.0, 7.0, 11.0])
    (3.0, 2.0)
    """
    xs = np.asarray(x, float)
    a, b = fit_terms(np.stack([np.ones_like(xs), xs], axis=1), np.asarray(y, float))
    return round(float(a), 9), round(float(b), 9)


def leave_one_out(x: np.ndarray, y: np.ndarray, prior: Prior | None = None, strength: float = 0.0) -> float:
    """Mean relative error of each row under the fit to the others."""
    errors = []
    for i in range(len(y)):
        others = np.arange(len(y)) != i
        theta = fit_terms(x[others], y[others], prior, strength)
        errors.append(abs(float(x[i] @ theta) / y[i] - 1.0))
    return float(np.mean(errors))


def choose_strength(x: np.ndarray, y: np.ndarray, prior: Prior) -> float:
    """The strength of least leave-one-out error on these rows; of equals (to 0.1 %), the strongest."""
    errors = [leave_one_out(x, y, prior, s) for s in STRENGTHS]
    return max(s for s, e in zip(STRENGTHS, errors) if e <= min(errors) + 1e-3)
