"""Moments over any axes in kernels that read x once, and batch norm on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl
import sim_npu
from normlib.passes.npu import NpuPass
from tests.kernels.bare import Laid, lowered_for
from tests.kernels.test_kernels_fused import on_machines


@on_machines
@pytest.mark.parametrize(
    "shape, axes",
    [((1000, 37), (0,)), ((300, 5, 70), (0, 2)), ((5, 6, 7, 8), (1, 3)), ((6, 3, 1, 1), (0, 2, 3)), ((1500, 70), (1,))],
    ids=str,
)
def test_moments_are_accurate_far_from_zero(backend, shape, axes):
    """At mean / sigma = 1e3: mean + low to 1e-8 of sigma, the variance to 1e-6."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape) + 1e3, jnp.float32)

    found = jax.jit(lambda x: backend.moments(x, axes=axes, where=None, batch_invariant=False))(x)

    exact = np.asarray(x, np.float64)
    mean = np.asarray(found.mean, np.float64) + np.asarray(found.low, np.float64)
    np.testing.assert_allclose(mean, exact.mean(axes, keepdims=True), rtol=0, atol=1e-8)
    np.testing.assert_allclose(np.asarray(found.m2) / found.count, exact.var(axes, keepdims=True), rtol=1e-6)


@on_machines
def test_a_constant_channel_has_no_variance_and_an_overflow_is_not_hidden(backend):
    x = jnp.stack([jnp.full(77, 1e4 + 0.3), jnp.full(77, 3e38)], 1)

    found = jax.jit(lambda x: backend.moments(x, axes=(0,), where=None, batch_invariant=False))(x)

    assert found.m2[0, 0] == 0 and found.mean[0, 0] + found.low[0, 0] == x[0, 0]
    assert not np.isfinite(found.m2[0, 1])


@pytest.mark.parametrize("axis, shape", [(-1, (5000, 64)), (1, (4, 64, 12544))])
def test_a_batch_norm_of_many_rows_reads_x_twice_forward(axis, shape):
    norm = lambda x: nl.batch_norm(x, axis=axis, backend=Laid())[0]  # noqa: E731
    x = jax.ShapeDtypeStruct(shape, "bfloat16")

    kernels = sim_npu.simulate(norm, x).kernels

    reads = sum(k.traffic.unique_reads for k in kernels)
    assert kernels[0].name == "moments" and kernels[-1].name == "affine"
    assert reads < 2.2 * 2 * np.prod(shape)
    assert all(k.ub.fits for k in kernels)


@pytest.mark.parametrize("axis, shape", [(-1, (7, 65537)), (-1, (4096, 1)), (1, (3, 5, 100_000))])
def test_odd_channel_counts_fit_the_unified_buffer(axis, shape):
    x = jax.ShapeDtypeStruct(shape, "float32")
    norm = lambda x: nl.batch_norm(x, axis=axis, backend=Laid())[0]  # noqa: E731
    assert all(k.ub.fits for k in sim_npu.simulate(norm, x).kernels)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("axis, shape", [(-1, (5000, 64)), (1, (40, 64, 300))])
def test_they_lower_without_hardware(axis, shape, platform):
    backend = lowered_for(platform)
    norm = lambda x: nl.batch_norm(x, axis=axis, backend=backend)[0]  # noqa: E731
    x = jax.ShapeDtypeStruct(shape, "bfloat16")
    assert sim_npu.lower_check(norm, x, platform=platform).custom_calls


def test_a_masked_batch_norm_takes_the_two_sweeps():
    """Masks are not in the fused kernel: the result must not depend on entries behind them all the same."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((33, 5)), jnp.float32)
    where = jnp.arange(33)[:, None] < 20
    y, moments = nl.batch_norm(x.at[25].set(jnp.nan), where=where, backend=NpuPass())
    np.testing.assert_allclose(moments.mean, np.asarray(x)[:20].mean(0), atol=1e-6)
    assert np.isfinite(y[:20]).all()
