"""Norm and quantisation in one kernel: codes and scales are those of `normlib.quantize` on the same value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl
import sim_npu
from normlib.passes.npu import NpuPass
from tests.kernels.bare import Laid, lowered_for
from tests.kernels.test_kernels_fused import draw, on_machines

SMOOTH = jnp.linspace(0.5, 2.0, 301)
ZERO_POINT = jnp.arange(301) % 41 - 20
KINDS = {
    "static": nl.Static(0.03, 3),
    "per_feature": nl.Static(jnp.linspace(0.01, 0.1, 301), ZERO_POINT),
    "reciprocal": nl.Static(25.0, multiply=True),
    "dynamic": nl.Dynamic(),
    "smoothed": nl.Dynamic(SMOOTH),
    "dual": nl.Dual(nl.Static(0.05), nl.Dynamic(SMOOTH)),
    "e4m3": nl.Static(0.02, dtype=jnp.float8_e4m3fn),
    "dynamic_e4m3": nl.Dynamic(dtype=jnp.float8_e4m3fn),
}
by_kind = pytest.mark.parametrize("quant", KINDS.values(), ids=KINDS)


def rows():
    """Ordinary rows, a constant one, one of the largest numbers and one with a NaN."""
    x, scale, bias = draw(11, [(23, 301), (301,), (301,)])
    x = x.at[3].set(0.25).at[5].multiply(1e18).at[7, 11].set(jnp.nan)
    return x, scale, bias


def same(found, wanted):
    return [
        np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), equal_nan=True)
        for a, b in zip(found, wanted)
        if b is not None
    ]


@on_machines
@by_kind
def test_codes_and_scales_are_those_of_the_quantiser_on_the_same_value(backend, quant):
    x, scale, bias = rows()

    def norm(x, quant=None):
        return nl.layer_norm(x, scale, bias, quant=quant, backend=backend)

    found, value = jax.jit(lambda x: (norm(x, quant), norm(x)))(x)

    assert all(same(found, nl.quantize.apply(quant, value)))


@on_machines
def test_a_quantised_sum_returns_its_residual_with_gradients(backend):
    x1, x2, scale = draw(12, [(9, 70), (9, 70), (70,)])

    def loss(x1, x2):
        out = nl.add_rms_norm(x1, x2, scale, quant=nl.Dynamic(), backend=backend)
        return jnp.sum(out.residual * 3.0), (out.y, out.residual, out.moments.var)

    (_, (y, residual, var)), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x1, x2)

    total = np.asarray(x1) + np.asarray(x2)
    np.testing.assert_array_equal(residual, total)
    np.testing.assert_allclose(var, np.mean(np.float64(total) ** 2, -1), rtol=1e-6)
    np.testing.assert_array_equal(grads, np.full((2, 9, 70), 3.0))
    exact = np.float64(total) / np.sqrt(np.mean(np.float64(total) ** 2, -1, keepdims=True) + 1e-6) * np.float64(scale)
    assert abs(nl.dequantize(y) - exact).max() <= 0.51 * np.max(y.scale)


@pytest.mark.parametrize("lanes", [1, 63, 4096, 5000, 65537])
def test_codes_are_all_that_is_written_and_tiles_fit(lanes):
    x, scale = jax.ShapeDtypeStruct((96, lanes), "bfloat16"), jax.ShapeDtypeStruct((lanes,), "float32")

    (kernel,) = sim_npu.simulate(lambda x, s: nl.rms_norm(x, s, quant=nl.Dynamic(), backend=Laid()), x, scale).kernels

    assert kernel.name == "rms_norm_quant" and kernel.ub.fits
    assert kernel.traffic.unique_writes == 96 * lanes + 96 * 3 * 4  # codes; per row m2, rstd and the scale


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("kind", ["static", "dynamic", "dual", "dynamic_e4m3"])
def test_they_lower_without_hardware(kind, platform):
    backend = lowered_for(platform)
    x = jax.ShapeDtypeStruct((64, 301), "bfloat16")
    norm = lambda x: nl.layer_norm(x, quant=KINDS[kind], backend=backend)  # noqa: E731
    assert sim_npu.lower_check(norm, x, platform=platform).custom_calls


def test_what_the_kernel_does_not_do_is_quantised_behind_it():
    """Groups, masks and a value rounded first: the same codes as the quantiser's."""
    x = draw(13, [(5, 64)])[0]
    where = jnp.arange(64) < 50
    for options in ({"quant": nl.Dynamic(group=16)}, {"quant": nl.Dynamic(), "where": where[None]},
                    {"quant": nl.Static(0.1), "norm_round_first": True}):  # fmt: skip
        found = nl.rms_norm(x, backend=NpuPass(), **options)
        wanted = nl.rms_norm(x, backend="xla", **options)
        assert np.max(abs(np.int32(found.y) - np.int32(wanted.y))) <= 1
