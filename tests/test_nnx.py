"""The nnx layers in use: training, state, devices, transforms, and what bad settings say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from normlib.nnx import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm

X = jnp.asarray(np.random.default_rng(0).normal(2, 3, (8, 5, 3)), jnp.float32)
G = jnp.asarray(np.random.default_rng(1).normal(0, 1, (8, 5, 3)), jnp.float32)
call = nnx.jit(lambda model, x, mask=None: model(x, mask=mask))


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


def layer(kind=BatchNorm, **settings):
    return kind(3, rngs=nnx.Rngs(0), **settings)


def stats(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)))


def assert_trees_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


# ---- a model in training ---------------------------------------------------------------------------------------------


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.bn = BatchNorm(8, momentum=0.9, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)
        self.gn = GroupNorm(8, num_groups=2, rngs=rngs)
        self.instance = InstanceNorm(8, rngs=rngs)
        self.third = nnx.Linear(8, 16, rngs=rngs)
        self.ln = LayerNorm(16, rngs=rngs)
        self.rms = RMSNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn(self.first(x)))
        x = x + nnx.relu(self.gn(self.second(x)))
        x = self.ln(self.third((x + self.instance(x)).mean(1)))
        return self.last(self.rms(x))


@pytest.mark.fast
def test_a_model_with_every_layer_trains_with_nnx_optimizer_and_evaluates():
    x = jnp.asarray(rng().normal(0, 1, (32, 6, 4)), jnp.float32)
    labels = (x[..., 0].mean(1) > 0).astype(jnp.int32)
    model = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer):
        def loss_of(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    model.train()
    losses = [float(train_step(model, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0]
    model.eval()
    before = stats(model)
    assert (nnx.jit(lambda model, x: model(x))(model, x).argmax(-1) == labels).mean() > 0.9
    assert_trees_equal(stats(model), before)


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_train_eval_and_view_choose_the_statistics():
    model = layer(momentum=0.0)
    model.train()
    np.testing.assert_allclose(call(model, X), numpy_bn(X), atol=2e-5)
    mean, var = numpy_stats(X)
    np.testing.assert_allclose(model.mean[...], mean, rtol=1e-6)
    np.testing.assert_allclose(model.var[...], var, rtol=1e-6)

    model.eval()
    expected = (np.asarray(X + 1) - mean) / np.sqrt(var + 1e-5)
    np.testing.assert_allclose(call(model, X + 1), expected, atol=2e-5)
    np.testing.assert_allclose(model.mean[...], mean, rtol=1e-6)

    viewed = nnx.view(model, use_running_average=False)
    np.testing.assert_allclose(call(viewed, X + 1), numpy_bn(X + 1), atol=2e-5)
    expected = (X + 1 - model.mean[...]) / np.sqrt(model.var[...] + 1e-5)
    np.testing.assert_allclose(model(X + 1, use_running_average=True), expected, atol=2e-5)


def test_j68_j52_state_is_flax_s_by_default_and_one_counter_more_with_the_options_that_need_it():
    assert {k: v.shape for k, v in stats(layer()).items()} == {"mean": (3,), "var": (3,)}
    for settings in ({"momentum": None}, {"zero_debias": True}):
        model = layer(**settings)
        before = jax.tree.map(jax.typeof, nnx.state(model))
        call(model, X)
        call(model, 2 * X)
        assert jax.tree.map(jax.typeof, nnx.state(model)) == before
        assert int(model.num_batches[...]) == 2


@pytest.mark.parametrize(("momentum", "weights"), [(None, [1, 1, 1]), (0.8, [0.64, 0.8, 1])])
def test_momentum_none_and_zero_debias_average_the_batches_seen(momentum, weights):
    model = layer(momentum=momentum, zero_debias=momentum is not None)
    batches = [X, 2 * X + 1, X - 3]
    for x in batches:
        call(model, x)
    means, variances = zip(*(numpy_stats(x) for x in batches), strict=True)
    np.testing.assert_allclose(model.mean[...], np.average(means, 0, weights), rtol=2e-6)
    np.testing.assert_allclose(model.var[...], np.average(variances, 0, weights), rtol=2e-6)


@pytest.mark.fast
@pytest.mark.parametrize("momentum", [0.9, None])
@pytest.mark.parametrize("kind", ["empty", "masked"])
def test_b3_j21_an_empty_or_fully_masked_batch_leaves_the_state_alone(kind, momentum):
    model = layer(momentum=momentum)
    call(model, X)
    before = stats(model)
    x = X[:0] if kind == "empty" else X
    y = call(model, x, None if kind == "empty" else jnp.zeros(X.shape, bool))
    assert_trees_equal(stats(model), before)
    np.testing.assert_array_equal(y, np.zeros(x.shape))


def test_b1_one_row_gives_bias_and_finite_running_statistics():
    model = layer(momentum=0.9, unbiased=True)
    np.testing.assert_array_equal(call(model, jnp.full((1, 3), 7.0)), np.zeros((1, 3)))
    np.testing.assert_allclose(model.mean[...], np.full(3, 0.7), rtol=1e-6)
    np.testing.assert_allclose(model.var[...], np.full(3, 0.9), rtol=1e-6)


def test_b20_skip_nonfinite_update_leaves_the_state_alone_after_a_bad_batch():
    model = layer(skip_nonfinite_update=True, zero_debias=True)
    call(model, X)
    before = stats(model)
    call(model, X.at[0, 0, 0].set(jnp.nan))
    assert_trees_equal(stats(model), before)


@pytest.mark.fast
def test_b8_frozen_uses_running_statistics_writes_none_and_gives_scale_and_bias_no_gradient():
    model = layer(frozen=True)
    model.mean[...], model.var[...] = jnp.ones(3), jnp.full(3, 4.0)
    model.train()
    before = stats(model)

    @nnx.jit
    def run(model, x):
        return nnx.grad(lambda model, x: (model(x) * G).sum(), argnums=(0, 1))(model, x)

    grads, dx = run(model, X)
    np.testing.assert_allclose(dx, np.asarray(G) / np.sqrt(4 + 1e-5), rtol=1e-6)
    assert_trees_equal(nnx.to_pure_dict(grads), {"bias": np.zeros(3), "scale": np.zeros(3)})
    assert_trees_equal(stats(model), before)


@pytest.mark.fast
def test_b11_rematerialisation_updates_the_state_once_and_no_gradient_reaches_it():
    def run(model, remat):
        def loss(model, x):
            return (model(x) * G).sum()

        inner = nnx.remat(loss) if remat else loss
        return nnx.jit(nnx.value_and_grad(inner, argnums=(0, 1)))(model, X)

    models = [layer(momentum=None), layer(momentum=None)]
    plain, remat = (run(model, flag) for model, flag in zip(models, (False, True), strict=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *map(jax.tree.leaves, (plain, remat)))
    assert int(models[1].num_batches[...]) == 1
    np.testing.assert_allclose(models[1].mean[...], numpy_stats(X)[0], rtol=1e-6)


def test_c3_the_variance_is_accurate_at_mean_1e4():
    x = jnp.asarray(rng().normal(1e4, 1, (4096, 3)), jnp.float32)
    np.testing.assert_allclose(call(layer(), x), numpy_bn(x), atol=1e-5)


def test_a_16_bit_dtype_leaves_the_running_statistics_unrounded_in_evaluation():
    model = layer(dtype=jnp.bfloat16, use_running_average=True)
    model.mean[...] = jnp.full(3, 100.3)
    y = call(model, jnp.full((4, 3), 101.0))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float32), 0.7 / np.sqrt(1 + 1e-5), rtol=2**-8)


@pytest.mark.parametrize("kind", [BatchNorm, LayerNorm, RMSNorm, InstanceNorm])
def test_scale_offset_adds_to_the_scale_of_the_initial_layer(kind):
    offset = layer(kind, scale_init=nnx.initializers.zeros, scale_offset=1.0)
    np.testing.assert_array_equal(*(call(model, X) for model in (offset, layer(kind))))


def test_group_norm_reduces_any_axes_and_takes_a_mask_with_a_trailing_one():  # J26
    x = jnp.asarray(rng().normal(1, 2, (2, 3, 4, 6)), jnp.float32)
    mask = jnp.asarray(rng().random((2, 3, 4, 1)) < 0.7)
    model = GroupNorm(6, num_groups=2, reduction_axes=(2, 3), rngs=nnx.Rngs(0))
    y = call(model, x, mask)
    for n, h, g in np.ndindex(2, 3, 2):
        part = np.asarray(x, np.float64)[n, h, :, 3 * g : 3 * g + 3]
        measured = part[np.broadcast_to(mask[n, h], part.shape)]
        expected = (part - measured.mean()) / np.sqrt(measured.var() + 1e-6) if measured.size else part * 0
        np.testing.assert_allclose(y[n, h, :, 3 * g : 3 * g + 3], expected, atol=2e-5)


# ---- devices and transforms ------------------------------------------------------------------------------------------


def mesh(size):
    return jax.make_mesh((size,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


@pytest.mark.fast
@pytest.mark.parametrize("check_vma", [True, False])
def test_j20_sync_in_shard_map_equals_one_device_with_an_empty_shard(check_vma):
    mask = np.ones((8, 5, 1), bool)
    mask[0, 2:], mask[4:6] = False, False
    mask = jnp.asarray(mask)
    alone, synced = layer(momentum=0.9), layer(momentum=0.9, axis_name="d")

    def gradients(model, x, mask, g):
        def loss(model, x):
            y = model(x, mask=mask)
            return (y * g).sum(), y

        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(model, x)

    (dp, dx), y = nnx.jit(gradients)(alone, X, mask, G)
    graphdef, state = nnx.split(synced)

    def device(state, x, mask, g):
        model = nnx.merge(graphdef, state)
        (dp, dx), y = gradients(model, x, mask, g)
        dp = nnx.to_pure_dict(dp) if check_vma else jax.lax.psum(nnx.to_pure_dict(dp), "d")
        return dp, dx, y, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    run = jax.shard_map(
        device, mesh=mesh(4), in_specs=(P(), P("d"), P("d"), P("d")), out_specs=(P(), P("d"), P("d"), P()),
        check_vma=check_vma,
    )  # fmt: skip
    got = jax.jit(run)(state, X, mask, G)
    expected = (nnx.to_pure_dict(dp), dx, y, nnx.to_pure_dict(nnx.state(alone, nnx.BatchStat)))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), got, expected)
    np.testing.assert_allclose(got[2][:4], numpy_bn(X, mask)[:4], atol=2e-5)

    synced.eval()
    assert np.isfinite(synced(X)).all()  # A21: evaluation needs no axis


def test_a21_training_outside_the_axis_says_which_axis_is_missing():
    with pytest.raises(NameError, match="data"):
        layer(axis_name="data")(X)


def test_b14_ghost_batches_in_training_and_any_number_of_rows_in_evaluation():
    model = layer(virtual_batch_size=4, momentum=0.0)
    np.testing.assert_allclose(call(model, X), np.concatenate([numpy_bn(X[:4]), numpy_bn(X[4:])]), atol=2e-5)
    model.eval()
    mean, var = numpy_stats(X)
    np.testing.assert_allclose(call(model, X[:1]), (np.asarray(X[:1]) - mean) / np.sqrt(var + 1e-5), atol=2e-5)
    assert model.bn_span(8) == 4


def test_a10_without_running_statistics_the_batch_s_are_used_in_training_and_evaluation():
    model = layer(track_running_stats=False)
    assert stats(model) == {}
    for mode in (model.train, model.eval):
        mode()
        np.testing.assert_allclose(call(model, X), numpy_bn(X), atol=2e-5)


def test_j38_nested_vmap_with_two_axis_names_gives_one_set_of_statistics():
    graphdef, state = nnx.split(layer(axis_name=("a", "b"), momentum=0.0))

    def one(state, x):
        model = nnx.merge(graphdef, state)
        return model(x), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    inner = jax.vmap(one, axis_name="b", in_axes=(None, 0), out_axes=(0, None))
    both = jax.jit(jax.vmap(inner, axis_name="a", in_axes=(None, 0), out_axes=(0, None)))
    y, new = both(state, X.reshape(2, 4, 5, 3))
    np.testing.assert_allclose(y.reshape(X.shape), numpy_bn(X), atol=2e-5)
    np.testing.assert_allclose(new["mean"], numpy_stats(X)[0], rtol=1e-5)


def test_lifted_vmap_and_scan_carry_the_state_of_each_layer():
    @nnx.vmap
    def create(key):
        return BatchNorm(3, momentum=0.0, rngs=nnx.Rngs(params=key))

    many = create(jax.random.split(jax.random.key(0), 2))
    x = jnp.stack([X, 2 * X + 1])
    y = nnx.jit(nnx.vmap(lambda model, x: model(x)))(many, x)
    np.testing.assert_allclose(y, np.stack([numpy_bn(t) for t in x]), atol=2e-5)
    np.testing.assert_allclose(many.mean[...], [numpy_stats(t)[0] for t in x], rtol=1e-5)

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def in_turn(model, x):
        return model(x) * 2 + 1

    in_turn(many, X)
    second = numpy_bn(X) * 2 + 1
    np.testing.assert_allclose(many.mean[...], [numpy_stats(X)[0], numpy_stats(second)[0]], rtol=1e-5, atol=1e-5)


# ---- bad settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"momentum": -0.1}, r"`momentum`.*\[0, 1\]; got -0.1"),
        ({"zero_debias": True, "momentum": None}, r"`zero_debias`.*momentum=None"),
        ({"frozen": True, "track_running_stats": False}, r"`frozen`.*`track_running_stats=False`"),
    ],
)
def test_contradicting_settings_are_errors_when_the_layer_is_built(settings, said):
    with pytest.raises(ValueError, match=said):
        layer(**settings)


def test_group_norm_checks_its_groups_when_built():
    for settings, said in (
        ({"num_groups": 2}, r"`num_groups`=2 must be a positive divisor.*3"),
        ({"num_groups": None, "group_size": 2}, r"`group_size`=2 must be a positive divisor.*3"),
        ({"num_groups": 3, "group_size": 1}, r"exactly one of `num_groups` and `group_size`"),
    ):
        with pytest.raises(ValueError, match=said):
            layer(GroupNorm, **settings)


@pytest.mark.parametrize("kind", [BatchNorm, LayerNorm, RMSNorm, GroupNorm, InstanceNorm])
def test_an_input_with_another_number_of_features_is_an_error(kind):
    model = layer(kind, **({"num_groups": 3} if kind is GroupNorm else {}))
    with pytest.raises(ValueError, match=r"`scale` has shape \(3,\), but x of shape \(8, 5, 4\)"):
        model(jnp.ones((8, 5, 4)))
    bare = kind(3, use_scale=False, rngs=nnx.Rngs(0), use_running_average=True) if kind is BatchNorm else None
    if bare is not None:
        with pytest.raises(ValueError, match=r"`bias` has shape \(3,\), but x of shape \(8, 5, 4\)"):
            bare(jnp.ones((8, 5, 4)))


def test_use_running_average_must_be_said_somewhere():
    model = layer(use_running_average=None)
    with pytest.raises(ValueError, match="`use_running_average` is None in the layer and in the call"):
        model(X)
    assert model(X, use_running_average=False).shape == X.shape
