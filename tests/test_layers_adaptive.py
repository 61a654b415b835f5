"""Layers with a condition or a mix of statistics, linen and nnx: adaptive, conditional, switchable, and DyT."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normlib
from normlib import linen, nnx
from tests.layers import PACKAGES, build, kept_bytes, with_params

both = pytest.mark.parametrize("package", PACKAGES)
TRAIN = {"use_running_average": False}
rng = np.random.default_rng(0)
X = rng.normal(2, 3, (8, 6, 5)).astype(np.float32)
C = rng.normal(0, 1, (8, 4)).astype(np.float32)
G = rng.normal(0, 1, X.shape).astype(np.float32)
LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1], np.int32)
SCALE, BIAS = np.linspace(0.5, 2, 5, dtype=np.float32), np.linspace(-1, 1, 5, dtype=np.float32)


def silu(z):
    return z / (1 + np.exp(-z))


def layer_norm(x):
    x = np.asarray(x, np.float64)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def batch_norm(x, mean=None, var=None):
    x = np.asarray(x, np.float64)
    mean = x.mean((0, 1)) if mean is None else mean
    var = x.var((0, 1)) if var is None else var
    return (x - mean) / np.sqrt(var + 1e-5)


def projection(parts, seed=3):
    r = np.random.default_rng(seed)
    return {"kernel": r.normal(0, 0.3, (4, parts * 5)), "bias": r.normal(0, 0.3, parts * 5)}


def shapes(variables):
    return jax.tree.map(jnp.shape, variables["params"])


# ---- adaptive layer norms --------------------------------------------------------------------------------------------


@pytest.mark.family
@both
def test_ada_layer_norm_owns_a_projection_of_the_condition_that_starts_at_zero(package):
    call, variables = build(package, "AdaLayerNorm", (5, 4), X, C)
    assert shapes(variables) == {"projection": {"kernel": (4, 10), "bias": (10,)}}
    jax.tree.map(lambda p: np.testing.assert_array_equal(p, 0), variables["params"])
    np.testing.assert_allclose(jax.jit(call)(variables, X, C)[0], layer_norm(X), atol=1e-5)

    given = projection(2)
    y, _ = jax.jit(call)(with_params(variables, projection=given), X, C)
    shift, scale = np.split(silu(C.astype(np.float64)) @ given["kernel"] + given["bias"], 2, axis=-1)
    np.testing.assert_allclose(y, layer_norm(X) * (1 + scale[:, None]) + shift[:, None], atol=3e-5)


@both
def test_ada_layer_norm_takes_a_condition_per_token_and_an_affine_of_its_own(package):
    tokens = np.random.default_rng(5).normal(0, 1, (8, 6, 4)).astype(np.float32)
    settings = {"use_scale": True, "use_bias": True, "scale_offset": 0.0}
    call, variables = build(package, "AdaLayerNorm", (5, 4), X, tokens, **settings)
    given = projection(2)
    y, _ = jax.jit(call)(with_params(variables, projection=given, scale=SCALE, bias=BIAS), X, tokens)
    shift, scale = np.split(silu(tokens.astype(np.float64)) @ given["kernel"] + given["bias"], 2, axis=-1)
    np.testing.assert_allclose(y, (layer_norm(X) * SCALE + BIAS) * scale + shift, atol=3e-5)


@pytest.mark.family
@both
def test_a_block_of_ada_layer_norm_zero_starts_as_the_identity(package):
    call, variables = build(package, "AdaLayerNormZero", (5, 4), X, C)
    assert shapes(variables) == {"projection": {"kernel": (4, 15), "bias": (15,)}}

    @jax.jit
    def block(variables, x, c):
        y, gate = call(variables, x, c)[0]
        return normlib.gate_residual(x, jnp.tanh(y), gate)

    np.testing.assert_array_equal(block(variables, X, C), X)
    grads = jax.jit(jax.grad(lambda v: (block(v, X, C) * G).sum()))(variables)["params"]["projection"]
    gate = np.asarray(grads["kernel"])[:, 10:]
    expected = silu(C.astype(np.float64)).T @ (G * np.tanh(layer_norm(X))).sum(1)
    np.testing.assert_allclose(gate, expected, atol=1e-4)  # the gate learns first
    np.testing.assert_array_equal(np.asarray(grads["kernel"])[:, :10], 0)


@both
def test_two_ada_layer_norm_zeros_are_the_six_chunks_of_one_projection(package):
    call, variables = build(package, "AdaLayerNormZero", (5, 4), X, C)
    six = projection(6)
    halves = [{"kernel": six["kernel"][:, i : i + 15], "bias": six["bias"][i : i + 15]} for i in (0, 15)]
    first, second = (with_params(variables, projection=h) for h in halves)

    @jax.jit
    def block(first, second, x, c):
        y, gate = call(first, x, c)[0]
        x = normlib.gate_residual(x, jnp.tanh(y), gate)
        y, gate = call(second, x, c)[0]
        return normlib.gate_residual(x, jnp.sin(y), gate)

    chunks = np.split((silu(C.astype(np.float64)) @ six["kernel"] + six["bias"])[:, None], 6, axis=-1)
    shift1, scale1, gate1, shift2, scale2, gate2 = chunks
    x = X + gate1 * np.tanh(layer_norm(X) * (1 + scale1) + shift1)
    x = x + gate2 * np.sin(layer_norm(x) * (1 + scale2) + shift2)
    np.testing.assert_allclose(block(first, second, X, C), x, atol=3e-5)


@both
@pytest.mark.parametrize("name", ["AdaLayerNorm", "AdaLayerNormZero"])
def test_ada_layer_norms_promote_as_flax_and_keep_16_bit_x_once(package, name):
    x = jnp.tile(jnp.asarray(X, jnp.bfloat16), (1, 100, 1))
    c = jnp.asarray(C, jnp.bfloat16)
    call, variables = build(package, name, (5, 4), x, c)
    half, _ = build(package, name, (5, 4), x, c, dtype=jnp.bfloat16)

    def y(f):
        return lambda x: jax.tree.leaves(f(variables, x, c)[0])[0]

    assert jax.eval_shape(y(call), x).dtype == jnp.float32
    assert jax.eval_shape(y(half), x).dtype == jnp.bfloat16
    assert kept_bytes(y(call), x) <= x.nbytes


@both
def test_quantised_ada_layer_norm_gives_the_operators_codes(package):
    quant = normlib.Dynamic()
    call, variables = build(package, "AdaLayerNorm", (5, 4), X, C, quant=quant)
    variables = with_params(variables, projection=projection(2))

    @jax.jit
    def operator(p, x, c):
        shift, scale = jnp.split(nn.silu(c) @ p["kernel"] + p["bias"], 2, axis=-1)
        return normlib.ada_layer_norm(x, scale, shift, eps=1e-6, quant=quant)

    out, _ = jax.jit(call)(variables, X, C)
    expected = operator(variables["params"]["projection"], X, C)
    assert out.y.dtype == jnp.int8 and out.scale.shape == (8, 6, 1)
    assert (np.abs(np.asarray(out.y, np.int32) - np.asarray(expected.y, np.int32)) <= 1).all()
    np.testing.assert_allclose(out.scale, expected.scale, rtol=1e-5)


# ---- conditional batch norm ------------------------------------------------------------------------------------------


@pytest.mark.family
@both
def test_conditional_batch_norm_by_class_trains_tables_and_evaluates(package):
    call, variables = build(package, "ConditionalBatchNorm", (5,), X, LABELS, **TRAIN, num_classes=3, momentum=0.75)
    assert shapes(variables) == {"scale": (3, 5), "bias": (3, 5)}
    jax.tree.map(lambda p: np.testing.assert_array_equal(p, 0), variables["params"])
    r = np.random.default_rng(4)
    tables = {name: r.normal(0, 0.5, (3, 5)).astype(np.float32) for name in ("scale", "bias")}
    scale, bias = (tables[n][LABELS][:, None] for n in ("scale", "bias"))
    variables = with_params(variables, **tables)

    y, stats = jax.jit(call)(variables, X, LABELS)
    np.testing.assert_allclose(y, batch_norm(X) * (1 + scale) + bias, atol=3e-5)
    mean, var = 0.25 * X.mean((0, 1), np.float64), 0.75 + 0.25 * X.var((0, 1), np.float64)
    np.testing.assert_allclose(stats["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(stats["var"], var, rtol=1e-5)

    evaluate, _ = build(package, "ConditionalBatchNorm", (5,), X, LABELS, use_running_average=True, num_classes=3)
    y, _ = jax.jit(evaluate)({**variables, "batch_stats": stats}, X, LABELS)
    np.testing.assert_allclose(y, batch_norm(X, mean, var) * (1 + scale) + bias, atol=3e-5)

    grads = jax.jit(jax.grad(lambda p: (call({**variables, "params": p}, X, LABELS)[0] * G).sum()))(variables["params"])
    rows = (G * batch_norm(X)).sum(1)
    np.testing.assert_allclose(grads["scale"], [rows[LABELS == k].sum(0) for k in range(3)], atol=1e-3)


@both
def test_conditional_batch_norm_by_network_output(package):
    call, variables = build(package, "ConditionalBatchNorm", (5, {"cond_features": 4}), X, C, **TRAIN)
    assert shapes(variables) == {"projection": {"kernel": (4, 10), "bias": (10,)}}
    given = projection(2)
    y, _ = jax.jit(call)(with_params(variables, projection=given), X, C)
    scale, bias = np.split((C @ given["kernel"] + given["bias"])[:, None], 2, axis=-1)
    np.testing.assert_allclose(y, batch_norm(X) * (1 + scale) + bias, atol=3e-5)


@both
@pytest.mark.parametrize("virtual", [None, 4])
def test_conditional_batch_norm_shares_statistics_over_devices(package, virtual):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    settings = {"num_classes": 3, "axis_name": "data", "virtual_batch_size": virtual, "momentum": 0.0}
    _, variables = build(package, "ConditionalBatchNorm", (5,), X, LABELS, use_running_average=True, **settings)
    call, _ = build(package, "ConditionalBatchNorm", (5,), X, LABELS, **TRAIN, **settings)
    table = np.arange(15, dtype=np.float32).reshape(3, 5) / 10
    variables = with_params(variables, scale=table)
    step = jax.shard_map(call, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P("data"), P()))
    y, stats = jax.jit(step)(variables, X, LABELS)
    parts = (X,) if virtual is None else (X[:4], X[4:])
    expected = np.concatenate([batch_norm(part) for part in parts]) * (1 + table[LABELS][:, None])
    np.testing.assert_allclose(y, expected, atol=3e-5)
    np.testing.assert_allclose(stats["mean"], X.mean((0, 1)), rtol=1e-5)


@both
def test_conditional_batch_norm_in_ghost_batches_frozen_and_in_remat(package):
    settings = {"num_classes": 3, **TRAIN}
    ghost, variables = build(package, "ConditionalBatchNorm", (5,), X, LABELS, **settings, virtual_batch_size=2)
    table = np.arange(15, dtype=np.float32).reshape(3, 5) / 10
    variables = with_params(variables, scale=table)
    y, _ = jax.jit(jax.checkpoint(ghost))(variables, X, LABELS)
    expected = np.concatenate([batch_norm(X[i : i + 2]) for i in range(0, 8, 2)]) * (1 + table[LABELS][:, None])
    np.testing.assert_allclose(y, expected, atol=3e-5)

    frozen, _ = build(package, "ConditionalBatchNorm", (5,), X, LABELS, **settings, frozen=True)
    y, stats = jax.jit(frozen)(variables, X, LABELS)
    np.testing.assert_allclose(y, batch_norm(X, 0, 1) * (1 + table[LABELS][:, None]), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, stats, variables["batch_stats"])


@both
def test_conditional_batch_norm_says_what_is_wrong_with_its_condition(package):
    by_class = build(package, "ConditionalBatchNorm", (5,), X, LABELS, **TRAIN, num_classes=3)
    by_network = build(package, "ConditionalBatchNorm", (5, {"cond_features": 4}), X, C, **TRAIN)
    with pytest.raises(TypeError, match="`labels` must be integers; got float32"):
        jax.eval_shape(*by_class, X, C[:, 0])
    with pytest.raises(ValueError, match=r"`labels` must have shape \(8,\)"):
        jax.eval_shape(*by_class, X, LABELS[:4])
    with pytest.raises(ValueError, match=r"`condition` must be a floating array \[8, features\].*give `num_classes`"):
        jax.eval_shape(*by_network, X, LABELS)
    with pytest.raises(ValueError, match="`axis`=0 holds axis 0"):
        jax.eval_shape(*build(package, "ConditionalBatchNorm", (8,), X.T, C[:5], axis=0, num_classes=3), X, LABELS)
    if package == "nnx":
        with pytest.raises(ValueError, match="exactly one of `num_classes` and `cond_features`"):
            nnx.ConditionalBatchNorm(5, rngs=flax_nnx.Rngs(0))
    y = jax.jit(by_class[0])(by_class[1], X, np.r_[7, LABELS[1:]])[0]
    assert np.isnan(y[0]).all() and np.isfinite(y[1:]).all()


# ---- dynamic tanh, switchable norm -----------------------------------------------------------------------------------


@pytest.mark.family
@both
def test_dynamic_tanh_learns_its_slope(package):
    call, variables = build(package, "DynamicTanh", (5,), X, alpha_init=0.25)
    assert shapes(variables) == {"alpha": (), "scale": (5,), "bias": (5,)}
    variables = with_params(variables, scale=SCALE, bias=BIAS)
    t = np.tanh(0.25 * X.astype(np.float64))
    np.testing.assert_allclose(jax.jit(call)(variables, X)[0], SCALE * t + BIAS, atol=1e-5)
    grads = jax.jit(jax.grad(lambda v: (call(v, X)[0] * G).sum()))(variables)["params"]
    np.testing.assert_allclose(grads["alpha"], (G * SCALE * (1 - t**2) * X).sum(), rtol=1e-4)

    half = jnp.tile(jnp.asarray(X, jnp.bfloat16), (10, 1, 1))
    assert jax.eval_shape(call, variables, half)[0].dtype == jnp.float32
    assert kept_bytes(lambda x: call(variables, x)[0], half) <= half.nbytes


def switchable(x, logits, mean=None, var=None):
    x = np.asarray(x, np.float64)
    weights = [np.exp(t) / np.exp(t).sum() for t in logits]
    axes = ((1,), (1, 2), (0, 1))
    means, variances = ([f(x, a, keepdims=True) for a in axes] for f in (np.mean, np.var))
    if mean is not None:
        means[2], variances[2] = mean, var
    mixed = [sum(w * s for w, s in zip(ws, found)) for ws, found in zip(weights, (means, variances))]
    return (x - mixed[0]) / np.sqrt(mixed[1] + 1e-5)


@pytest.mark.family
@both
def test_switchable_norm_mixes_statistics_and_evaluates_with_running_ones(package):
    call, variables = build(package, "SwitchableNorm", (5,), X, **TRAIN, momentum=0.75)
    assert shapes(variables) == {"scale": (5,), "bias": (5,), "mean_logits": (3,), "var_logits": (3,)}
    np.testing.assert_allclose(jax.jit(call)(variables, X)[0], switchable(X, np.zeros((2, 3))), atol=2e-5)

    logits = np.array([[0.3, -0.2, 0.6], [-0.4, 0.1, 0.5]])
    variables = with_params(variables, mean_logits=logits[0], var_logits=logits[1], scale=SCALE, bias=BIAS)
    y, stats = jax.jit(call)(variables, X)
    np.testing.assert_allclose(y, switchable(X, logits) * SCALE + BIAS, atol=3e-5)
    mean, var = 0.25 * X.mean((0, 1), np.float64), 0.75 + 0.25 * X.var((0, 1), np.float64)
    np.testing.assert_allclose(stats["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(stats["var"], var, rtol=1e-5)

    evaluate, _ = build(package, "SwitchableNorm", (5,), X, use_running_average=True)
    y, after = jax.jit(evaluate)({**variables, "batch_stats": stats}, X)
    np.testing.assert_allclose(y, switchable(X, logits, mean, var) * SCALE + BIAS, atol=3e-5)
    jax.tree.map(np.testing.assert_array_equal, after, stats)
    half = jnp.asarray(X, jnp.bfloat16)
    assert jax.eval_shape(call, variables, half)[0].dtype == jnp.float32


@both
def test_switchable_norm_shares_batch_statistics_over_devices(package):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    _, variables = build(package, "SwitchableNorm", (5,), X, use_running_average=True, axis_name="data")
    call, _ = build(package, "SwitchableNorm", (5,), X, **TRAIN, axis_name="data", momentum=0.0)
    step = jax.shard_map(call, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P("data"), P()))
    y, stats = jax.jit(step)(variables, X)
    np.testing.assert_allclose(y, switchable(X, np.zeros((2, 3))), atol=3e-5)
    np.testing.assert_allclose(stats["var"], X.var((0, 1)), rtol=1e-5)


# ---- models ----------------------------------------------------------------------------------------------------------


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, c, train):
        norm = {"use_running_average": not train}
        h = linen.BatchNormAct(**norm)(nn.Dense(8)(x))
        h = linen.ConditionalBatchNorm(**norm, num_classes=3)(h, c)
        y, gate = linen.AdaLayerNormZero()(h[:, None], jax.nn.one_hot(c, 3))
        h = normlib.gate_residual(h[:, None], nn.Dense(8)(y), gate)[:, 0]
        return nn.Dense(2)(linen.AddRMSNorm()(nn.Dense(8)(h), h).y)


class Nnx(flax_nnx.Module):
    def __init__(self, rngs):
        sizes = ((4, 8), (8, 8), (8, 8), (8, 2))
        self.first, self.branch, self.second, self.last = (flax_nnx.Linear(*s, rngs=rngs) for s in sizes)
        self.act = nnx.BatchNormAct(8, rngs=rngs)
        self.conditional = nnx.ConditionalBatchNorm(8, num_classes=3, rngs=rngs)
        self.ada = nnx.AdaLayerNormZero(8, 3, rngs=rngs)
        self.add = nnx.AddRMSNorm(8, rngs=rngs)

    def __call__(self, x, c):
        h = self.conditional(self.act(self.first(x)), c)
        y, gate = self.ada(h[:, None], jax.nn.one_hot(c, 3))
        h = normlib.gate_residual(h[:, None], self.branch(y), gate)[:, 0]
        return self.last(self.add(self.second(h), h).y)


def data():
    r = np.random.default_rng(6)
    x = r.normal(0, 1, (32, 4)).astype(np.float32)
    return x, r.integers(0, 3, 32).astype(np.int32), (x[:, 0] > 0).astype(np.int32)


def test_a_linen_model_of_these_layers_trains_and_evaluates():
    x, c, labels = data()
    model, optimizer = Linen(), optax.adam(2e-2)
    variables = jax.jit(lambda k: model.init(k, x, c, train=False))(jax.random.key(0))
    assert set(variables["params"]) == {
        "Dense_0", "Dense_1", "Dense_2", "Dense_3", "BatchNormAct_0", "ConditionalBatchNorm_0", "AdaLayerNormZero_0",
        "AddRMSNorm_0",
    }  # fmt: skip

    @jax.jit
    def step(params, stats, state):
        def loss_of(params):
            out, new = model.apply({"params": params, "batch_stats": stats}, x, c, train=True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean(), new["batch_stats"]

        (loss, stats_), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), stats_, state, loss

    params, stats = variables["params"], variables["batch_stats"]
    state, losses = optimizer.init(params), []
    for _ in range(60):
        params, stats, state, loss = step(params, stats, state)
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]
    logits = jax.jit(lambda p, s: model.apply({"params": p, "batch_stats": s}, x, c, train=False))(params, stats)
    assert (logits.argmax(-1) == labels).mean() > 0.8


def test_an_nnx_model_of_these_layers_trains_and_evaluates():
    x, c, labels = data()
    model = Nnx(flax_nnx.Rngs(0))
    optimizer = flax_nnx.Optimizer(model, optax.adam(2e-2), wrt=flax_nnx.Param)

    @flax_nnx.jit
    def step(model, optimizer):
        def loss_of(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x, c), labels).mean()

        loss, grads = flax_nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    model.train()
    losses = [float(step(model, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0]
    model.eval()
    before = flax_nnx.to_pure_dict(flax_nnx.state(model, flax_nnx.BatchStat))
    logits = flax_nnx.jit(lambda model, x, c: model(x, c))(model, x, c)
    assert (logits.argmax(-1) == labels).mean() > 0.8
    after = flax_nnx.to_pure_dict(flax_nnx.state(model, flax_nnx.BatchStat))
    jax.tree.map(np.testing.assert_array_equal, after, before)


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x, c):
        h = linen.BatchNormAct(use_running_average=False, activation="silu")(x)
        return linen.ConditionalBatchNorm(use_running_average=False, num_classes=3)(h, c)


def test_conversion_changes_the_statistics_of_these_layers_and_keeps_their_class():
    model = Pair()
    variables = jax.jit(model.init)(jax.random.key(0), X, LABELS)
    ghost = normlib.convert_batch_norm(model, virtual_batch_size=4)
    y = jax.jit(lambda v: ghost.apply(v, X, LABELS, mutable=["batch_stats"])[0])(variables)
    expected = np.concatenate([batch_norm(silu(batch_norm(X[i : i + 4]))) for i in (0, 4)])
    np.testing.assert_allclose(y, expected, atol=3e-5)

    converted = normlib.convert_batch_norm(Nnx(flax_nnx.Rngs(0)), virtual_batch_size=16)
    assert type(converted.act) is nnx.BatchNormAct and converted.act.virtual_batch_size == 16
    assert type(converted.conditional) is nnx.ConditionalBatchNorm and converted.conditional.virtual_batch_size == 16
