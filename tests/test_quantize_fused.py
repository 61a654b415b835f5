"""Norms of sums, modulated norms and norms with an activation, quantised: against float64, and their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import normlib as nl
from normlib import quantize
from tests import quantize_oracle as oracle
from tests import reference
from tests.distributed import mesh
from tests.test_quantize_norms import assert_within_a_code

pytestmark = [pytest.mark.family, pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")]

ROWS, SIZE = 48, 64


def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x1, x2, x3 = (jnp.asarray(rng.normal(size=(ROWS, SIZE)) * 2, dtype) for _ in range(3))
    scale, bias, added = (jnp.asarray(rng.normal(size=SIZE) + 1, jnp.float32) for _ in range(3))
    return x1, x2, x3, scale, bias, added


def rows(x, scale, bias, centered, eps, weight=1.0):
    """y in float64, and the size that its ulp is measured at."""
    y = reference.norm(x, scale, bias, axes=(1,), eps=eps, centered=centered).y
    return y, np.maximum(abs(y - bias), abs(bias)) * weight


def add_layer(x1, x2, x3, scale, bias, added):
    return rows(x1 + x2 + added, scale, bias, True, 1e-5)


def add_rms(x1, x2, x3, scale, bias, added):
    return rows(x1 + x2, scale, bias, False, 1e-6)


def multi_add(x1, x2, x3, scale, bias, added):
    return rows(x1 + x2 + x3, scale, bias, False, 1e-6)


def ada(x1, x2, x3, scale, bias, added):
    return rows(x1, 1 + x2, x3, True, 1e-5)


def silu(x1, x2, x3, scale, bias, added):
    ref = reference.norm(x1, scale, bias, axes=(), groups=4, channel=1, eps=1e-5)
    # rounding of the norm is passed on by a slope of at most 1.1, and the sigmoid adds two roundings of its own
    return ref.y / (1 + np.exp(-ref.y)), 1.1 * np.maximum(abs(ref.y - bias), abs(bias)) + abs(ref.y)


OPERATORS = {
    "add_layer_norm": (lambda a, **k: nl.add_layer_norm(a[0], a[1], a[3], a[4], sum_bias=a[5], **k), add_layer),
    "add_rms_norm": (lambda a, **k: nl.add_rms_norm(a[0], a[1], a[3], a[4], **k), add_rms),
    "multi_add_rms_norm": (lambda a, **k: nl.multi_add_rms_norm([a[0], a[1]], a[2], a[3], a[4], **k), multi_add),
    "ada_layer_norm": (lambda a, **k: nl.ada_layer_norm(a[0][:, None], a[1], a[2], **k), ada),
    "group_norm_silu": (lambda a, **k: nl.group_norm_silu(a[0], a[3], a[4], num_groups=4, **k), silu),
}


@pytest.fixture(params=OPERATORS)
def name(request):
    return request.param


def quantised(name, quant, given, **options):
    """The Quantized of the operator, its codes `[ROWS, SIZE]`."""
    out = jax.jit(lambda *a: OPERATORS[name][0](a, quant=quant, **options))(*given)
    out = out.y if hasattr(out, "residual") else out
    return jax.tree.map(lambda t: t.reshape(ROWS, -1) if t.ndim == 3 and t.shape[0] == ROWS else t, out)


def exact(name, given):
    return OPERATORS[name][1](*(np.asarray(t).astype(np.float64) for t in given))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_static_codes_differ_from_float64_only_within_4_ulp_of_a_tie(name, dtype):
    given = arrays(dtype)
    y, size = exact(name, given)
    for quant, zero_point in ((nl.Static(0.031, 5), 5), (nl.Static(0.02, dtype=jnp.float8_e4m3fn), 0)):
        step = np.float64(np.float32(quant.scale))
        out = quantised(name, quant, given)
        assert_within_a_code(out.y, y / step, 4 * reference.ulp(size, np.float32) / step, zero_point)


def test_dynamic_codes_and_scales_follow_float64(name):
    given = arrays()
    y, size = exact(name, given)
    out = quantised(name, nl.Dynamic(), given)
    apart = abs(out.scale - abs(y).max(-1, keepdims=True) / 127) * 127
    assert (apart <= 4 * reference.ulp(size.max(-1, keepdims=True), np.float32)).all()
    step = np.asarray(out.scale).astype(np.float64)
    assert_within_a_code(out.y, y / step, 4 * reference.ulp(size, np.float32) / step, lowest=-127)


@pytest.mark.parametrize("quant", [nl.Static(2.0**-4), nl.Dynamic(), nl.MX()])
def test_norm_round_first_gives_the_codes_of_the_unfused_pair(name, quant):  # CASES: E8
    given = arrays(jnp.bfloat16)
    y = jax.jit(lambda *a: OPERATORS[name][0](a))(*given)
    y = (y.y if hasattr(y, "residual") else y).reshape(ROWS, SIZE)
    fused, unfused = quantised(name, quant, given, norm_round_first=True), jax.jit(quantize.apply)(quant, y)
    # the two programs may round a value of y differently in the last bit of float32, rarely in that of bfloat16
    assert (np.asarray(fused.y) == np.asarray(unfused.y)).mean() > 0.999
    assert abs(np.asarray(fused.y).astype(np.float32) - np.asarray(unfused.y).astype(np.float32)).max() <= 2


def test_the_residual_is_that_without_quantisation():
    x1, x2, _, scale, bias, added = arrays(jnp.bfloat16)
    run = jax.jit(functools.partial(nl.add_layer_norm, sum_bias=added))
    out, plain = run(x1, x2, scale, bias, quant=nl.Dual(nl.Static(0.1), nl.Dynamic())), run(x1, x2, scale, bias)
    assert out._fields == plain._fields and out.y._fields[:2] == ("y", "scale")
    np.testing.assert_array_equal(out.residual, plain.residual)
    np.testing.assert_array_equal(out.y.scale2.shape, (ROWS, 1))


@pytest.mark.parametrize("centered", [True, False])
def test_straight_through_gradients_join_those_of_the_residual(centered):
    x1, x2, _, scale, bias, _ = arrays()
    dy, dr = (jnp.asarray(np.random.default_rng(i).normal(size=x1.shape), jnp.float32) for i in (1, 2))
    norm = nl.add_layer_norm if centered else nl.add_rms_norm
    kind = nl.StraightThrough(nl.Static(0.02))

    def outputs(x1, x2, scale, bias):
        out = norm(x1, x2, scale, bias, quant=kind)
        return out.y.y, out.residual

    _, vjp = jax.vjp(jax.jit(outputs), x1, x2, scale, bias)
    dx1, dx2, dscale, dbias = vjp((dy, dr))
    s = np.asarray(x1).astype(np.float64) + np.asarray(x2)
    options = {"axes": (1,), "eps": 1e-5 if centered else 1e-6, "centered": centered}
    n = reference.norm(s, scale, bias, **options).y / np.float64(np.float32(0.02))
    passed = (n >= -128) & (n <= 127)
    ref = reference.norm(s, scale, bias, np.where(passed, reference.f64(dy), 0), **options)
    assert 0 < (~passed).sum() < passed.size / 2
    reference.assert_rounded(dx1, ref.dx + reference.f64(dr), np.maximum(ref.dx_size, abs(dr)), what="dx1")
    np.testing.assert_array_equal(dx1, dx2)
    reference.assert_sum(dscale, ref.dscale, (1, SIZE), what="dscale")
    reference.assert_sum(dbias, ref.dbias, (1, SIZE), what="dbias")


def test_positions_keep_scales_of_their_own_when_space_is_split_over_devices():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 12)) * np.arange(1, 9)[:, None], jnp.float32)

    def run(x, **options):
        return nl.group_norm_silu(x, num_groups=3, quant=nl.Dynamic(), **options)

    local = functools.partial(run, axis_name="d")
    split = jax.shard_map(local, mesh=mesh(4), in_specs=P(None, "d"), out_specs=P(None, "d"))
    out, whole = jax.jit(split)(x), jax.jit(run)(x)
    np.testing.assert_allclose(out.scale, whole.scale, rtol=1e-5)
    assert (np.asarray(out.y) == np.asarray(whole.y)).mean() > 0.99


def test_a_row_split_over_devices_has_one_scale_in_the_norm_of_a_sum():
    x1, x2, _, scale, bias, _ = arrays()
    local = functools.partial(nl.add_rms_norm, axis_name="d", quant=nl.Dynamic())
    run = jax.shard_map(
        lambda *a: local(*a).y[:2], mesh=mesh(2), in_specs=(P(None, "d"), P(None, "d"), P("d"), P("d")),
        out_specs=(P(None, "d"), P()),
    )  # fmt: skip
    codes, scales = jax.jit(run)(x1, x2, scale, bias)
    whole = quantised("add_rms_norm", nl.Dynamic(), arrays())
    np.testing.assert_allclose(scales, whole.scale, rtol=1e-6)
    assert (np.asarray(codes) == np.asarray(whole.y)).mean() > 0.99


def test_an_unknown_kind_is_refused(name):
    with pytest.raises(TypeError, match="`quant` must be one of Static, .*got 'int8'"):
        OPERATORS[name][0](arrays(), quant="int8")
    with pytest.raises(ValueError, match="give a `quant` with it"):
        OPERATORS[name][0](arrays(), norm_round_first=True)


def test_a_scale_per_feature_fits_the_normalised_axis(name):
    steps = np.random.default_rng(3).uniform(0.02, 0.1, SIZE).astype(np.float32)
    given = arrays()
    y, size = exact(name, given)
    out = quantised(name, nl.Static(jnp.asarray(steps)), given)
    assert_within_a_code(out.y, y / steps, 4 * reference.ulp(size, np.float32) / steps)
    with pytest.raises(ValueError, match="`scale` must have shape"):
        quantised(name, nl.Static(jnp.asarray(steps[:3])), given)
    oracle.assert_same(np.asarray(out.scale).ravel(), steps, "scale")
