"""Roundings that are part of what is computed stay where a compiler drops pairs of casts (XLA on GPU does)."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import normlib as nl
from normlib.precision import on_grid, rounded
from tests.excess_precision import without_casts


def arrays(dtype, number=2, shape=(16, 64)):
    keys = jax.random.split(jax.random.key(0), number)
    return [(jax.random.normal(k, shape) * 3 + 1).astype(dtype) for k in keys]


def same(fn, *args):
    for got, want in zip(jax.tree.leaves(without_casts(fn, *args)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=1e-5, atol=1e-5)


def test_a_plain_pair_of_casts_is_seen_to_round_nothing():
    x = jnp.float32([1.001])
    assert without_casts(lambda t: t.astype(jnp.bfloat16).astype(jnp.float32), x)[0] == np.float32(1.001)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rule", ["reverse", "both"])
def test_a_sum_that_is_rounded_first_stays_rounded(dtype, rule):
    x, residual = arrays(dtype)

    def norm(x, residual, **options):
        return nl.add_rms_norm(x, residual, out_dtype="float32", **options)[0]

    def both(x, residual):
        y, pull = jax.vjp(lambda *t: norm(*t, residual_round_first=True, rule=rule), x, residual)
        return y, pull(y * 0 + 1.5)

    unrounded = jax.jit(norm)(x, residual)
    assert np.abs(np.asarray(unrounded) - np.asarray(both(x, residual)[0])).max() > 1e-4  # the rounding is felt
    same(both, x, residual)


def test_the_wide_copy_is_of_the_rounded_y():
    x, residual = arrays(jnp.bfloat16)
    same(lambda *t: nl.add_rms_norm_cast(*t).y_wide, x, residual)
    wide = without_casts(lambda *t: nl.add_rms_norm_cast(*t).y_wide, x, residual)
    assert (np.asarray(wide) == np.asarray(wide.astype(jnp.bfloat16), np.float32)).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_fake_quantiser_quantises(dtype):
    x, _ = arrays(jnp.float32)

    def fake(x):
        return nl.layer_norm(x, quant=nl.StraightThrough(nl.Dynamic(dtype=dtype))).y

    assert np.abs(np.asarray(fake(x)) - np.asarray(nl.layer_norm(x))).max() > 1e-3
    same(fake, x)


def test_a_norm_that_is_rounded_before_its_codes_stays_rounded():
    (x,) = arrays(jnp.bfloat16, 1)
    same(lambda x: nl.rms_norm(x, quant=nl.Static(20.0, multiply=True), norm_round_first=True), x)


@pytest.mark.parametrize(
    ("name", "mantissa", "low"), [("float8_e4m3fn", 3, -6), ("float8_e5m2", 2, -14), ("float16", 10, -14)]
)
def test_the_grid_is_that_of_the_cast(name, mantissa, low):
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    some = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    ties = (np.arange(-4096, 4096) / 4096).astype(np.float32)
    n = np.concatenate([every, some, ties])
    largest = float(ml_dtypes.finfo(name).max)
    n = n[np.isfinite(n) & (np.abs(n) <= largest)]
    got = np.asarray(jax.jit(lambda n: on_grid(n, mantissa, low))(n))
    np.testing.assert_array_equal(got, n.astype(name).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(n))
    odd = np.float32([np.nan, np.inf, -np.inf])
    np.testing.assert_array_equal(np.asarray(on_grid(odd, mantissa, low)), odd)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rounding_is_the_cast_and_its_derivative_too(dtype):
    (x,) = arrays(jnp.float32, 1)
    y, dot = jax.jvp(lambda t: rounded(t, dtype), (x,), (x * 2,))
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x.astype(dtype)))
    np.testing.assert_array_equal(np.asarray(dot), np.asarray((x * 2).astype(dtype)))
