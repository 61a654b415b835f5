"""Norms of normlib on the npu pass round where the shipped A2 kernels do, bit for bit against NumPy's own float16."""

import jax
import ml_dtypes
import numpy as np
import pytest

import normlib as nl
from normlib.passes import NpuPass

EPS = 1e-3
BF16 = ml_dtypes.bfloat16
A2 = NpuPass(precision="ascend_a2")


def halving(v):
    """Halves onto each other until 64 lanes are left, then neighbours in pairs: the order of the shipped RmsNorm."""
    while v.shape[1] > 64:
        v = v[:, : v.shape[1] // 2] + v[:, v.shape[1] // 2 :]
    while v.shape[1] > 1:
        v = v[:, 0::2] + v[:, 1::2]
    return v


def reciprocal_root(wide):
    """Squares in float32, scaled by 1 / D, summed."""
    mean = halving(wide * wide * np.float32(1 / wide.shape[1]))
    return np.float32(1) / np.sqrt(mean + np.float32(EPS))


def assert_same_bits(got, expected):
    got = np.asarray(got)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((8, 256)).astype(np.float16) for _ in range(2))
    return a, b, rng.standard_normal(256).astype(np.float16)


def test_fp16_adds_in_fp16_and_rounds_before_and_after_the_scale(rows):
    a, b, scale = rows

    out = jax.jit(lambda *t: nl.add_rms_norm(*t, eps=EPS, backend=A2))(a, b, scale)

    summed = a + b
    wide = summed.astype(np.float32)
    assert_same_bits(out.residual, summed)
    assert_same_bits(out.y, (wide * reciprocal_root(wide)).astype(np.float16) * scale)


def test_bf16_takes_statistics_from_the_unrounded_sum(rows):
    a, b, scale = (t.astype(np.float32).astype(BF16) for t in rows)

    out = jax.jit(lambda *t: nl.add_rms_norm(*t, eps=EPS, backend=A2))(a, b, scale)

    wide = a.astype(np.float32) + b.astype(np.float32)
    normalised = (wide * reciprocal_root(wide)).astype(BF16).astype(np.float32)
    assert_same_bits(out.residual, wide.astype(BF16))
    assert_same_bits(out.y, (normalised * scale.astype(np.float32)).astype(BF16))


def test_plain_rms_norm_rounds_once(rows):
    x, _, scale = rows
    once = NpuPass(precision="ascend_a2_round_once")

    y = jax.jit(lambda *t: nl.rms_norm(*t, eps=EPS, backend=once))(x, scale)

    wide = x.astype(np.float32)
    mean = halving(wide * wide) / np.float32(256)
    rstd = np.float32(1) / np.sqrt(mean + np.float32(EPS))
    assert_same_bits(y, (wide * rstd * scale.astype(np.float32)).astype(np.float16))


def test_codes_take_the_chain_of_casts_and_saturate(rows):
    x, _, scale = rows
    step = np.float32(0.02)

    out = jax.jit(lambda *t: nl.rms_norm(*t, eps=EPS, backend=A2, quant=nl.Static(step)))(x, scale)

    exact = np.float64(x) / np.sqrt((np.float64(x) ** 2).mean(1, keepdims=True) + EPS) * np.float64(scale)
    codes = np.clip(np.rint(exact / step), -128, 127)
    got = np.asarray(out.y, np.float64)
    assert got.min() == -128 and got.max() == 127
    assert (got == codes).mean() > 0.97  # y is rounded to fp16 twice before it is a code
    assert np.abs(got - codes).max() <= 1
