"""The quantisers once more, in NumPy float32 as the contract words them: by the reciprocal, then products only.

Values below the smallest normal float32 count as 0, as XLA on CPU has it.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

F = np.float32
TINY = F(2.0**-126)
INTEGERS = {"int8": (-128, 127), "uint8": (0, 255), "int4": (-8, 7)}
FLOATS = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float4_e2m1fn": 6.0}
LARGEST = {**{k: v[1] for k, v in INTEGERS.items()}, **FLOATS}
EMAX = {"float4_e2m1fn": 2, "float8_e4m3fn": 8, "float8_e5m2": 15}


def flushed(t):
    t = np.asarray(t, F)
    return np.where(abs(t) < TINY, np.copysign(F(0), t), t)


def half_away(v):
    """Exact in float64, which holds v + 0.5."""
    wide = v.astype(np.float64)
    return np.copysign(np.floor(abs(wide) + 0.5), wide).astype(F)


MODES = {"rint": np.rint, "half_away": half_away, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc}


def codes(v, dtype, zero_point=0, lowest=None, mode="rint"):
    """Codes of v = n in units of the step, float32."""
    name = np.dtype(dtype).name
    if name in FLOATS:
        kept = np.clip(v, F(-FLOATS[name]), F(FLOATS[name]))
        if name == "float4_e2m1fn":
            kept = np.where(np.isnan(v), F(0), kept)
        return kept.astype(dtype)
    low, high = INTEGERS[name]
    r = MODES[mode](v)
    whole = np.clip(np.where(np.isnan(r), 0, r), -(2.0**40), 2.0**40).astype(np.int64) + zero_point
    return np.where(np.isnan(r), 0, np.clip(whole, low if lowest is None else lowest, high)).astype(dtype)


def static(n, scale, dtype, zero_point=0, *, multiply=False, mode="rint", lowest=None):
    scale = np.asarray(scale, F)
    factor = scale if multiply else F(1) / scale
    return codes(flushed(flushed(n) * factor), dtype, zero_point, lowest, mode)


def dynamic(n, dtype, *, smooth=None, floor=TINY, mode="rint", group=None):
    """(codes, scale): rows along the last axis, or groups of it."""
    n = flushed(n)
    n = n if smooth is None else flushed(n * np.asarray(smooth, F))
    shape, largest = n.shape, LARGEST[np.dtype(dtype).name]
    rows = n.reshape(*shape[:-1], -1, group) if group else n[..., None, :]
    scale = np.maximum(abs(rows).max(-1, keepdims=True, initial=0) / F(largest), F(floor))
    v = flushed(rows * (F(1) / scale))
    return codes(v, dtype, lowest=-largest, mode=mode).reshape(shape), scale[..., 0]


def asymmetric(n, *, floor=TINY, mode="rint"):
    """(codes, scale, zero_point); the floor of a row is at least 2**-21 of its largest magnitude."""
    n = flushed(n)
    low, high = n.min(-1, keepdims=True), n.max(-1, keepdims=True)
    least = np.maximum(flushed(np.maximum(abs(low), abs(high)) * F(2.0**-21)), F(floor))
    scale = np.maximum((high - low) / F(255), least)
    inverse = F(1) / scale
    offset = np.rint(low * inverse)
    zero_point = -128 - np.where(np.isnan(offset), 0, offset).astype(np.int64)
    return codes(n * inverse, "int8", zero_point, mode=mode), scale, zero_point


def mx(n, dtype, scale_alg=0):
    """(codes, bytes) of blocks of 32, the exponent by integer arithmetic on Python's exact fractions of float64."""
    n, name = flushed(n), np.dtype(dtype).name
    pad = -n.shape[-1] % 32
    rows = np.pad(n, [(0, 0)] * (n.ndim - 1) + [(0, pad)]).reshape(*n.shape[:-1], -1, 32)
    amax = abs(rows).max(-1).astype(np.float64)
    finite = np.where(np.isfinite(amax), amax, 0)
    fraction, exponent = np.frexp(finite)  # of float64, where no float32 is subnormal: amax = fraction * 2**exponent
    if scale_alg:
        fraction, exponent = np.frexp(finite / FLOATS[name])
        shared = exponent - (fraction == 0.5)
    else:
        shared = exponent - 1 - EMAX[name]
    shared = np.clip(shared, -127, 127)
    byte = np.where(amax == 0, 0, np.where(np.isfinite(amax), shared + 127, 255)).astype(np.uint8)
    dead = (amax == 0) | ~np.isfinite(amax)
    v = np.where(dead[..., None], 0, rows.astype(np.float64) * 2.0 ** -shared[..., None].astype(np.float64))
    v = v.astype(F).reshape(*n.shape[:-1], -1)[..., : n.shape[-1]]
    return codes(v, dtype), byte


def assert_same(actual, expected, what="codes"):
    """Bit-equal, any NaN being equal to any other."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
        what, actual.dtype, expected.dtype, actual.shape, expected.shape,
    )  # fmt: skip
    as_bits = {1: np.uint8, 4: np.uint32}[actual.dtype.itemsize]
    different = actual.view(as_bits) != expected.view(as_bits)
    if actual.dtype.kind != "i" and actual.dtype.name not in INTEGERS:
        different &= ~(np.isnan(actual.astype(F)) & np.isnan(expected.astype(F)))
    assert not different.any(), (
        f"{what}: {different.sum()} of {different.size} differ, {actual[different][:3]} for {expected[different][:3]}"
    )


def aimed(scale, dtype):
    """Values at and around every tie and boundary of codes with `scale`, and all that is special."""
    name = np.dtype(dtype).name
    if name in INTEGERS:
        low, high = INTEGERS[name]
        units = np.arange(2 * low - 6, 2 * high + 7) / 2
    else:
        grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn if "e4m3" in name else ml_dtypes.float8_e5m2)
        if name == "float4_e2m1fn":
            grid = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
        grid = np.unique(grid.astype(np.float64)[np.isfinite(grid.astype(np.float64))])
        units = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, [-1.1 * grid[-1], 464, 465, 480, 61440, 65536]])
    at = (units * np.float64(scale)).astype(F)
    beside = [at, np.nextafter(at, F(np.inf)), np.nextafter(at, F(-np.inf))]
    special = np.array([0.0, -0.0, 1e-40, -1e-45, 1e10, -1e10, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 1e-38], F)
    return np.concatenate([*beside, special])
