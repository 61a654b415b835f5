"""Norms with `quant=`: end to end against float64, under transformations and over devices."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import normlib as nl
from normlib import quantize
from tests import quantize_oracle as oracle
from tests import reference
from tests.distributed import mesh

pytestmark = [pytest.mark.family, pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")]

MEAN, VAR = np.linspace(-1, 1, 64).astype(np.float32), np.linspace(0.5, 2, 64).astype(np.float32)


def inference(x, scale=None, bias=None, **options):
    return nl.batch_norm_inference(x, jnp.asarray(MEAN), jnp.asarray(VAR), scale, bias, **options)


NORMS = {"layer": nl.layer_norm, "rms": nl.rms_norm, "inference": inference}


def exact(name, x, scale, bias):
    """(y, size) in float64: size is what an ulp of y is measured at."""
    x, scale, bias = (np.asarray(t).astype(np.float64) for t in (x, scale, bias))
    if name == "inference":
        xhat = (x - MEAN.astype(np.float64)) / np.sqrt(VAR.astype(np.float64) + 1e-5)
        return xhat * scale + bias, np.maximum(abs(xhat * scale), abs(bias))
    eps = {"layer": 1e-5, "rms": 1e-6}[name]
    ref = reference.norm(x, scale, bias, axes=(1,), eps=eps, centered=name == "layer")
    return ref.y, np.maximum(abs(ref.y - bias), abs(bias))


def given(dtype=jnp.float32, rows=64, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(rows, 64)) * 2 + 0.5, dtype)
    return x, jnp.asarray(rng.uniform(0.5, 1.5, 64), jnp.float32), jnp.asarray(rng.normal(size=64), jnp.float32)


@functools.cache
def compiled(name, norm_round_first=False):
    norm = NORMS[name]
    return jax.jit(lambda quant, *a: norm(*a, quant=quant, norm_round_first=norm_round_first))


@pytest.fixture(params=NORMS)
def name(request):
    return request.param


def assert_within_a_code(codes, v, slack, zero_point=0, **options):
    """Each code is that of some value within `slack` of v (float64): it differs by one only that near to a tie."""
    dtype = np.asarray(codes).dtype
    low, high = (
        oracle.codes((v + sign * slack).astype(np.float64), dtype, zero_point, **options).astype(np.float64)
        for sign in (-1, 1)
    )
    codes = np.asarray(codes).astype(np.float64)
    assert ((low <= codes) & (codes <= high)).all()
    return (low != high).mean()


KINDS = {
    "int8": nl.Static(0.031), "int8_zp": nl.Static(0.031, 5), "int4": nl.Static(0.5, dtype=jnp.int4),
    "e4m3": nl.Static(0.011, dtype=jnp.float8_e4m3fn), "e5m2": nl.Static(0.011, dtype=jnp.float8_e5m2),
    "e2m1": nl.Static(0.6, dtype=jnp.float4_e2m1fn),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_static_codes_differ_from_float64_only_within_4_ulp_of_a_tie(name, kind, dtype):
    quant, (x, scale, bias) = KINDS[kind], given(dtype)
    out = compiled(name)(quant, x, scale, bias)
    y, size = exact(name, x, scale, bias)
    step = float(np.float32(quant.scale))
    slack = 4 * reference.ulp(size, np.float32) / step
    near = assert_within_a_code(out.y, y / step, slack, 5 if kind == "int8_zp" else 0)
    assert near < 0.01  # so the bound says something


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_dynamic_scales_and_codes_follow_float64(name, dtype):
    dtype, (x, scale, bias) = np.dtype(getattr(ml_dtypes, dtype, dtype)), given()
    largest = oracle.LARGEST[dtype.name]
    out = compiled(name)(nl.Dynamic(dtype=dtype), x, scale, bias)
    y, size = exact(name, x, scale, bias)
    amax = abs(y).max(-1, keepdims=True)
    assert out.scale.shape == (64, 1) and out.scale.dtype == jnp.float32
    assert (
        abs(out.scale - amax / largest) <= 4 * reference.ulp(size.max(-1, keepdims=True), np.float32) / largest
    ).all()
    step = np.asarray(out.scale).astype(np.float64)
    options = {"lowest": -largest} if dtype.name in oracle.INTEGERS else {}
    assert_within_a_code(out.y, y / step, 4 * reference.ulp(size, np.float32) / step, **options)


def test_asymmetric_codes_follow_float64(name):
    x, scale, bias = given()
    out = compiled(name)(nl.Asymmetric(), x, scale, bias)
    y, size = exact(name, x, scale, bias)
    step = np.asarray(out.scale).astype(np.float64)
    np.testing.assert_allclose(step, (y.max(-1, keepdims=True) - y.min(-1, keepdims=True)) / 255, rtol=1e-6)
    assert_within_a_code(out.y, y / step, 4 * reference.ulp(size, np.float32) / step, np.asarray(out.zero_point))
    assert (abs(np.asarray(nl.dequantize(out)) - y) <= step).all()


@pytest.mark.parametrize("quant", [nl.MX(), nl.MX(jnp.float8_e4m3fn, scale_alg=1), nl.MX(jnp.float8_e5m2)])
def test_mx_codes_follow_float64(name, quant):
    x, scale, bias = given()
    out = compiled(name)(quant, x, scale, bias)
    y, size = exact(name, x, scale, bias)
    _, byte = oracle.mx(y.astype(np.float32), quant.dtype, quant.scale_alg)
    np.testing.assert_array_equal(out.scale, byte)  # no maximum of these rows is near a power of two
    step = np.repeat(2.0 ** (byte.astype(np.float64) - 127), 32, -1)
    assert_within_a_code(out.y, y / step, 4 * reference.ulp(size, np.float32) / step)


ROUNDED = [nl.Static(2.0**-4), nl.Dynamic(), nl.Static(0.05, dtype=jnp.float8_e4m3fn), nl.Asymmetric(), nl.MX()]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("quant", ROUNDED)
def test_norm_round_first_gives_the_codes_of_the_unfused_pair(name, quant, dtype):  # CASES: E8
    x, scale, bias = given(dtype)
    y = jax.jit(NORMS[name])(x, scale, bias)
    unfused = jax.jit(quantize.apply)(quant, y)
    fused = compiled(name, True)(quant, x, scale, bias)
    for a, b in zip(fused, unfused):
        if a is not None:
            np.testing.assert_array_equal(a, b)
    if dtype == jnp.bfloat16 and quant.format.is_integer:
        # ties lie on the 16-bit grid: without the first rounding other codes come out
        assert (np.asarray(compiled(name)(quant, x, scale, bias).y) != np.asarray(fused.y)).any()


def test_outputs_beside_y_keep_their_places():
    x, scale, bias = given()
    out = jax.jit(lambda x: nl.layer_norm(x, scale, bias, quant=nl.Dynamic(), return_moments=True))(x)
    plain = nl.layer_norm(x, scale, bias, return_moments=True)
    assert isinstance(out, type(plain)) and out.y._fields == ("y", "scale", "zero_point")
    np.testing.assert_allclose(out.moments.mean, plain.moments.mean, rtol=1e-6)


def test_a_dual_norm_has_both_sets_of_codes(name):
    x, scale, bias = given()
    out = compiled(name)(nl.Dual(nl.Static(0.03), nl.Static(0.5, dtype=jnp.int4)), x, scale, bias)
    np.testing.assert_array_equal(out.y, compiled(name)(nl.Static(0.03), x, scale, bias).y)
    np.testing.assert_array_equal(out.y2, compiled(name)(nl.Static(0.5, dtype=jnp.int4), x, scale, bias).y)


def test_padding_has_no_part_in_dynamic_scales():
    x, scale, bias = given()
    where = np.arange(64) < 50
    run = jax.jit(functools.partial(nl.layer_norm, quant=nl.Dynamic()))
    clean = run(x[:, :50], scale[:50], bias[:50])
    out = run(jnp.where(where, x, jnp.nan), scale, bias, where=where[None])
    np.testing.assert_allclose(out.scale, clean.scale, rtol=1e-6)
    assert (abs(out.y[:, :50].astype(int) - clean.y.astype(int)) <= 1).all()


def test_a_quantised_batch_norm_reads_codes_and_writes_codes():
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (32, 64)).astype(np.int8)
    x = nl.dequantize(nl.Quantized(jnp.asarray(codes), jnp.float32(0.02), jnp.int32(3)))
    out = compiled("inference")(nl.Static(0.05, -7), x, *given()[1:])
    y, size = exact("inference", (codes.astype(np.float64) - 3) * np.float64(np.float32(0.02)), *given()[1:])
    step = np.float64(np.float32(0.05))
    assert_within_a_code(out.y, y / step, 6 * reference.ulp(size, np.float32) / step, -7)


# -- transformations and devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", [nl.Dynamic(), nl.Asymmetric(), nl.MX(), nl.Static(0.03)])
def test_vmap_equals_a_loop(quant):
    x, scale, bias = given()
    xs = x.reshape(4, 16, 64)
    f = jax.jit(functools.partial(nl.layer_norm, quant=quant))
    together = jax.jit(jax.vmap(lambda x: nl.layer_norm(x, scale, bias, quant=quant)))(xs)
    for i in range(4):
        one = f(xs[i], scale, bias)
        np.testing.assert_allclose(together.scale[i], one.scale, rtol=1e-6)
        a, b = (np.asarray(t).astype(np.float32) for t in (together.y[i], one.y))
        assert (a == b).mean() > 0.99 and abs(a - b).max() <= 1


def test_vmap_over_scales_held_by_a_kind():
    n, scales = given()[0], jnp.array([0.01, 0.02, 0.05])
    out = jax.jit(jax.vmap(lambda q: quantize.apply(q, n)))(nl.Static(scales))
    for i, scale in enumerate([0.01, 0.02, 0.05]):
        oracle.assert_same(out.y[i], oracle.static(np.asarray(n), scale, np.int8))


def test_kinds_are_pytrees_that_keep_their_settings():
    kind = nl.Dual(nl.Static(jnp.float32(0.5), 3, rounding="floor"), nl.Dynamic(jnp.ones(4), dtype=jnp.int4))
    leaves, tree = jax.tree.flatten(kind)
    again = jax.tree.unflatten(tree, leaves)
    assert len(leaves) == 3 and again.first.rounding == "floor" and again.second.dtype == jnp.int4
    assert jax.tree.map(lambda t: t * 2, kind).first.scale == 1.0


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("quant", [nl.Dynamic(), nl.Asymmetric(), nl.Static(0.03), nl.MX(), nl.Dynamic(group=16)])
def test_rows_split_over_devices_share_their_scale(quant, check_vma):
    x, scale, bias = given()

    def local(x, scale, bias):
        return nl.layer_norm(x, scale, bias, axis_name="d", quant=quant)

    shared = isinstance(quant, (nl.Dynamic, nl.Asymmetric)) and getattr(quant, "group", None) is None
    static = isinstance(quant, nl.Static)
    grid = mesh(2)
    blocks = P() if static else P(None, None) if shared else P(None, "d")
    places = quantize.Quantized(P(None, "d"), blocks, P() if isinstance(quant, nl.Asymmetric) else None)
    run = jax.jit(
        jax.shard_map(local, mesh=grid, in_specs=(P(None, "d"), P("d"), P("d")), out_specs=places, check_vma=check_vma)
    )
    out, whole = run(x, scale, bias), compiled("layer")(quant, x, scale, bias)
    assert out.scale.shape == whole.scale.shape
    np.testing.assert_allclose(out.scale, whole.scale, rtol=1e-6)
    a, b = (np.asarray(t).astype(np.float32) for t in (out.y, whole.y))
    assert (a == b).mean() > 0.99
    assert abs(np.asarray(nl.dequantize(out)) - np.asarray(nl.dequantize(whole))).max() <= 0.6


def test_groups_of_devices_share_scales_among_themselves():
    x, scale, bias = given()
    halves, pairs, kind = x.reshape(64, 4, 16).transpose(1, 0, 2), [[0, 1], [2, 3]], nl.Dynamic()

    def local(x):
        return jax.tree.map(lambda t: t[None], nl.layer_norm(x[0], axis_name="d", axis_index_groups=pairs, quant=kind))

    out = jax.jit(jax.shard_map(local, mesh=mesh(4), in_specs=P("d"), out_specs=P("d")))(halves)
    np.testing.assert_array_equal(out.scale[0], out.scale[1])
    for i in (0, 1):
        whole = compiled("layer")(nl.Dynamic(), x[:, 32 * i : 32 * i + 32], jnp.ones(32), jnp.zeros(32))
        np.testing.assert_allclose(out.scale[2 * i], whole.scale, rtol=1e-6)
    assert (np.asarray(out.scale[0]) != np.asarray(out.scale[2])).any()


def test_globally_sharded_rows_under_jit():
    x, scale, bias = given()
    placed = jax.device_put(x, NamedSharding(mesh(4), P("d")))
    out, whole = (compiled("rms")(nl.Dynamic(), t, scale, bias) for t in (placed, x))
    np.testing.assert_allclose(out.scale, whole.scale, rtol=1e-6)
    assert (np.asarray(out.y) == np.asarray(whole.y)).mean() > 0.99


def test_scan_and_checkpoint_take_quantised_norms():
    x, scale, bias = given()
    kind = nl.StraightThrough(nl.Dynamic())

    def f(x):
        step = jax.checkpoint(lambda c, _: (c + nl.rms_norm(c, scale, quant=kind).y, None))
        return jax.lax.scan(step, x, None, length=2)[0].sum()

    assert np.isfinite(jax.jit(jax.grad(f))(x)).all()
