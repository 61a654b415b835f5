"""The linen layers across devices and under transforms, and what bad settings say."""

import doctest
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normlib.linen import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm

TRAIN = {"use_running_average": False}
X = jnp.asarray(np.random.default_rng(0).normal(2, 3, (8, 5, 3)), jnp.float32)
G = jnp.asarray(np.random.default_rng(1).normal(0, 1, (8, 5, 3)), jnp.float32)
MASK = np.ones((8, 5, 1), bool)
MASK[0, 2:], MASK[4:6] = False, False  # the third of four devices has no valid row


def rng():
    return np.random.default_rng(2)


def mesh(*sizes, names=("d",)):
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


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


def training(layer, variables):
    """(params, stats, x, mask, cotangent) -> (y, new stats, dparams, dx) of sum(y * cotangent)."""

    def run(params, stats, x, mask, g):
        def loss(params, x):
            variables = {"params": params, "batch_stats": stats}
            y, new = layer.apply(variables, x, mask=mask, mutable=["batch_stats"])
            return (y * g).sum(), (y, new["batch_stats"])

        (_, (y, new)), (dp, dx) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return y, new, dp, dx

    return run


def assert_trees_close(got, expected, atol=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5), got, expected)


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("method", ["auto", "adaptive"])
def test_j20_a21_sync_in_shard_map_equals_one_device_with_an_empty_shard(method, check_vma):
    layer = BatchNorm(**TRAIN, momentum=0.9, axis_name="d", method=method)
    alone = BatchNorm(**TRAIN, momentum=0.9)
    variables = start(layer)  # J36: no axis is bound here
    expected = jax.jit(training(alone, variables))(variables["params"], variables["batch_stats"], X, MASK, G)

    def device(params, stats, x, mask, g):
        y, new, dp, dx = training(layer, variables)(params, stats, x, mask, g)
        # the recipe: summed over the mesh by JAX's types with check_vma=True, by the caller without
        return y, new, dp if check_vma else jax.lax.psum(dp, "d"), dx

    run = jax.shard_map(
        device, mesh=mesh(4), in_specs=(P(), P(), *[P("d")] * 3), out_specs=(P("d"), P(), P(), P("d")),
        check_vma=check_vma,
    )  # fmt: skip
    got = jax.jit(run)(variables["params"], variables["batch_stats"], X, jnp.asarray(MASK), G)
    assert_trees_close(got, expected)
    np.testing.assert_allclose(got[0][:4], numpy_bn(X, MASK)[:4], atol=2e-5)

    evaluate = jax.jit(lambda v, x: layer.clone(use_running_average=True).apply(v, x))
    y = evaluate({"params": variables["params"], "batch_stats": got[1]}, X)  # A21: nor here
    mean, var = (np.asarray(got[1][k], np.float64) for k in ("mean", "var"))
    np.testing.assert_allclose(y, (np.asarray(X) - mean) / np.sqrt(var + 1e-5), rtol=1e-5, atol=1e-5)


def test_a21_training_outside_the_axis_says_which_axis_is_missing():
    layer = BatchNorm(**TRAIN, axis_name="data")
    with pytest.raises(NameError, match="data"):
        layer.apply(start(layer), X, mutable=["batch_stats"])


def test_j36_a_layer_used_twice_with_an_axis_name_initialises_without_it():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = BatchNorm(**TRAIN, axis_name="d")
            return norm(norm(x) + 1)

    variables = jax.jit(Twice().init)(jax.random.key(0), X)
    assert list(variables["params"]) == ["BatchNorm_0"]
    np.testing.assert_array_equal(variables["batch_stats"]["BatchNorm_0"]["mean"], np.zeros(3))


def test_j36_every_layer_initialises_without_its_axis():
    for layer in (LayerNorm, RMSNorm, InstanceNorm, GroupNorm):
        kind = {"num_groups": 3} if layer is GroupNorm else {}
        y, z = (jax.jit(layer(**kind, axis_name=n).init_with_output)(jax.random.key(0), X)[0] for n in ("d", None))
        np.testing.assert_array_equal(y, z)


def test_layer_norm_and_rms_norm_with_the_features_split_over_devices():
    x = jnp.asarray(rng().normal(1, 2, (6, 16)), jnp.float32)
    scale = jnp.asarray(rng().normal(1, 1, 16), jnp.float32)
    for layer in (LayerNorm, RMSNorm):
        split, alone = layer(axis_name="d"), layer()
        extra = {"bias": jnp.zeros(16)} if layer is LayerNorm else {}
        params = {"params": {"scale": scale, **extra}}
        run = jax.shard_map(split.apply, mesh=mesh(4), in_specs=(P("d"), P(None, "d")), out_specs=P(None, "d"))
        np.testing.assert_allclose(jax.jit(run)(params, x), jax.jit(alone.apply)(params, x), atol=1e-5)


@pytest.mark.parametrize("groups", [{"axis_index_groups": [[0, 1], [2, 3]]}, {"virtual_batch_size": 4}])
def test_groups_of_devices_share_among_themselves_and_merge_their_running_statistics(groups):
    layer = BatchNorm(**TRAIN, momentum=0.0, axis_name="d", **groups)
    variables = start(layer)
    run = jax.shard_map(
        lambda v, x: layer.apply(v, x, mutable=["batch_stats"]), mesh=mesh(4), in_specs=(P(), P("d")),
        out_specs=(P("d"), P()),
    )  # fmt: skip
    y, state = jax.jit(run)(variables, X)
    np.testing.assert_allclose(y, np.concatenate([numpy_bn(X[:4]), numpy_bn(X[4:])]), atol=2e-5)
    mean, var = numpy_stats(X)
    np.testing.assert_allclose(state["batch_stats"]["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(state["batch_stats"]["var"], var, rtol=1e-5)


def test_running_group_mean_averages_the_groups_variances():
    layer = BatchNorm(**TRAIN, momentum=0.0, virtual_batch_size=4, running="group_mean")
    _, state = jax.jit(lambda v, x: layer.apply(v, x, mutable=["batch_stats"]))(start(layer), X)
    variances = [numpy_stats(X[i : i + 4])[1] for i in (0, 4)]
    np.testing.assert_allclose(state["batch_stats"]["var"], np.mean(variances, 0), rtol=1e-5)


@pytest.mark.fast
def test_b14_ghost_batches_inside_a_device_and_evaluation_of_any_number_of_rows():
    layer = BatchNorm(momentum=0.0, virtual_batch_size=3, ragged=True)
    variables = jax.jit(lambda k: layer.init(k, X[:1], **TRAIN))(jax.random.key(0))
    y, state = jax.jit(lambda v, x: layer.apply(v, x, mutable=["batch_stats"], **TRAIN))(variables, X)
    np.testing.assert_allclose(y, np.concatenate([numpy_bn(X[i : i + 3]) for i in (0, 3, 6)]), atol=2e-5)
    mean, var = numpy_stats(X)
    for rows in (1, 7):
        z = layer.apply({**variables, **state}, X[:rows], use_running_average=True)
        np.testing.assert_allclose(z, (np.asarray(X[:rows]) - mean) / np.sqrt(var + 1e-5), atol=2e-5)


@pytest.mark.fast
def test_a_globally_sharded_batch_under_jit_needs_no_axis_name():
    layer = BatchNorm(**TRAIN, momentum=0.0)
    x = jax.device_put(X, NamedSharding(mesh(4), P("d")))
    y, state = jax.jit(lambda v, x: layer.apply(v, x, mutable=["batch_stats"]))(start(layer), x)
    np.testing.assert_allclose(y, numpy_bn(X), atol=2e-5)
    np.testing.assert_allclose(state["batch_stats"]["var"], numpy_stats(X)[1], rtol=1e-5)


def test_a10_without_running_statistics_the_batch_s_are_used_in_training_and_evaluation():
    layer = BatchNorm(track_running_stats=False, axis_name="d")
    variables = start(layer)
    assert list(variables) == ["params"]
    for flag in (True, False):
        run = jax.shard_map(
            lambda v, x, flag=flag: layer.apply(v, x, use_running_average=flag), mesh=mesh(4),
            in_specs=(P(), P("d")), out_specs=P("d"),
        )  # fmt: skip
        np.testing.assert_allclose(jax.jit(run)(variables, X), numpy_bn(X), atol=2e-5)


def test_bn_span_is_the_number_of_rows_that_share_a_statistic():
    def span(rows, devices, **layer):
        return BatchNorm(**layer).bn_span(rows, devices)

    assert span(2, 8) == 2
    assert span(2, 8, axis_name="d") == 16
    assert span(2, 8, axis_name="d", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]) == 8
    assert span(2, 8, axis_name="d", virtual_batch_size=8) == 8
    assert span(32, 1, virtual_batch_size=8) == 8
    assert span(7, 1, virtual_batch_size=3, ragged=True) == 3
    with pytest.raises(ValueError, match=r"`virtual_batch_size`=6 does not fit 4 rows.*\[1, 2, 4, 8\]"):
        span(4, 2, axis_name="d", virtual_batch_size=6)


# ---- transforms ------------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_j38_nested_vmap_with_two_axis_names_gives_one_set_of_statistics():
    layer = BatchNorm(**TRAIN, momentum=0.0, axis_name=("a", "b"))
    variables = start(layer)
    x = X.reshape(2, 4, 5, 3)
    inner = jax.vmap(lambda x: layer.apply(variables, x, mutable=["batch_stats"]), axis_name="b", out_axes=(0, None))
    y, state = jax.jit(jax.vmap(inner, axis_name="a", out_axes=(0, None)))(x)
    np.testing.assert_allclose(y.reshape(X.shape), numpy_bn(X), atol=2e-5)
    np.testing.assert_allclose(state["batch_stats"]["mean"], numpy_stats(X)[0], rtol=1e-5)


@pytest.mark.fast
def test_b11_rematerialisation_updates_the_state_once():
    def run(layer):
        variables = start(layer)

        def loss(params):
            y, state = layer.apply({**variables, "params": params}, X, mutable=["batch_stats"])
            return (y * G).sum(), state

        (value, state), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])
        return value, state, grads

    plain, remat = (run(cls(**TRAIN, momentum=None)) for cls in (BatchNorm, nn.remat(BatchNorm)))
    assert int(remat[1]["batch_stats"]["num_batches"]) == 1
    assert_trees_close(remat, plain)


def test_lifted_vmap_gives_each_model_its_own_parameters_and_statistics():
    many = nn.vmap(
        BatchNorm, variable_axes={"params": 0, "batch_stats": 0}, split_rngs={"params": True}, in_axes=0, out_axes=0
    )(**TRAIN, momentum=0.0)
    x = jnp.stack([X, X * 2 + 1])
    variables = start(many, x)
    y, state = jax.jit(lambda v, x: many.apply(v, x, mutable=["batch_stats"]))(variables, x)
    np.testing.assert_allclose(state["batch_stats"]["mean"], [numpy_stats(t)[0] for t in x], rtol=1e-5)
    np.testing.assert_allclose(y, np.stack([numpy_bn(t) for t in x]), atol=2e-5)


def test_lifted_scan_over_layers_equals_the_layers_in_turn():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return BatchNorm(**TRAIN, momentum=0.0)(LayerNorm()(nn.Dense(3)(x))), None

    stack = nn.scan(Block, variable_axes={"params": 0, "batch_stats": 0}, split_rngs={"params": True}, length=3)()
    variables = jax.jit(lambda k: stack.init(k, X, None))(jax.random.key(0))
    (y, _), state = jax.jit(lambda v: stack.apply(v, X, None, mutable=["batch_stats"]))(variables)

    z, stats = X, []
    one = jax.jit(lambda v, z: Block().apply(v, z, None, mutable=["batch_stats"]))
    for i in range(3):
        (z, _), new = one(jax.tree.map(lambda t, i=i: t[i], variables), z)
        stats.append(new)
    np.testing.assert_allclose(y, z, atol=2e-5)
    assert_trees_close(state, jax.tree.map(lambda *t: jnp.stack(t), *stats))


def test_eval_shape_and_grad_of_grad_work_through_a_layer():
    layer = BatchNorm(**TRAIN)
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)
    assert variables["batch_stats"]["var"].shape == (3,)

    def norm_of_gradient(x, layer):
        real = start(layer)
        g = jax.grad(lambda x: (layer.apply(real, x, mutable=["batch_stats"])[0] ** 3).sum())(x)
        return (g**2).sum()

    second, reference = (
        jax.jit(jax.grad(norm_of_gradient), static_argnums=1)(X, BatchNorm(**TRAIN, rule=r))
        for r in ("reverse", "autodiff")
    )
    np.testing.assert_allclose(second, reference, rtol=2e-4, atol=2e-4)


# ---- bad settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "x", "said"),
    [
        (BatchNorm(**TRAIN, axis=3), X, r"`axis` holds axis 3, but x has 3 dimensions"),
        (BatchNorm(**TRAIN, axis=(2, -1)), X, r"`axis`=\(2, -1\).*twice"),
        (BatchNorm(**TRAIN, momentum=1.5), X, r"`momentum`.*\[0, 1\]; got 1.5"),
        (BatchNorm(**TRAIN, momentum=None, zero_debias=True), X, r"`zero_debias`.*momentum=None"),
        (BatchNorm(**TRAIN, momentum=1.0, zero_debias=True), X, r"`zero_debias`.*momentum=1"),
        (BatchNorm(**TRAIN, frozen=True, track_running_stats=False), X, r"`frozen`.*`track_running_stats=False`"),
        (BatchNorm(**TRAIN, epsilon=-1.0), X, r"`epsilon` must be >= 0"),
        (BatchNorm(**TRAIN, dtype=jnp.int32), X, r"`dtype` must be a floating or complex type; got int32"),
        (BatchNorm(**TRAIN, running="mean"), X, r"`running`"),
        (LayerNorm(reduction_axes=(1, 5)), X, r"`reduction_axes` holds axis 5"),
        (LayerNorm(feature_axes=(1, 1)), X, r"`feature_axes`=\(1, 1\).*twice"),
        (LayerNorm(method="quick"), X, r"`method`"),
        (RMSNorm(rule="forward"), X, r"`rule`"),
        (GroupNorm(num_groups=2), X, r"`num_groups`=2 must be a positive divisor.*3"),
        (GroupNorm(num_groups=None, group_size=2), X, r"`group_size`=2 must be a positive divisor.*3"),
        (GroupNorm(num_groups=3, group_size=1), X, r"exactly one of `num_groups` and `group_size`; got 3 and 1"),
        (GroupNorm(num_groups=None), X, r"exactly one of `num_groups` and `group_size`"),
        (GroupNorm(num_groups=3, reduction_axes=(1,)), X, r"`reduction_axes`=\(1,\) must include the last axis"),
        (InstanceNorm(feature_axes=(0, 2)), X, r"`feature_axes`=\(0, 2\) holds axis 0"),
    ],
)
def test_bad_settings_name_the_argument_and_what_was_seen(layer, x, said):
    with pytest.raises(ValueError, match=said):
        layer.init(jax.random.key(0), x)


def test_a_mask_that_does_not_broadcast_is_an_error():
    with pytest.raises(ValueError, match=r"`where` of shape \(8, 4, 1\)"):
        LayerNorm().init(jax.random.key(0), X, mask=jnp.ones((8, 4, 1), bool))


def test_use_running_average_is_given_once():
    with pytest.raises(ValueError, match="use_running_average"):
        BatchNorm().init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="use_running_average"):
        BatchNorm(use_running_average=True).init(jax.random.key(0), X, use_running_average=True)


def test_an_illegal_virtual_batch_size_lists_the_legal_ones_in_training_only():
    layer = BatchNorm(virtual_batch_size=3)
    variables = jax.jit(lambda k: layer.init(k, X, **TRAIN))(jax.random.key(0))
    layer.apply(variables, X, use_running_average=True)
    with pytest.raises(ValueError, match=r"`virtual_batch_size` 3 does not fit 8 rows.*\[1, 2, 4, 8\]"):
        layer.apply(variables, X, mutable=["batch_stats"], **TRAIN)


@pytest.mark.parametrize("guide", ["layers", "statistics", "backends"])
def test_the_examples_of_a_guide_hold(guide):
    path = Path(__file__).resolve().parents[1] / "docs" / f"{guide}.md"
    failed, tried = doctest.testfile(str(path), module_relative=False)
    assert failed == 0
    assert tried > 20
