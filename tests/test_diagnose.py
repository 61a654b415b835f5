"""The report names each fault, its layer and channels, and nothing in a healthy model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import normlib as nl
from normlib import linen
from normlib.diagnose import ADVICE, batch_stats_report
from normlib.linen_tools import apply_with_moments

C = 6


def healthy(seed=0):
    x = np.random.default_rng(seed).normal(size=(256, C)).astype(np.float32)
    return x, {"a": {"bn": {"mean": x.mean(0), "var": x.var(0)}}}


def report(x, stats, **options):
    return batch_stats_report(stats, {"a": {"bn": nl.batch_moments(jnp.asarray(x))}}, **options)


def found(result):
    return {(f.layer, f.kind): f.channels for f in result.findings}


def test_a_healthy_layer_has_no_finding():
    x, stats = healthy()
    fresh, _ = healthy(1)  # another batch of the same kind
    result = report(fresh, stats)
    assert result.findings == ()
    assert str(result) == "1 layers, nothing found"
    expected = abs(fresh.mean(0, dtype=np.float64) - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    np.testing.assert_allclose(result.drift["a/bn"], expected, rtol=1e-4)


def test_small_batches_do_not_look_like_drift():
    stats = {"a": {"bn": {"mean": jnp.zeros(C), "var": jnp.ones(C)}}}
    assert not any(report(healthy(seed)[0][:8], stats).findings for seed in range(20))


@pytest.mark.parametrize(("shift", "spread"), [(2.0, 1.0), (0.0, 3.0), (0.0, 0.3)])
def test_drift_of_mean_or_variance(shift, spread):
    x, stats = healthy()
    x[:, 2] = x[:, 2] * spread + shift
    result = report(x, stats)
    assert found(result) == {("a/bn", "drift"): (2,)}
    expected = max(
        abs(x[:, 2].mean() - stats["a"]["bn"]["mean"][2]) / np.sqrt(stats["a"]["bn"]["var"][2] + 1e-5),
        abs(np.log2((x[:, 2].var() + 1e-5) / (stats["a"]["bn"]["var"][2] + 1e-5))),
    )
    assert result.findings[0].worst == pytest.approx(expected, rel=1e-3)


def test_a_dead_channel():  # CASES: J1
    x, stats = healthy()
    x[:, 3] = 1e4 + 0.3
    stats["a"]["bn"]["mean"][3], stats["a"]["bn"]["var"][3] = 1e4 + 0.3, 0
    assert found(report(x, stats)) == {("a/bn", "dead"): (3,)}


def test_epsilon_above_the_variance():
    x, stats = healthy()
    x[:, 1] *= 1e-3
    stats["a"]["bn"]["mean"][1], stats["a"]["bn"]["var"][1] = x[:, 1].mean(), x[:, 1].var()
    result = report(x, stats)
    assert found(result) == {("a/bn", "eps"): (1,)}
    assert result.findings[0].worst == pytest.approx(1e-5 / x[:, 1].var(), rel=1e-3)
    assert report(x, stats, eps=1e-8).findings == ()


def test_a_stored_variance_that_underflowed():  # CASES: B17
    x, stats = healthy()
    x[:, 4] *= 1e-3
    stats["a"]["bn"] = {name: np.asarray(value, np.float16) for name, value in stats["a"]["bn"].items()}
    stats["a"]["bn"]["var"][4] = 0
    assert found(report(x, stats, eps=0.0))["a/bn", "underflow"] == (4,)


@pytest.mark.parametrize(("leaf", "value"), [("var", -1e-3), ("var", np.nan), ("mean", np.inf)])
def test_stored_values_that_cannot_be(leaf, value):  # CASES: B1, B17, B20
    x, stats = healthy()
    stats["a"]["bn"][leaf][0] = value
    assert found(report(x, stats)) == {("a/bn", "invalid"): (0,)}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gradients_flushed_to_zero_in_half_precision(dtype):
    x, stats = healthy()
    grads = {"a": {"bn": {"scale": np.full(C, 1e-3), "bias": np.array([1e-3, 1e-9, 1e-3, 1e-3, 1e-3, 1e-12])}}}
    grads = jax.tree.map(lambda t: t.astype(dtype), grads)
    assert found(report(x, stats, grads=grads)) == {("a/bn", "gradient"): (1, 5)}
    if dtype == np.float32:
        assert report(x, stats, grads=grads, half=jnp.bfloat16).findings == ()


def test_a_whole_model_is_reported_by_layer():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = linen.BatchNorm(use_running_average=False)(x)
            return linen.BatchNorm(use_running_average=False)(nn.relu(nn.Dense(4)(x)))

    x = healthy()[0]
    variables = jax.jit(Net().init)(jax.random.key(0), x)
    variables["params"]["Dense_0"]["bias"] = jnp.array([0.0, 0.0, -100.0, 0.0])
    _, moments = apply_with_moments(Net(), variables, x)
    result = batch_stats_report(variables["batch_stats"], moments)
    assert found(result)["BatchNorm_1", "dead"] == (2,)
    assert "BatchNorm_1: dead in 1 of 4 channels (worst 0.25)\n  cause: the channel is constant" in str(result)
    assert ADVICE["dead"][1] in str(result)


@pytest.mark.parametrize(("options", "match"), [
    ({"drift": 0.0}, "`drift` is a threshold"), ({"eps": -1.0}, "`eps` must be >= 0"),
])  # fmt: skip
def test_thresholds_that_are_none(options, match):
    with pytest.raises(ValueError, match=match):
        report(*healthy(), **options)


def test_a_layer_without_moments():
    with pytest.raises(ValueError, match="has none for the statistics of a/bn"):
        batch_stats_report(healthy()[1], {})
