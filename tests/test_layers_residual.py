"""Layers of residual blocks, linen and nnx: fused residual norms, GroupNormSiLU, BatchNormAct, quantised outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normlib
from normlib import linen, nnx
from tests.layers import PACKAGES, build, kept_bytes, with_params

pytestmark = pytest.mark.parametrize("package", PACKAGES)
TRAIN = {"use_running_average": False}
rng = np.random.default_rng(0)
X = rng.normal(2, 3, (16, 4, 4, 8)).astype(np.float32)
R = rng.normal(0, 1, X.shape).astype(np.float32)
G = rng.normal(0, 1, X.shape).astype(np.float32)
SCALE, BIAS = np.linspace(0.5, 2, 8, dtype=np.float32), np.linspace(-1, 1, 8, dtype=np.float32)


def silu(z):
    return z / (1 + np.exp(-z))


def relu(z):
    return np.maximum(z, 0)


def row_norm(x, eps=1e-6, centered=True):
    x = np.asarray(x, np.float64)
    x = x - x.mean(-1, keepdims=True) if centered else x
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def batch_norm(x, mean=None, var=None, eps=1e-5, scale=SCALE, bias=BIAS):
    x = np.asarray(x, np.float64)
    mean = x.mean((0, 1, 2)) if mean is None else mean
    var = x.var((0, 1, 2)) if var is None else var
    return (x - mean) / np.sqrt(var + eps) * scale + bias


def affine(variables):
    named = {"scale": SCALE, "bias": BIAS}
    return with_params(variables, **{n: v for n, v in named.items() if n in variables["params"]})


# ---- residual norms --------------------------------------------------------------------------------------------------


@pytest.mark.family
@pytest.mark.parametrize(("name", "centered"), [("AddLayerNorm", True), ("AddRMSNorm", False)])
def test_residual_norms_normalise_the_sum_and_return_it(package, name, centered):
    call, variables = build(package, name, (8,), X, R)
    assert {n: v.shape for n, v in variables["params"].items()} == dict.fromkeys(
        ("scale", "bias")[: 1 + centered], (8,)
    )

    (y, residual), _ = jax.jit(call)(affine(variables), X, R)

    np.testing.assert_allclose(residual, X + R, rtol=1e-7)
    expected = row_norm(X.astype(np.float64) + R, centered=centered) * SCALE + (BIAS if centered else 0)
    np.testing.assert_allclose(y, expected, atol=2e-5)


@pytest.mark.parametrize("name", ["AddLayerNorm", "AddRMSNorm"])
def test_residual_norms_promote_y_as_flax_and_keep_16_bit_inputs_once(package, name):
    x, r = jnp.asarray(X, jnp.bfloat16), jnp.asarray(R, jnp.bfloat16)
    call, variables = build(package, name, (8,), x, r)
    (y, residual), _ = jax.jit(call)(variables, x, r)
    assert (y.dtype, residual.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(residual, (x.astype(jnp.float32) + r.astype(jnp.float32)).astype(jnp.bfloat16))

    narrow, _ = build(package, name, (8,), x, r, dtype=jnp.bfloat16)
    assert jax.eval_shape(narrow, variables, x, r)[0].y.dtype == jnp.bfloat16
    assert kept_bytes(lambda x, r: tuple(call(variables, x, r)[0]), x, r) <= x.nbytes + r.nbytes


def test_gradients_of_a_residual_norm_add_both_outputs_cotangents(package):
    call, variables = build(package, "AddRMSNorm", (8,), X, R)

    def loss(params, x, r):
        y, residual = call({"params": params}, x, r)[0]
        return (y * G).sum() + (residual * R).sum()

    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(affine(variables)["params"], X, R)
    s, g = X.astype(np.float64) + R, G * SCALE.astype(np.float64)
    rstd = 1 / np.sqrt((s**2).mean(-1, keepdims=True) + 1e-6)
    ds = g * rstd - s * rstd**3 * (g * s).mean(-1, keepdims=True) + R
    np.testing.assert_allclose(grads[1], ds, atol=2e-5)
    np.testing.assert_array_equal(grads[1], grads[2])
    np.testing.assert_allclose(grads[0]["scale"], (G * s * rstd).sum((0, 1, 2)), rtol=1e-4, atol=1e-3)


def test_residual_round_first_measures_the_rounded_sum(package):
    x, r = jnp.full((1, 8), 1.0, jnp.bfloat16), jnp.full((1, 8), 2.0**-9, jnp.bfloat16)
    x, r = x.at[0, 0].set(1.0078125), r.at[0, 0].set(0)
    for first, spread in ((True, 1.0078125 - 1), (False, 1.0078125 - 1 - 2.0**-9)):
        call, variables = build(package, "AddLayerNorm", (8,), x, r, residual_round_first=first, epsilon=1e-12)
        (y, _), _ = jax.jit(call)(variables, x, r)
        s = np.zeros(8)
        s[0] = spread
        np.testing.assert_allclose(y[0], row_norm(s, eps=1e-12), rtol=1e-4)


def test_a_residual_of_another_shape_is_refused_by_name(package):
    call, variables = build(package, "AddLayerNorm", (8,), X, R)
    with pytest.raises(ValueError, match=r"`residual` must have the shape of `x`"):
        jax.eval_shape(call, variables, X, R[:1])
    call, variables = build(package, "BatchNormAct", (8,), X, **TRAIN)
    with pytest.raises(ValueError, match=r"`residual` must have the shape of `x`"):
        jax.eval_shape(lambda v, x, r: call(v, x, residual=r), variables, X, R[:1])


# ---- activated norms -------------------------------------------------------------------------------------------------


@pytest.mark.family
def test_group_norm_silu_is_both_with_one_rounding(package):
    call, variables = build(package, "GroupNormSiLU", (8,), X, num_groups=2, beta=1.5)
    variables = affine(variables)
    groups = np.asarray(X, np.float64).reshape(16, 4, 4, 2, 4)
    axes = (1, 2, 4)
    z = (groups - groups.mean(axes, keepdims=True)) / np.sqrt(groups.var(axes, keepdims=True) + 1e-6)
    z = z.reshape(X.shape) * SCALE + BIAS
    expected = z / (1 + np.exp(-1.5 * z))
    np.testing.assert_allclose(jax.jit(call)(variables, X)[0], expected, atol=2e-5)

    half = jnp.asarray(X, jnp.bfloat16)
    assert jax.eval_shape(call, variables, half)[0].dtype == jnp.float32
    assert kept_bytes(lambda x: call(variables, x)[0], half) <= half.nbytes


@pytest.mark.family
@pytest.mark.parametrize(("activation", "function"), [("relu", relu), ("silu", silu), (None, lambda z: z)])
def test_batch_norm_act_trains_and_evaluates(package, activation, function):
    call, variables = build(package, "BatchNormAct", (8,), X, **TRAIN, activation=activation, momentum=0.75)
    variables = affine(variables)
    y, stats = jax.jit(lambda v, x, r: call(v, x, residual=r))(variables, X, R)
    np.testing.assert_allclose(y, function(batch_norm(X) + R), atol=3e-5)
    mean, var = X.mean((0, 1, 2), np.float64), X.var((0, 1, 2), np.float64)
    np.testing.assert_allclose(stats["mean"], 0.25 * mean, rtol=1e-5)
    np.testing.assert_allclose(stats["var"], 0.75 + 0.25 * var, rtol=1e-5)

    evaluate, _ = build(package, "BatchNormAct", (8,), X, use_running_average=True, activation=activation)
    y, after = jax.jit(lambda v, x, r: evaluate(v, x, residual=r))({**variables, "batch_stats": stats}, X, R)
    np.testing.assert_allclose(y, function(batch_norm(X, 0.25 * mean, 0.75 + 0.25 * var) + R), atol=3e-5)
    jax.tree.map(np.testing.assert_array_equal, after, stats)


@pytest.mark.parametrize("evaluating", [False, True])
def test_batch_norm_act_keeps_16_bit_inputs_once_and_rounds_once(package, evaluating):
    x, r = jnp.asarray(X, jnp.bfloat16), jnp.asarray(R, jnp.bfloat16)
    call, variables = build(package, "BatchNormAct", (8,), x, use_running_average=evaluating, dtype=jnp.bfloat16)
    exact, _ = build(package, "BatchNormAct", (8,), x, use_running_average=evaluating, dtype=jnp.float32)
    run = [jax.jit(lambda v, x, r, f=f: f(v, x, residual=r)[0]) for f in (call, exact)]
    np.testing.assert_array_equal(run[0](variables, x, r), run[1](variables, x, r).astype(jnp.bfloat16))
    assert kept_bytes(lambda x, r: exact(variables, x, residual=r)[0], x, r) <= x.nbytes + r.nbytes


def test_gradients_of_batch_norm_act_are_those_of_its_parts(package):
    call, variables = build(package, "BatchNormAct", (8,), X, **TRAIN)

    def loss(params, x, r):
        return (call({**variables, "params": params}, x, residual=r)[0] * G).sum()

    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(affine(variables)["params"], X, R)
    xhat = batch_norm(X, scale=1, bias=0)
    dz = G * (batch_norm(X) + R > 0)
    g, axes = dz * SCALE, (0, 1, 2)
    dx = (g - g.mean(axes) - xhat * (g * xhat).mean(axes)) / np.sqrt(X.var(axes, np.float64) + 1e-5)
    np.testing.assert_allclose(grads[2], dz, atol=1e-6)
    np.testing.assert_allclose(grads[1], dx, atol=2e-5)
    np.testing.assert_allclose(grads[0]["scale"], (dz * xhat).sum(axes), atol=1e-3)
    np.testing.assert_allclose(grads[0]["bias"], dz.sum(axes), atol=1e-3)


@pytest.mark.parametrize("settings", [{"axis_name": "data"}, {"axis_name": "data", "virtual_batch_size": 8}])
def test_batch_norm_act_shares_statistics_over_devices(package, settings):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    call, variables = build(package, "BatchNormAct", (8,), X, use_running_average=True, **settings)
    train, _ = build(package, "BatchNormAct", (8,), X, **TRAIN, momentum=0.0, **settings)
    variables = affine(variables)
    step = jax.shard_map(
        lambda v, x, r: train(v, x, residual=r), mesh=mesh, in_specs=(P(), P("data"), P("data")),
        out_specs=(P("data"), P()),
    )  # fmt: skip
    y, stats = jax.jit(step)(variables, X, R)
    halves = (X,) if len(settings) == 1 else (X[:8], X[8:])
    expected = relu(np.concatenate([batch_norm(part) for part in halves]) + R)
    np.testing.assert_allclose(y, expected, atol=3e-5)
    np.testing.assert_allclose(stats["var"], X.var((0, 1, 2), np.float64), rtol=1e-5)


def test_frozen_batch_norm_act_moves_neither_statistics_nor_parameters(package):
    call, variables = build(package, "BatchNormAct", (8,), X, **TRAIN, frozen=True)

    def loss(params, x):
        y, stats = call({**variables, "params": params}, x, residual=R)
        return (y * G).sum(), stats

    (grads, dx), stats = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(variables["params"], X)
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), grads)
    np.testing.assert_allclose(dx, G * (X / np.sqrt(1 + 1e-5) + R > 0) / np.sqrt(1 + 1e-5), atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, stats, variables["batch_stats"])


def test_remat_of_batch_norm_act_moves_the_statistics_once(package):
    call, variables = build(package, "BatchNormAct", (8,), X, **TRAIN, activation="silu", momentum=0.5)

    def loss(params, x, wrap):
        y, stats = wrap(lambda p, x: call({**variables, "params": p}, x))(params, x)
        return (y * G).sum(), stats

    plain, remat = (
        jax.jit(jax.grad(lambda p, x, w=w: loss(p, x, w), (0, 1), has_aux=True))(variables["params"], X)
        for w in (lambda f: f, jax.checkpoint)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), plain, remat)
    np.testing.assert_allclose(remat[1]["mean"], 0.5 * X.mean((0, 1, 2)), rtol=1e-5)


def test_an_activation_is_a_known_name_a_function_or_none(package):
    with pytest.raises(ValueError, match=r"`activation` must be one of relu, silu, swish; got 'tanh'"):
        build(package, "BatchNormAct", (8,), X, **TRAIN, activation="tanh")
    with pytest.raises(TypeError, match=r"`activation` must be .* got 3"):
        build(package, "BatchNormAct", (8,), X, **TRAIN, activation=3)
    call, variables = build(package, "BatchNormAct", (8,), X, **TRAIN, activation=jnp.tanh)
    np.testing.assert_allclose(jax.jit(call)(affine(variables), X)[0], np.tanh(batch_norm(X)), atol=3e-5)


# ---- quantised outputs -----------------------------------------------------------------------------------------------

INT8 = normlib.Dynamic()
STEPS = normlib.Static(np.linspace(0.01, 0.05, 8, dtype=np.float32))
QUANTISED = [
    ("LayerNorm", {}, lambda x, r, q: normlib.layer_norm(x, SCALE, BIAS, eps=1e-6, quant=q)),
    ("RMSNorm", {}, lambda x, r, q: normlib.rms_norm(x, SCALE, quant=q)),
    ("AddLayerNorm", {}, lambda x, r, q: normlib.add_layer_norm(x, r, SCALE, BIAS, eps=1e-6, quant=q).y),
    ("AddRMSNorm", {}, lambda x, r, q: normlib.add_rms_norm(x, r, SCALE, quant=q).y),
    ("GroupNormSiLU", {"num_groups": 2},
     lambda x, r, q: normlib.group_norm_silu(x, SCALE, BIAS, num_groups=2, eps=1e-6, quant=q)),
    ("BatchNorm", {"use_running_average": True},
     lambda x, r, q: normlib.batch_norm_inference(x, np.zeros(8), np.ones(8), SCALE, BIAS, quant=q)),
    ("BatchNormAct", {"use_running_average": True, "activation": None},
     lambda x, r, q: normlib.batch_norm_inference(x, np.zeros(8), np.ones(8), SCALE, BIAS, quant=q)),
]  # fmt: skip


# per-channel steps where the epilogue differs: rows of features, rows of channels
CASES = [(*q, INT8) for q in QUANTISED] + [(*q, STEPS) for q in QUANTISED if q[0] in ("AddRMSNorm", "BatchNorm")]


@pytest.mark.parametrize(
    ("name", "settings", "operator", "quant"), CASES, ids=[f"{c[0]}-{type(c[3]).__name__}" for c in CASES]
)
def test_quantised_layers_give_the_operators_codes_and_scales(package, name, settings, operator, quant):
    args = (X, R) if name.startswith("Add") else (X,)
    plain, _ = build(package, name, (8,), *args, **settings)
    call, variables = build(package, name, (8,), *args, **settings, quant=quant)
    variables = affine(variables)
    out, _ = jax.jit(call)(variables, *args)
    out = out.y if name.startswith("Add") else out
    expected = jax.jit(lambda x, r: operator(x, r, quant))(X, R)
    assert out.y.dtype == jnp.int8
    np.testing.assert_array_equal(out.y, expected.y)
    np.testing.assert_allclose(out.scale, expected.scale, rtol=1e-6)

    if quant is INT8:  # the static steps saturate
        y, _ = jax.jit(plain)(variables, *args)
        y = y.y if name.startswith("Add") else y
        assert (np.abs(normlib.dequantize(out) - y) <= 0.5001 * out.scale).all()


def test_quant_is_refused_where_batch_statistics_are_used(package):
    for name in ("BatchNorm", "BatchNormAct"):
        with pytest.raises(ValueError, match=r"`quant` is for inference.*use_running_average=True"):
            call, variables = build(package, name, (8,), X, **TRAIN, quant=INT8)
            jax.eval_shape(call, variables, X)
    with pytest.raises(ValueError, match=r"`norm_round_first` says what `quant` quantises"):
        call, variables = build(package, "LayerNorm", (8,), X, norm_round_first=True)
        jax.eval_shape(call, variables, X)


def test_scales_of_a_quantised_nnx_layer_are_no_parameters(package):
    if package == "linen":
        layer = linen.LayerNorm(quant=STEPS)
        assert set(layer.init(jax.random.key(0), X)["params"]) == {"scale", "bias"}
        return
    layer = nnx.LayerNorm(8, quant=STEPS, rngs=flax_nnx.Rngs(0))
    assert set(flax_nnx.to_pure_dict(flax_nnx.state(layer, flax_nnx.Param))) == {"scale", "bias"}
    out = flax_nnx.jit(lambda layer, x: layer(x))(layer, X)
    np.testing.assert_array_equal(out.y, jax.jit(lambda x: normlib.layer_norm(x, eps=1e-6, quant=STEPS))(X).y)


def test_nnx_layers_that_promote_as_linen_refuse_promote_dtype(package):
    if package == "linen":
        return
    for name in ("AddLayerNorm", "AddRMSNorm", "GroupNormSiLU", "BatchNormAct"):
        with pytest.raises(TypeError, match="`promote_dtype` is not an argument"):
            getattr(nnx, name)(32, promote_dtype=None, rngs=flax_nnx.Rngs(0))
