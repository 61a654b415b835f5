"""The linen layers in use: training, running statistics, devices, transforms, and what bad settings say."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from normlib.linen import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm

X = jnp.asarray(np.random.default_rng(0).normal(2, 3, (8, 5, 3)), jnp.float32)
TRAIN = {"use_running_average": False}


def rng():
    return np.random.default_rng(2)


def numpy_stats(x, where=None):
    """Mean and biased variance per last-axis feature, in float64."""
    x = np.asarray(x, np.float64)
    where = np.ones(x.shape, bool) if where is None else np.broadcast_to(where, x.shape)
    axes, n = tuple(range(x.ndim - 1)), where.sum(tuple(range(x.ndim - 1)))
    mean = np.where(where, x, 0).sum(axes) / n
    return mean, np.where(where, (x - mean) ** 2, 0).sum(axes) / n


def numpy_bn(x, where=None, eps=1e-5):
    mean, var = numpy_stats(x, where)
    return (np.asarray(x, np.float64) - mean) / np.sqrt(var + eps)


def start(layer, x=X):
    return jax.jit(layer.init)(jax.random.key(0), x)


def step(layer, variables, x, mask=None, **call):
    """(y, new batch_stats) of one training step, compiled."""
    run = jax.jit(lambda v, x, mask: layer.apply(v, x, mask=mask, mutable=["batch_stats"], **call))
    y, state = run(variables, x, mask)
    return y, state.get("batch_stats", {})


def assert_trees_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


# ---- a model in training ---------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(8)(x)))
        x = x + nn.relu(GroupNorm(num_groups=2)(nn.Dense(8)(x)))
        x = LayerNorm()(nn.Dense(16)((x + InstanceNorm()(x)).mean(1)))
        return nn.Dense(2)(RMSNorm()(x))


class State(TrainState):
    batch_stats: dict


@pytest.mark.fast
def test_a_model_with_every_layer_trains_with_train_state_and_optax_and_evaluates():
    x = jnp.asarray(rng().normal(0, 1, (32, 6, 4)), jnp.float32)
    labels = (x[..., 0].mean(1) > 0).astype(jnp.int32)
    model = Classifier()
    variables = jax.jit(lambda k: model.init(k, x, train=False))(jax.random.key(0))
    state = State.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2), batch_stats=variables["batch_stats"]
    )

    @jax.jit
    def train_step(state):
        def loss_of(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, x, train=True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

        (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"]), loss

    losses = []
    for _ in range(60):
        state, loss = train_step(state)
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]

    logits = jax.jit(lambda s: model.apply({"params": s.params, "batch_stats": s.batch_stats}, x, train=False))(state)
    assert (logits.argmax(-1) == labels).mean() > 0.9


# ---- running statistics ----------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize(("unbiased", "divisor"), [(False, 40), (True, 39)])
def test_j30_j34_running_statistics_move_by_one_minus_momentum_with_the_divisor_chosen(unbiased, divisor):
    layer = BatchNorm(**TRAIN, momentum=0.75, unbiased=unbiased)
    _, stats = step(layer, start(layer), X)
    mean, var = numpy_stats(X)
    np.testing.assert_allclose(stats["mean"], 0.25 * mean, rtol=1e-6)
    np.testing.assert_allclose(stats["var"], 0.75 + 0.25 * var * 40 / divisor, rtol=1e-6)


def test_j68_j52_the_state_is_rank_one_and_keeps_its_avals_through_a_scan():
    layer = BatchNorm(**TRAIN, zero_debias=True)
    variables = start(layer)
    assert jax.tree.map(jnp.shape, variables) == {
        "params": {"scale": (3,), "bias": (3,)},
        "batch_stats": {"mean": (3,), "var": (3,), "num_batches": ()},
    }

    @jax.jit
    def run(variables, batches):
        def body(stats, x):
            y, new = layer.apply({**variables, "batch_stats": stats}, x, mutable=["batch_stats"])
            return new["batch_stats"], y.mean()

        return jax.lax.scan(body, variables["batch_stats"], batches)

    stats, _ = run(variables, jnp.stack([X, X + 1]))
    avals = [jax.tree.map(jax.typeof, tree) for tree in (stats, variables["batch_stats"])]
    assert avals[0] == avals[1]
    assert int(stats["num_batches"]) == 2


@pytest.mark.fast
def test_momentum_none_averages_all_batches_alike_and_counts_them():
    layer = BatchNorm(**TRAIN, momentum=None)
    variables = start(layer)
    batches = [X, 2 * X + 1, X - 3]
    for x in batches:
        variables["batch_stats"] = step(layer, variables, x)[1]
    means, variances = zip(*(numpy_stats(x) for x in batches), strict=True)
    stats = variables["batch_stats"]
    np.testing.assert_allclose(stats["mean"], np.mean(means, 0), rtol=1e-6)
    np.testing.assert_allclose(stats["var"], np.mean(variances, 0), rtol=1e-6)
    assert int(stats["num_batches"]) == 3


def test_zero_debias_gives_the_weighted_average_of_the_batches_seen():
    layer = BatchNorm(**TRAIN, momentum=0.9, zero_debias=True)
    variables = start(layer)
    batches = [X, 2 * X + 1, X - 3]
    for x in batches:
        variables["batch_stats"] = step(layer, variables, x)[1]
    weights = 0.9 ** np.arange(2, -1, -1)
    means, variances = zip(*(numpy_stats(x) for x in batches), strict=True)
    stats = variables["batch_stats"]
    np.testing.assert_allclose(stats["mean"], np.average(means, 0, weights), rtol=2e-6)
    np.testing.assert_allclose(stats["var"], np.average(variances, 0, weights), rtol=2e-6)


def test_a_flax_checkpoint_without_the_batch_counter_evaluates_and_trains_on():
    layer = BatchNorm(momentum=None)
    stats = {"mean": jnp.ones(3), "var": jnp.full(3, 4.0)}
    variables = {"params": {"scale": jnp.ones(3), "bias": jnp.zeros(3)}, "batch_stats": stats}
    y = layer.apply(variables, X, use_running_average=True)
    np.testing.assert_allclose(y, (np.asarray(X) - 1) / np.sqrt(4 + 1e-5), rtol=1e-5, atol=1e-6)
    _, new = step(layer, variables, X, **TRAIN)
    assert int(new["num_batches"]) == 1


@pytest.mark.fast
@pytest.mark.parametrize("momentum", [0.9, None])
@pytest.mark.parametrize("kind", ["empty", "masked"])
def test_b3_j21_an_empty_or_fully_masked_batch_leaves_the_state_alone(kind, momentum):
    layer = BatchNorm(**TRAIN, momentum=momentum)
    variables = start(layer)
    variables["batch_stats"] = step(layer, variables, X)[1]
    x = X[:0] if kind == "empty" else X
    mask = None if kind == "empty" else jnp.zeros(X.shape, bool)
    y, stats = step(layer, variables, x, mask)
    assert_trees_equal(stats, variables["batch_stats"])
    np.testing.assert_array_equal(y, np.zeros(x.shape))


def test_b1_one_row_gives_bias_and_finite_running_statistics():
    layer = BatchNorm(**TRAIN, momentum=0.9, unbiased=True)
    y, stats = step(layer, start(layer), jnp.full((1, 3), 7.0))
    np.testing.assert_array_equal(y, np.zeros((1, 3)))
    np.testing.assert_allclose(stats["mean"], np.full(3, 0.7), rtol=1e-6)
    np.testing.assert_allclose(stats["var"], np.full(3, 0.9), rtol=1e-6)
    for layer in (GroupNorm(num_groups=3), InstanceNorm()):
        np.testing.assert_array_equal(jax.jit(layer.init_with_output)(jax.random.key(0), jnp.full((1, 3), 7.0))[0], y)


@pytest.mark.parametrize("momentum", [0.9, None])
def test_b20_skip_nonfinite_update_leaves_the_state_alone_after_a_bad_batch(momentum):
    bad = X.at[0, 0, 0].set(jnp.inf)
    for skip in (True, False):
        layer = BatchNorm(**TRAIN, momentum=momentum, skip_nonfinite_update=skip)
        variables = start(layer)
        _, stats = step(layer, variables, bad)
        if skip:
            assert_trees_equal(stats, variables["batch_stats"])
        else:
            assert not np.isfinite(stats["mean"][0])


@pytest.mark.parametrize("value", [1e30, jnp.nan, jnp.inf, -jnp.inf])
def test_j27_training_does_not_depend_on_the_running_statistics(value):
    layer = BatchNorm(**TRAIN, method="adaptive")
    variables = start(layer)
    poisoned = {**variables, "batch_stats": jax.tree.map(lambda s: jnp.full_like(s, value), variables["batch_stats"])}
    for v in (variables, poisoned):
        np.testing.assert_allclose(step(layer, v, X)[0], numpy_bn(X), atol=2e-5)


@pytest.mark.fast
def test_b8_frozen_uses_running_statistics_writes_none_and_gives_scale_and_bias_no_gradient():
    layer = BatchNorm(**TRAIN, frozen=True)
    variables = start(layer)
    variables["batch_stats"] = {"mean": jnp.ones(3), "var": jnp.full(3, 4.0)}
    variables["params"]["scale"] = jnp.array([1.0, 2.0, 3.0])

    def loss(params, x):
        y, state = layer.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return (y**2).sum() / 2, (y, state)

    (_, (y, state)), (grads, dx) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        variables["params"], X
    )
    a = np.array([1, 2, 3]) / np.sqrt(4 + 1e-5)
    np.testing.assert_allclose(y, (np.asarray(X) - 1) * a, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, (np.asarray(X) - 1) * a * a, rtol=1e-5, atol=1e-6)
    assert_trees_equal(state["batch_stats"], variables["batch_stats"])
    assert_trees_equal(grads, jax.tree.map(jnp.zeros_like, grads))


def test_force_float32_reductions_false_changes_stored_dtypes_only():
    layer = BatchNorm(**TRAIN, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, force_float32_reductions=False)
    x = (X * 0.01 + 100).astype(jnp.bfloat16)
    variables = start(layer, x)
    y, stats = step(layer, variables, x)
    assert {leaf.dtype for leaf in jax.tree.leaves((y, stats, variables))} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(np.asarray(y, np.float64), numpy_bn(x), atol=2**-6)


def test_c3_the_variance_is_accurate_at_mean_1e4_whatever_use_fast_variance_says():
    x = jnp.asarray(rng().normal(1e4, 1, (4096, 4)), jnp.float32)
    for fast in (True, False):
        y, _ = step(layer := BatchNorm(**TRAIN, use_fast_variance=fast), start(layer, x), x)
        np.testing.assert_allclose(y, numpy_bn(x), atol=1e-5)


def test_float64_input_is_computed_in_float64(double_precision):
    x = jnp.asarray(rng().normal(2, 3, (16, 4)), jnp.float64)
    layer = BatchNorm(**TRAIN, param_dtype=jnp.float64, force_float32_reductions=False)
    y, stats = step(layer, start(layer, x), x)
    np.testing.assert_allclose(y, numpy_bn(x), atol=1e-14)
    np.testing.assert_allclose(stats["mean"], 0.01 * numpy_stats(x)[0], rtol=1e-13)


# ---- masks, axes, offsets, rules -------------------------------------------------------------------------------------


def test_j26_group_norm_takes_a_mask_with_a_trailing_one():
    x = jnp.asarray(rng().normal(1, 2, (2, 3, 4, 6)), jnp.float32)
    mask = rng().random((2, 3, 4, 1)) < 0.6
    layer = GroupNorm(num_groups=2)
    y = jax.jit(lambda x, m: layer.apply(layer.init(jax.random.key(0), x), x, mask=m))(x, mask)
    for n in range(2):
        for g in (slice(0, 3), slice(3, 6)):
            part = np.asarray(x, np.float64)[n, :, :, g]
            measured = part[np.broadcast_to(mask[n], part.shape)]
            expected = (part - measured.mean()) / np.sqrt(measured.var() + 1e-6)
            np.testing.assert_allclose(y[n, :, :, g], expected, atol=2e-5)


@pytest.mark.parametrize("layer", [BatchNorm(**TRAIN), LayerNorm(), RMSNorm(), GroupNorm(3), InstanceNorm()])
def test_j24_nan_behind_the_mask_reaches_nothing_that_is_measured(layer):
    mask = jnp.asarray(rng().random((8, 5, 1)) < 0.7).at[:, 0].set(True)
    poisoned = jnp.where(mask, X, jnp.nan)
    variables = start(layer)

    def loss(params, x):
        y, state = layer.apply({**variables, "params": params}, x, mask=mask, mutable=["batch_stats"])
        return (jnp.where(mask, y, 0) ** 3).sum(), (jnp.where(mask, y, 0), state)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    for a, b in zip(*(jax.tree.leaves(run(variables["params"], x)) for x in (poisoned, X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_j60_a_positive_axis_is_the_negative_one():
    x = jnp.asarray(rng().normal(0, 1, (3, 4, 5, 6)), jnp.float32)
    y, z = (step(layer := BatchNorm(**TRAIN, axis=axis), start(layer, x), x)[0] for axis in (3, -1))
    np.testing.assert_array_equal(y, z)


def test_batch_norm_with_two_feature_axes_has_statistics_for_each_pair():
    layer = BatchNorm(**TRAIN, axis=(2, 1), momentum=0.0)
    variables = start(layer)
    assert variables["params"]["scale"].shape == (5, 3)
    y, stats = step(layer, variables, X)
    x = np.asarray(X, np.float64)
    np.testing.assert_allclose(stats["var"], x.var(0), rtol=1e-5)
    np.testing.assert_allclose(y, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5), atol=1e-5)


@pytest.mark.parametrize("layer", [BatchNorm, LayerNorm, RMSNorm, InstanceNorm])
def test_scale_offset_adds_to_the_scale_of_the_initial_layer(layer):
    mode = TRAIN if layer is BatchNorm else {}
    offset = layer(**mode, scale_init=nn.initializers.zeros, scale_offset=1.0)
    y, z = (jax.jit(m.init_with_output)(jax.random.key(0), X)[0] for m in (offset, layer(**mode)))
    np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize("layer", [BatchNorm, LayerNorm, RMSNorm, GroupNorm, InstanceNorm])
def test_rule_both_gives_forward_mode(layer):
    kind = {"num_groups": 3} if layer is GroupNorm else TRAIN if layer is BatchNorm else {}
    layer = layer(**kind, rule="both")
    variables = start(layer)

    def f(x):
        return layer.apply(variables, x, mutable=["batch_stats"])[0]

    direction, cotangent = jnp.asarray(rng().normal(0, 1, (2, *X.shape)), jnp.float32)
    tangent = jax.jit(lambda x, d: jax.jvp(f, (x,), (d,))[1])(X, direction)
    back = jax.jit(lambda x, g: jax.vjp(f, x)[1](g)[0])(X, cotangent)
    np.testing.assert_allclose(jnp.vdot(back, direction), jnp.vdot(tangent, cotangent), rtol=1e-4)


def test_batch_invariant_rows_keep_their_bits_beside_other_rows():
    x = jnp.asarray(rng().normal(0, 1, (70, 96)), jnp.float32)
    for layer in (LayerNorm(batch_invariant=True), RMSNorm(batch_invariant=True)):
        variables = start(layer, x)
        run = jax.jit(layer.apply)
        np.testing.assert_array_equal(run(variables, x)[:3], run(variables, x[:3]))


@pytest.mark.parametrize("kind", [BatchNorm, LayerNorm, RMSNorm, GroupNorm, InstanceNorm])
def test_a_16_bit_input_with_float32_parameters_is_kept_once(kind):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 256, 64)), jnp.bfloat16)
    options = {GroupNorm: {"num_groups": 8}, BatchNorm: {"use_running_average": False}}.get(kind, {})
    layer = kind(**options)
    variables = layer.init(jax.random.key(0), x)

    def call(x):
        return layer.apply(variables, x, mutable=["batch_stats"])[0]

    y, vjp = jax.vjp(call, x)
    assert y.dtype == jnp.float32
    assert sum(t.nbytes for t in jax.tree.leaves(vjp) if hasattr(t, "nbytes")) <= 1.2 * x.nbytes
