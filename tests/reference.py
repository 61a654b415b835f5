"""The oracle: norms and their gradients in float64 NumPy, and the tolerances of the contract."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

EPS32 = 2.0**-24
LARGE = 20_000


def f64(t):
    return None if t is None else np.asarray(t).astype(np.float64)


@dataclass
class Reference:
    """Everything a norm and its backward give, in float64, and what the tolerances are measured against."""

    y: np.ndarray
    dx: np.ndarray
    dscale: np.ndarray  # per entry of x, before summing to the parameter's shape
    dbias: np.ndarray
    mean: np.ndarray
    var: np.ndarray
    count: np.ndarray
    y_size: np.ndarray
    dx_size: np.ndarray


def norm(
    x, scale=None, bias=None, dy=None, *, axes, groups=None, channel=-1, eps, centered=True, where=None, offset=0.0
):
    """Reference of any norm: `scale`, `bias`, `where` broadcast to x; with `groups` the channel axis is reduced too."""
    x, dy = f64(x), np.zeros(x.shape) if dy is None else f64(dy)
    scale = np.ones(()) if scale is None else f64(scale) + offset
    bias = np.zeros(()) if bias is None else f64(bias)
    w = np.broadcast_to(True if where is None else np.asarray(where), x.shape).astype(np.float64)
    seen = np.where(w > 0, x, 0)

    def total(t):
        """Sum over the set of each entry, at x's shape again."""
        t = t.sum(axis=tuple(axes), keepdims=True)
        if groups is not None:
            c = channel % t.ndim
            split = t.reshape(*t.shape[:c], groups, -1, *t.shape[c + 1 :]).sum(c + 1)
            t = np.repeat(split, x.shape[c] // groups, axis=c)
        return np.broadcast_to(t, x.shape)

    n = total(w)
    safe = np.maximum(n, 1)
    mean = total(seen) / safe if centered else np.zeros(x.shape)
    var = total(w * np.where(w > 0, x - mean, 0) ** 2) / safe
    rstd = np.where(n > 0, 1 / np.sqrt(var + eps), 0)
    with np.errstate(invalid="ignore"):
        xhat = np.where(n > 0, (x - mean) * rstd, 0)
    g = dy * scale
    clean = np.where((w > 0) | (g != 0), xhat, 0)
    a, b = (total(g) / safe if centered else 0.0), total(g * clean) / safe
    dx = g * rstd - w * rstd * (a + clean * b)
    y = xhat * scale + bias
    known = np.nan_to_num(xhat, posinf=0, neginf=0)
    rms_g = np.sqrt(total(g * g) / np.maximum(total(np.ones(x.shape)), 1))
    return Reference(
        y, dx, dy * clean, dy + 0.0, mean, var, n,
        np.max(np.broadcast_arrays(abs(known * scale + bias), abs(known * scale), abs(bias), abs(scale)), axis=0),
        np.max([abs(dx), abs(rstd * g), abs(rstd * clean * b), abs(rstd) * rms_g], axis=0),
    )  # fmt: skip


def ulp(size, dtype):
    """Distance of neighbouring numbers of `dtype` at `size`."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(size, float(info.smallest_normal))))
    return 2.0 ** (exponent - info.nmant)


def assert_rounded(actual, expected, size, *, most=3.0, all_=8.0, what="y", share=1e-3):
    """|actual - expected| <= 3 ulp for all but `share` of the entries and 8 ulp for all, ulp taken at `size`."""
    dtype = np.asarray(actual).dtype
    actual = np.asarray(actual)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    if not actual.size:
        return
    tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
    flush = lambda t: np.where(abs(t) < tiny, 0, t)  # noqa: E731  # XLA on CPU flushes subnormals
    error = abs(flush(f64(actual)) - flush(expected)) / ulp(size, dtype)
    assert np.isfinite(error).all(), f"{what} is not finite"
    assert error.max() <= all_, f"{what}: {error.max():.2f} ulp"
    if error.size >= LARGE:  # entries of one set share the rounding of its statistics: a share needs many sets
        assert (error > most).mean() <= share, f"{what}: {100 * (error > most).mean():.2f} % beyond {most} ulp"


def assert_sum(actual, terms, keep_shape, *, dtype=np.float32, what="sum"):
    """`actual` is the sum of `terms` to `keep_shape`, within 2**-24 * (16 sqrt(n) rms + 4 |sum|), then rounded."""
    axes = tuple(i for i, (a, b) in enumerate(zip(terms.shape, keep_shape)) if a != b)
    n = np.prod([terms.shape[a] for a in axes]) if axes else 1
    expected = terms.sum(axes, keepdims=True)
    rms = np.sqrt((terms**2).mean(axes, keepdims=True)) if terms.size else 0 * expected
    bound = EPS32 * (16 * np.sqrt(n) * rms + 4 * abs(expected)) + 1e-38
    if np.dtype(dtype) != np.float32:
        bound = bound + ulp(abs(expected), dtype)
    error = abs(f64(actual).reshape(expected.shape) - expected)
    assert (error <= bound).all(), f"{what}: {(error / bound).max():.2f} times the bound"
