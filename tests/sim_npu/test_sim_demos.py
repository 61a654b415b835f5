"""The demonstration kernels compute what they say, in every tiling, and race on nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from sim_npu import TilePlan, demos, simulate

KERNELS = ["rms_norm", "rms_norm_chunked", "rms_norm_stream", "channel_stats", "channel_grad"]


def normal(*shape, dtype=jnp.float32, mean=0.0, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) + mean, dtype)


@pytest.mark.parametrize("d", [100, 1000])
@pytest.mark.parametrize(
    "plan",
    [
        None,
        TilePlan(rows=3, residency="row"),
        TilePlan(rows=4, chunk=128, residency="row"),
        TilePlan(rows=2, chunk=128, residency="stream"),
    ],
)
def test_row_norm_in_every_tiling(plan, d):
    x, scale = normal(10, d), normal(d, seed=1)
    wide = np.asarray(x, np.float64)

    got = demos.rms_norm(x, scale, plan=plan, interpret=True)

    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_a_chunk_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="`plan.chunk` must be a power of two.*got 100"):
        demos.rms_norm_chunked(normal(4, 300), normal(300), plan=TilePlan(chunk=100))


@pytest.mark.parametrize(("n", "c"), [(7, 5), (500, 130), (96, 128)])
def test_channel_statistics_with_uneven_parts(n, c):
    x = normal(n, c, mean=3.0)
    wide = np.asarray(x, np.float64)

    mean, m2 = demos.channel_stats(x, interpret=True)

    np.testing.assert_allclose(mean, wide.mean(0), rtol=1e-6)
    np.testing.assert_allclose(m2, ((wide - wide.mean(0)) ** 2).sum(0), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "groups", "plan"),
    [
        ((3, 8, 50), 2, None),
        ((3, 8, 50), 2, TilePlan(chunk=16, residency="stream")),
        ((2, 14, 50), 2, TilePlan(chunk=200, residency="stream")),
        ((9, 30, 1), 1, TilePlan(rows=4)),
    ],
)
@pytest.mark.parametrize("about_first", [True, False])
def test_group_norm_in_every_tiling(shape, groups, plan, about_first):
    x, scale = normal(*shape, mean=3.0), normal(shape[1], seed=1)
    wide = np.asarray(x, np.float64).reshape(shape[0], groups, -1)
    hat = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)

    got = demos.group_norm(x, scale, scale + 1, groups=groups, about_first=about_first, plan=plan, interpret=True)

    want = hat.reshape(shape) * np.asarray(scale)[:, None] + np.asarray(scale + 1)[:, None]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_group_norm_refuses_groups_that_do_not_divide():
    with pytest.raises(ValueError, match="`groups` must divide the 8 channels; got 3"):
        demos.group_norm(normal(2, 8, 4), normal(8), normal(8), groups=3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("shape", "plan"),
    [((3, 8, 50), None), ((3, 8, 50), TilePlan(rows=3, chunk=16)), ((37, 40, 1), TilePlan(rows=16, chunk=8))],
)
def test_channel_gradient_against_float64(shape, plan, training):
    n, c, r = shape
    x, dy, scale = normal(*shape, mean=1.0), normal(*shape, seed=1), normal(c, seed=2)
    mean, rstd = x.mean((0, 2)), 1 / jnp.sqrt(x.var((0, 2)) + 1e-5)

    dx, dscale, dbias = demos.channel_grad(dy, x, mean, rstd, scale, training=training, plan=plan, interpret=True)

    g = np.asarray(dy, np.float64)
    hat = (np.asarray(x, np.float64) - np.asarray(mean)[:, None]) * np.asarray(rstd)[:, None]
    sums = g.sum((0, 2)), (g * hat).sum((0, 2))
    inner = g - (sums[0][:, None] + hat * sums[1][:, None]) / (n * r) if training else g
    np.testing.assert_allclose(dbias, sums[0], atol=2e-5)
    np.testing.assert_allclose(dscale, sums[1], atol=2e-5)
    np.testing.assert_allclose(dx, inner * np.asarray(scale * rstd)[:, None], atol=5e-6)


@pytest.mark.parametrize(
    ("shape", "plan"),
    [((3, 8, 50), None), ((3, 8, 50), TilePlan(rows=3, chunk=16)), ((37, 40, 1), TilePlan(rows=16, chunk=8))],
)
def test_gradient_under_fixed_statistics_against_float64(shape, plan):
    dy, scale, var = normal(*shape, seed=1), normal(shape[1], seed=2), jnp.exp(normal(shape[1], seed=3))

    dx = demos.channel_scale(dy, scale, var, plan=plan, interpret=True)

    wide = (np.asarray(a, np.float64)[:, None] for a in (scale, var))
    want = np.asarray(dy, np.float64) * next(wide) / np.sqrt(next(wide) + 1e-5)
    np.testing.assert_allclose(dx, want, rtol=1e-5, atol=1e-6)


def test_few_channels_of_a_gradient_under_fixed_statistics_use_every_core():
    args = demos.channel_scale.example_arrays((4, 2, 100_000), "float16")
    (kernel,) = simulate(demos.channel_scale, *args).kernels

    assert kernel.schedule.cores == 48
    assert kernel.traffic.total == pytest.approx(2 * 2 * 4 * 2 * 100_000, rel=0.01)


UNEVEN = {  # the last block of rows, and the last chunk, reach beyond the array
    "rms_norm": ((8, 300), TilePlan(rows=3, residency="row")),
    "rms_norm_chunked": ((8, 300), TilePlan(rows=3, chunk=128)),
    "rms_norm_stream": ((4, 300), TilePlan(rows=3, chunk=128)),
    "channel_stats": ((10, 130), None),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_no_tile_is_read_out_of_bounds_or_before_it_is_written(name, capfd):
    fn, (shape, plan) = getattr(demos, name), UNEVEN[name]
    arrays = [normal(*a.shape, seed=i) for i, a in enumerate(fn.example_arrays(shape, jnp.float32))]
    strict = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)

    got = jax.tree.map(np.asarray, fn(*arrays, plan=plan, interpret=strict))

    want = jax.tree.map(np.asarray, fn(*arrays, plan=plan, interpret=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)
    assert "race" not in capfd.readouterr().out.lower()  # older versions print races instead of raising


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("chip", ["910b2", "910b4", "310p", "950", "generic"])
def test_every_kernel_is_simulated_on_every_chip(name, chip):
    fn = getattr(demos, name)

    report = simulate(fn, *fn.example_arrays((256, 512), jnp.bfloat16), chip=chip)

    assert report.total_us > sum(k.traffic.bound_us for k in report.kernels) and not report.unknown


TPU_TILINGS = {
    "rms_norm": ((64, 1024), TilePlan(rows=8, residency="row")),
    "rms_norm_chunked": ((64, 1000), TilePlan(rows=8, chunk=128)),
    "rms_norm_stream": ((64, 4000), TilePlan(rows=8, chunk=1024)),
    "channel_stats": ((4096, 128), TilePlan(rows=8)),
}


@pytest.mark.parametrize("name", TPU_TILINGS)
def test_the_same_kernel_lowers_for_tpu_without_one(name):
    fn, (shape, plan) = getattr(demos, name), TPU_TILINGS[name]

    lowered = (
        jax.jit(lambda *a: fn(*a, plan=plan))
        .trace(*fn.example_arrays(shape, jnp.float32))
        .lower(lowering_platforms=("tpu",))
    )

    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_chunked"])
def test_row_kernels_lower_for_triton_without_a_gpu(name):
    pltriton = pytest.importorskip("jax.experimental.pallas.triton")
    fn, (shape, plan) = getattr(demos, name), TPU_TILINGS[name]
    params = pltriton.CompilerParams(num_warps=4, num_stages=1)
    gpu = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=gpu)

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(lambda *a: fn(*a, plan=plan, compiler_params=params)).trace(
            *fn.example_arrays(shape, jnp.float32)
        )
        lowered = traced.lower(lowering_platforms=("cuda",))

    assert "triton" in lowered.as_text()
