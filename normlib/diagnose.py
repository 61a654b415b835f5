"""Health of a model's batch statistics: what is wrong, in which channels, why, and what helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from normlib._statistics import Tree, each_layer, with_moments
from normlib._tree import Path, names_of

# kind -> (cause, cure)
ADVICE = {
    "invalid": (
        "the running mean or variance is not finite, or the variance is negative",
        "measure them again with precise_batch_stats; train with skip_nonfinite_update=True",
    ),
    "underflow": (
        "the stored variance is zero or below its dtype's normal numbers, though the channel varies",
        "keep statistics in float32 (force_float32_reductions=True), and measure them again with precise_batch_stats",
    ),
    "drift": (
        "training and evaluation normalise differently: running statistics lag, or these data are of another kind",
        "precise_batch_stats on training data or adapt_batch_stats on target data; a lower momentum; a larger batch",
    ),
    "dead": (
        "the channel is constant over the batch, so y is the bias whatever x is",
        "look at the layer before (dead activations, a zero kernel); lower the learning rate or prune the channel",
    ),
    "eps": (
        "the batch's variance is below eps, which then sets the scale of y instead of the data",
        "rescale the layer's input, or choose a smaller eps (recommended_eps)",
    ),
    "gradient": (
        "gradients of scale or bias are zero, or would be, in the half-precision dtype",
        "keep parameters and gradients in float32, or scale the loss; bfloat16 has float32's range",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One thing wrong with one layer.

    Attributes:
      layer: path of its node, "" for a bare layer.
      kind: invalid, underflow, drift, dead, eps or gradient.
      channels: indices of the channels concerned, in the flattened feature shape.
      of: how many channels the layer has.
      worst: the largest measure of it: for drift standard deviations (or doublings of the variance), for eps
        eps / variance, else the share of channels.
    """

    layer: str
    kind: str
    channels: tuple[int, ...]
    of: int
    worst: float

    @property
    def cause(self) -> str:
        """What it means."""
        return ADVICE[self.kind][0]

    @property
    def cure(self) -> str:
        """What helps."""
        return ADVICE[self.kind][1]

    def __str__(self) -> str:
        name = self.layer or "the layer"
        return (
            f"{name}: {self.kind} in {len(self.channels)} of {self.of} channels (worst {self.worst:.3g})\n"
            f"  cause: {self.cause}\n  cure: {self.cure}"
        )


@dataclass(frozen=True)
class BatchStatsReport:
    """What `batch_stats_report` found.

    Attributes:
      findings: in the order of the tree's layers.
      drift: layer -> float array, one value per channel: |batch mean - running mean| in running standard deviations.
    """

    findings: tuple[Finding, ...]
    drift: Mapping[str, np.ndarray]

    def __str__(self) -> str:
        if not self.findings:
            return f"{len(self.drift)} layers, nothing found"
        return "\n".join(map(str, self.findings))


def batch_stats_report(
    batch_stats: Tree,
    moments: Tree,
    *,
    eps: float = 1e-5,
    drift: float = 0.5,
    grads: Tree | None = None,
    half: Any = jnp.float16,
) -> BatchStatsReport:
    """Compare the running statistics (evaluation mode) with those of one batch (training mode), channel by channel.

        drift     |mean_b - mean_r| / sqrt(var_r + eps), or |log2((var_b + eps) / (var_r + eps))|, above `drift` by
                  more than 4 standard errors of a batch of n (sqrt(var_b / n) and sqrt(2 / (n - 1)) / ln 2)
        dead      var_b = 0, or rounding's share of it: var_b <= (2**-20 mean_b)**2
        eps       0 < var_b < eps
        underflow var_r below its dtype's smallest normal number in a channel that is not dead
        invalid   var_r < 0 or NaN or infinite, or such a mean
        gradient  a gradient that is zero in the dtype `half`, of a channel that is not dead

    Args:
      batch_stats: running statistics as stored, concrete arrays, `mean` and `var` of shape [C] beside each other.
      moments: tree of `Moments` of a batch, from `linen_tools.apply_with_moments` or `nnx_tools.call_with_moments`.
      eps: that of the norms.
      drift: threshold in standard deviations, and in doublings of the variance.
      grads: gradients of the parameters for the same batch; leaves `scale` and `bias` beside the statistics' paths
        are looked at.
      half: the 16-bit dtype in which gradients are, or would be, kept.

    Returns:
      `BatchStatsReport`; print it.

    Raises:
      ValueError: if a layer has no moments, for `drift` <= 0, or eps < 0.

    >>> from normlib import batch_moments
    >>> stats = {"bn": {"mean": jnp.zeros(1), "var": jnp.ones(1)}}
    >>> print(batch_stats_report(stats, {"bn": batch_moments(jnp.full((8, 1), 5.0))}))
    ... # doctest: +ELLIPSIS
    bn: drift in 1 of 1 channels (worst 16.6)
    ...
    bn: dead in 1 of 1 channels (worst 1)
    ...
    """
    if not drift > 0:
        raise ValueError(f"`drift` is a threshold in standard deviations and must be positive; got {drift}.")
    if not eps >= 0:
        raise ValueError(f"`eps` must be >= 0; got {eps}.")
    findings: list[Finding] = []
    drifts: dict[str, np.ndarray] = {}
    given = _affine_gradients(grads)
    measured: list[Any] = []

    def keep(mean, var, m):
        measured.append(m)
        return mean, var

    with_moments(batch_stats, moments, keep)
    left = iter(measured)

    def look(path, stored):
        mean, var = (np.asarray(t).reshape(-1) for t in stored)
        batch = jax.tree.map(lambda t: np.asarray(t).reshape(-1), next(left))
        marks, drifts["/".join(path)] = _marks(mean, var, batch, eps, drift)
        dead = marks["dead"][0]
        if path in given:
            lost = _lost(given[path], half, dead.size) & ~dead
            marks["gradient"] = lost, lost / max(lost.size, 1)
        for kind, (where, size) in marks.items():
            channels = tuple(int(i) for i in np.flatnonzero(where))
            if channels:
                worst = float(len(channels) / dead.size) if kind not in ("drift", "eps") else float(size[where].max())
                findings.append(Finding("/".join(path), kind, channels, dead.size, worst))
        return stored

    each_layer(batch_stats, look)
    return BatchStatsReport(tuple(findings), drifts)


def _marks(mean, var, batch, eps, drift) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """kind -> (which channels, how much), and the drift of the mean."""
    smallest = float(ml_dtypes.finfo(var.dtype).smallest_normal)
    mean, var = mean.astype(np.float64), var.astype(np.float64)
    n = np.maximum(batch.count, 1).astype(np.float64)
    batch_mean, batch_var = batch.mean.astype(np.float64), batch.m2.astype(np.float64) / n
    seen = batch.count > 0
    invalid = ~(np.isfinite(mean) & np.isfinite(var) & (var >= 0))
    usable = seen & ~invalid & np.isfinite(batch_mean) & np.isfinite(batch_var)
    room = np.where(invalid, 1, var) + max(eps, np.finfo(np.float64).tiny)
    with np.errstate(invalid="ignore", divide="ignore"):
        moved = np.where(usable, abs(batch_mean - mean) / np.sqrt(room), np.nan)
        ratio = np.where(usable, abs(np.log2((batch_var + max(eps, np.finfo(np.float64).tiny)) / room)), np.nan)
        noise = 4 * np.sqrt(batch_var / room / n), 4 * np.sqrt(2 / np.maximum(n - 1, 1)) / np.log(2)
        drifted = (moved > drift + noise[0]) | (ratio > drift + noise[1])
    dead = seen & (batch_var <= (2.0**-20 * batch_mean) ** 2)
    small = seen & ~dead & (batch_var < eps)
    under = ~invalid & seen & ~dead & (var < smallest)
    ones = np.ones(mean.shape)
    marks = {
        "invalid": (invalid, ones), "underflow": (under, ones), "drift": (drifted, np.fmax(moved, ratio)),
        "dead": (dead, ones), "eps": (small, eps / np.where(small, batch_var, 1)),
    }  # fmt: skip
    return marks, moved


def _affine_gradients(grads: Tree | None) -> dict[Path, list[np.ndarray]]:
    found: dict[Path, list[np.ndarray]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        *node, name = names_of(path)
        if name in ("scale", "bias"):
            found.setdefault(tuple(node), []).append(np.asarray(leaf).reshape(-1))
    return found


def _lost(gradients: list[np.ndarray], half: Any, channels: int) -> np.ndarray:
    """Channels with a gradient that is zero in `half`."""
    lost = np.zeros(channels, bool)
    for g in gradients:
        if g.size == channels:
            with np.errstate(over="ignore"):
                lost |= g.astype(half) == 0
    return lost
