"""Moments as a monoid, their accuracy, and running statistics made of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import normlib as nl
from normlib.moments import Moments, reciprocal_root, two_sum
from normlib.scope import pack_counts, unpack_counts

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e3, 1e4, 1e5])
def test_the_variance_stays_accurate_at_any_mean(mean):  # CASES: J1, J6, J8, C8
    x = (np.random.default_rng(0).normal(size=(4096, 8)) + mean).astype(np.float32)
    m = jax.jit(lambda x: Moments.of(x, 0))(x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(m.var, wide.var(0), rtol=1e-6)
    np.testing.assert_allclose(np.float64(m.mean) + np.float64(m.low), wide.mean(0), rtol=1e-12, atol=1e-7)


def test_bfloat16_statistics_are_float32():  # CASES: C8, J14, J16
    x = jnp.asarray(np.random.default_rng(0).normal(size=4096) * 1e3, jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(Moments.of(x).var, wide.var(), rtol=1e-6)
    assert float(Moments.of(jnp.full((2**20,), 1e-5, jnp.float16)).mean) == pytest.approx(
        float(np.float16(1e-5)), rel=1e-6
    )
    text = str(jax.make_jaxpr(lambda x: nl.layer_norm(x))(x))
    assert not any("reduce_sum" in line and ("bf16" in line or "f16[" in line) for line in text.splitlines())


def test_unsigned_bytes_do_not_wrap():  # CASES: J18
    assert float(Moments.of(jnp.array([1, 2, 255], jnp.uint8)).var) == pytest.approx(14280.667, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.floats(-1e4, 1e4), st.integers(0, 2**31))
def test_merging_any_split_gives_the_whole(sizes, mean, seed):
    x = (np.random.default_rng(seed).normal(size=sum(sizes)) + mean).astype(np.float32)
    parts, start = [], 0
    for size in sizes:
        parts.append(Moments.of(jnp.asarray(x[start : start + size])))
        start += size
    merged = jax.tree.map(lambda *t: jnp.stack(t), *parts).merge_axis(0)
    wide = x.astype(np.float64)
    assert int(merged.count) == len(x)
    if len(x):
        np.testing.assert_allclose(merged.mean, wide.mean(), rtol=2e-7, atol=1e-6)
        np.testing.assert_allclose(merged.m2, ((wide - wide.mean()) ** 2).sum(), rtol=2e-6, atol=1e-6)
    else:
        assert [float(t) for t in merged] == [0, 0, 0, 0]


def test_merging_equal_constants_is_exact_and_empty_sets_weigh_nothing():
    value = np.float32(1e4 + 0.3)
    some, none = Moments.of(jnp.full(7, value)), Moments.of(jnp.zeros(0))
    merged = some.merge(some).merge(none)
    assert (float(merged.mean), float(merged.m2), int(merged.count)) == (float(value), 0.0, 14)
    poisoned = none._replace(mean=jnp.nan, m2=jnp.zeros(()))
    assert float(some.merge(poisoned).mean) == float(value)


def test_a_mask_counts_and_selects():
    x, where = jnp.array([[1.0, jnp.nan], [3.0, 5.0]]), jnp.array([[True, False], [True, True]])
    m = Moments.of(x, 0, where=where)
    assert m.count.tolist() == [2, 1] and m.mean.tolist() == [2.0, 5.0] and m.var.tolist() == [1.0, 0.0]


def test_welford_is_the_recurrence():
    x = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    where = np.random.default_rng(1).random((100, 1)) < 0.5
    m = jax.jit(nl.welford_scan)(x)
    np.testing.assert_allclose(m.var, x.var(0), rtol=1e-5)
    m = nl.welford_scan(x.T, 1, where=where.T)
    np.testing.assert_allclose(m.mean, x[where[:, 0]].mean(0), rtol=1e-5)
    assert m.count.tolist() == [where.sum()] * 3


@settings(max_examples=50, deadline=None)
@given(st.floats(-(2.0**100), 2.0**100, width=32), st.floats(-(2.0**100), 2.0**100, width=32))
def test_two_sum_is_exact(a, b):
    s, e = (np.float64(t) for t in two_sum(jnp.float32(a), jnp.float32(b)))
    from fractions import Fraction

    tiny = Fraction(2) ** -126  # XLA on CPU flushes subnormal results
    assert abs(Fraction(float(s)) + Fraction(float(e)) - Fraction(a) - Fraction(b)) <= 2 * tiny


def test_the_reciprocal_root_is_within_one_and_a_half_roundings():
    v = np.random.default_rng(0).uniform(1e-6, 1e6, 100_000).astype(np.float32)
    error = np.float64(jax.jit(reciprocal_root)(v)) * np.sqrt(np.float64(v)) - 1
    assert abs(error).max() < 1.51 * 2.0**-24


def test_counts_stay_exact_beyond_24_bits():  # CASES: payload counts
    n = jnp.array([2**24 + 1, 2**30 + 12345, 7, 0], jnp.int32)
    words = [sum([w] * 1) for w in pack_counts(n)]
    assert unpack_counts(words)[0].tolist() == n.tolist()
    many = [jnp.sum(jnp.stack([w] * 127), 0) for w in pack_counts(jnp.array([2**24 + 1], jnp.int32))]
    assert unpack_counts(many)[0].tolist() == [127 * (2**24 + 1)]


def test_running_statistics_follow_the_named_conventions():  # CASES: J30, J32, J34, J67, B6
    moments = nl.Moments.of(jnp.arange(4.0)[:, None], 0)
    zero, one = jnp.zeros(1), jnp.ones(1)
    step = lambda **k: [float(t[0]) for t in nl.update_running(zero, one, moments, **k)]  # noqa: E731
    assert step(momentum=0.0) == [1.5, 1.25]
    assert step(momentum=0.0, unbiased=True) == pytest.approx([1.5, 5 / 3])
    assert step(momentum=0.9) == pytest.approx([0.15, 1.025])
    single = nl.Moments.of(jnp.ones((1, 1)), 0)
    assert [float(t[0]) for t in nl.update_running(zero, one, single, momentum=0.5, unbiased=True)] == [0.5, 0.5]


def test_nothing_measured_leaves_running_statistics_untouched():  # CASES: B3, J21
    for x, where in ((jnp.zeros((0, 2)), None), (jnp.full((3, 2), jnp.nan), jnp.zeros((3, 2), bool))):
        moments = nl.batch_norm(x, where=where).moments
        mean, var = nl.update_running(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]), moments)
        assert mean.tolist() == [1.0, 2.0] and var.tolist() == [3.0, 4.0]
        assert moments.count.tolist() == [0, 0] and moments.mean.tolist() == [0, 0] and moments.var.tolist() == [0, 0]


def test_a_batch_that_is_not_finite_can_be_skipped_by_channel():  # CASES: B20
    x = jnp.array([[1.0, 1.0], [3.0, jnp.inf]])
    moments = nl.batch_norm(x).moments
    mean, var = nl.update_running(jnp.zeros(2), jnp.ones(2), moments, momentum=0.0, skip_nonfinite=True)
    assert mean.tolist() == [2.0, 0.0] and var.tolist() == [1.0, 1.0]
    assert not np.isfinite(nl.update_running(jnp.zeros(2), jnp.ones(2), moments)[0][1])


def test_state_keeps_its_type_through_scan():  # CASES: J52
    def step(state, x):
        return nl.update_running(*state, nl.batch_norm(x).moments), None

    state = (jnp.zeros(3, jnp.bfloat16), jnp.ones(3))
    (mean, var), _ = jax.lax.scan(step, state, jnp.ones((5, 4, 3)))
    assert mean.dtype == jnp.bfloat16 and var.dtype == jnp.float32
