"""Kernels under plans: every tiling gives the same norm, what is chosen fits, and the simulator can report and tune."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl
import sim_npu
from normlib import kernels
from normlib.passes import tuner
from sim_npu import TilePlan
from sim_npu.cli import main

PLANS = {
    "whole rows": TilePlan(rows=4, residency="row"),
    "resident in chunks": TilePlan(rows=2, chunk=128, residency="row"),
    "streamed": TilePlan(rows=3, chunk=256, residency="stream"),
}
LENGTHS = (1, 7, 64, 100, 1000, 1024, 4096, 5000, 8192, 12288, 16384, 33333, 65536, 100_000, 262_144)


def layer_norm_reference(x, eps=1e-5):
    x = np.float64(x)
    mean = x.mean(1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + eps)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_tiling_is_the_same_norm(plan):
    x = np.float32(np.random.default_rng(0).normal(size=(10, 1000)) + 100)

    y, mean, m2, rstd = jax.jit(lambda x: kernels.layer_norm(x, plan=plan, machine="cpu"))(x)

    np.testing.assert_allclose(y, layer_norm_reference(x), atol=3e-6)
    np.testing.assert_allclose(mean, np.float64(x).mean(1), rtol=1e-7)
    np.testing.assert_allclose(m2, np.float64(x).var(1) * 1000, rtol=1e-6)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(np.float64(x).var(1) + 1e-5), rtol=1e-6)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_tiling_is_the_same_backward(plan):
    rng = np.random.default_rng(0)
    x, dy = np.float32(rng.normal(size=(10, 1000)) + 3), np.float32(rng.normal(size=(10, 1000)))
    mean, rstd = x.mean(1), 1 / np.sqrt(np.float64(x).var(1) + 1e-5)

    dx = jax.jit(lambda *t: kernels.layer_norm_grad(*t, plan=plan, machine="cpu"))(x, dy, mean, np.float32(rstd))

    xhat = (np.float64(x) - mean[:, None]) * rstd[:, None]
    through = dy.mean(1, keepdims=True) + xhat * (dy * xhat).mean(1, keepdims=True)
    np.testing.assert_allclose(dx, (dy - through) * rstd[:, None], atol=3e-6)


@pytest.mark.parametrize("kernel", ["layer_norm", "add_layer_norm", "rms_norm_grad", "channel_sums", "channel_grad"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_chosen_fits_the_buffer_at_every_length(kernel, dtype):
    fn = getattr(kernels, kernel)
    for length in LENGTHS:
        for rows in (1, 1025):
            report = sim_npu.simulate(fn, *fn.example_arrays((rows, length), jnp.dtype(dtype)), explain_capacity=False)
            assert all(k.ub.fits for k in report.kernels)


def test_the_simulator_reports_and_ranks_a_kernel(capsys):
    main(["report", "normlib.kernels:rms_norm", "--shape", "4096x4096", "--dtype", "bf16", "--chip", "910b2"])
    assert "rms_norm" in capsys.readouterr().out

    shapes = kernels.layer_norm.example_arrays((4096, 1024), jnp.dtype("float16"))
    best = sim_npu.rank_plans(kernels.layer_norm, *shapes).best
    assert best.total_us <= sim_npu.simulate(kernels.layer_norm, *shapes).total_us


def test_tuned_tilings_are_never_slower_and_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(tuner, "_table", {})
    x = jax.ShapeDtypeStruct((64, 16384), jnp.float16)

    def us(tune):
        with nl.profile() as found:
            jax.block_until_ready(jax.jit(lambda x: nl.rms_norm(x, backend=nl.passes.NpuPass(tune=tune)))(
                jnp.zeros(x.shape, x.dtype)
            ))  # fmt: skip
        return found.us

    assert us(True) <= us(False)
    (key,) = tuner.tuned()
    assert key.startswith("910b2 rms_norm float16")
    tuner.save(tmp_path / "plans.json")
    before = tuner.tuned()
    monkeypatch.setattr(tuner, "_table", {})
    tuner.load(tmp_path / "plans.json")
    assert tuner.tuned().keys() == before.keys()
    (tmp_path / "bad.json").write_text(json.dumps({"910b2": [1]}))
    with pytest.raises(ValueError, match="no table of tilings"):
        tuner.load(tmp_path / "bad.json")
    assert tuner.tuned().keys() == before.keys()


def test_an_unknown_machine_is_refused():
    with pytest.raises(ValueError, match="`machine` must be one of npu, tpu, gpu, cpu; got 'abacus'"):
        kernels.rms_norm(jnp.ones((2, 4)), machine="abacus")
