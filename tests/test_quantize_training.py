"""Gradients through quantised norms: straight-through, and the quantised backward of RMS norm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl
from normlib import quantize
from tests import reference
from tests.test_quantize_norms import assert_within_a_code, exact, given

pytestmark = pytest.mark.family


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("quant", [nl.Static(0.01), nl.Static(0.02, 40), nl.Dynamic(), nl.Asymmetric()])
def test_gradients_pass_straight_through_where_nothing_saturates(quant, dtype):
    x, scale, bias = given(dtype)
    dy = jnp.asarray(np.random.default_rng(5).normal(size=x.shape), dtype)
    kind = nl.StraightThrough(quant)
    y, vjp = jax.vjp(jax.jit(lambda *a: nl.rms_norm(*a, quant=kind).y), x, scale, bias)
    dx, dscale, dbias = vjp(dy)
    n, _ = exact("rms", x, scale, bias)
    passed = np.ones(n.shape, bool)
    if isinstance(quant, nl.Static):
        step, zero_point = np.float64(np.float32(quant.scale)), quant.zero_point or 0
        passed = (n / step >= -128 - zero_point) & (n / step <= 127 - zero_point)
        assert 0 < (~passed).sum()
    ref = reference.norm(x, scale, bias, np.where(passed, reference.f64(dy), 0), axes=(1,), eps=1e-6, centered=False)
    assert y.dtype == dtype
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")
    reference.assert_sum(dscale, ref.dscale, (1, 64), what="dscale")
    reference.assert_sum(dbias, ref.dbias, (1, 64), what="dbias")


@pytest.mark.parametrize(
    "quant",
    [nl.Static(0.03), nl.Dynamic(dtype=jnp.int4), nl.Asymmetric(), nl.MX(jnp.float8_e5m2), nl.Dynamic(group=32)],
)
def test_straight_through_values_are_the_dequantised_codes(quant):
    n = given()[0]
    np.testing.assert_array_equal(
        jax.jit(nl.fake_quantize)(quant, n), jax.jit(lambda q, n: nl.dequantize(quantize.apply(q, n)))(quant, n)
    )


def test_straight_through_of_smoothed_values_passes_the_factor():
    smooth = jnp.array([0.5, 2.0, 4.0])
    grad = jax.jit(jax.grad(lambda n: nl.fake_quantize(nl.Dynamic(smooth), n).sum()))(jnp.array([[1.0, -2.0, 3.0]]))
    assert grad.tolist() == [[0.5, 2.0, 4.0]]


def test_straight_through_stops_where_values_saturate():
    n = jnp.array([0.3, 127.4, 128.0, -128.0, -129.0, jnp.nan, jnp.inf])
    grad = jax.jit(jax.grad(lambda n: nl.fake_quantize(nl.Static(1.0), n)[:5].sum()))(n)
    assert grad.tolist() == [1, 0, 0, 1, 0, 0, 0]
    n = jnp.array([[500.0] + [100.0] * 31 + [0.0] * 32])  # 500 lies beyond 1 * 448; a block of zeros is no saturation
    grad = jax.jit(jax.grad(lambda n: nl.fake_quantize(nl.MX(jnp.float8_e4m3fn), n).sum()))(n)
    assert grad[0].tolist() == [0.0] + [1.0] * 63


def test_straight_through_works_in_forward_mode_twice_and_for_both_of_a_dual():
    kind = nl.StraightThrough(nl.Dual(nl.Static(0.5), nl.Dynamic()))

    @jax.jit
    def f(n):
        out = quantize.apply(kind, n)
        return (out.y**2).sum() + out.y2.sum()

    n = jnp.array([[0.3, 1.7, -2.0]])
    np.testing.assert_array_equal(jax.grad(f)(n), 2 * np.array([[0.5, 1.5, -2.0]]) + 1)
    np.testing.assert_array_equal(jax.jvp(f, (n,), (jnp.ones_like(n),))[1], np.float32(3.0))
    np.testing.assert_array_equal(jax.jacfwd(jax.grad(f))(n).reshape(3, 3), 2 * np.eye(3))


def test_codes_and_scales_carry_no_gradient():
    def f(scale, n):
        out = quantize.apply(nl.Static(scale, dtype=jnp.float8_e4m3fn), n)
        row = quantize.apply(nl.Dynamic(dtype=jnp.float8_e5m2), n)
        return out.y.astype(jnp.float32).sum() + row.scale.sum() + row.y.astype(jnp.float32).sum()

    for grad in jax.jit(jax.grad(f, (0, 1)))(0.1, given()[0]):
        assert not np.asarray(grad).any()


def test_training_with_straight_through_codes_learns():
    rng = np.random.default_rng(0)
    x, target = jnp.asarray(rng.normal(size=(128, 16)), jnp.float32), jnp.asarray(rng.normal(size=16), jnp.float32)
    kind = nl.StraightThrough(nl.Static(0.05))

    @jax.jit
    def loss(scale):
        return ((nl.rms_norm(x, scale, quant=kind).y - nl.rms_norm(x, target)) ** 2).mean()

    scale = jnp.ones(16)
    for _ in range(60):
        scale = scale - 4 * jax.grad(loss)(scale)
    assert loss(scale) < 0.05**2 / 6 < loss(jnp.ones(16)) / 100


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_backward_of_rms_norm_on_its_own(dtype, offset):
    x, scale, _ = given(dtype)
    dy = jnp.asarray(np.random.default_rng(5).normal(size=x.shape), dtype)
    rstd = nl.rms_norm(x, scale, return_moments=True).moments.rstd(1e-6)
    run = jax.jit(functools.partial(nl.rms_norm_backward, scale_offset=offset))
    ref = reference.norm(x, scale, None, dy, axes=(1,), eps=1e-6, centered=False, offset=offset)
    for shape in ((64,), (64, 1)):
        dx, dscale = run(dy, x, rstd.reshape(shape), scale)
        assert dx.dtype == dtype and dscale.dtype == jnp.float32 and dscale.shape == (64,)
        reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")
        reference.assert_sum(dscale, ref.dscale, (1, 64), what="dscale")
    # quantised: dx is unrounded before
    for quant, zero_point in ((nl.Static(0.013, 2), 2), (nl.Static(0.01, dtype=jnp.float8_e4m3fn), 0)):
        out = jax.jit(functools.partial(nl.rms_norm_backward, scale_offset=offset))(dy, x, rstd, scale, quant=quant)
        step = np.float64(np.float32(quant.scale))
        slack = 4 * reference.ulp(ref.dx_size, np.float32) / step
        assert_within_a_code(out.dx.y, ref.dx / step, slack, zero_point)
        reference.assert_sum(out.dscale, ref.dscale, (1, 64), what="dscale")


def test_the_backward_without_scale_with_one_per_sample_and_over_two_axes():
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(5, 3, 8)), jnp.float32) for _ in range(2))
    for shape in (None, (5, 3, 8), (1, 1, 8), ()):
        scale = None if shape is None else jnp.asarray(rng.normal(size=shape), jnp.float32)
        rstd = nl.rms_norm(x, axis=(1, 2), return_moments=True).moments.rstd(1e-6)
        dx, dscale = jax.jit(functools.partial(nl.rms_norm_backward, axis=(1, 2)))(dy, x, rstd, scale)
        raised = np.ones((1, 1, 1)) if scale is None else np.asarray(scale).reshape(shape or (1, 1, 1))
        ref = reference.norm(x, raised, None, dy, axes=(1, 2), eps=1e-6, centered=False)
        reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")
        if scale is None:
            assert dscale is None
        else:
            assert dscale.shape == shape
            reference.assert_sum(dscale, ref.dscale, raised.shape, what="dscale")
