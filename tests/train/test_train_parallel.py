"""One step in every parallel mode against a float64 gradient on one device, and the merging of running statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.errors import ConfigError
from train.models import MLP, NormChoice, ResNet, build
from train.parallel import (
    MODES,
    axis_name,
    default_in_flight,
    init_state,
    make_mesh,
    make_place,
    make_step,
    merge_statistics,
)

ROWS, DEVICES, WIDTH, CLASSES = 2, 8, 32, 3
SPANS = {"local_bn": 2, "sync_bn": 16, "ghost_bn": 8}
RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(0, 1, (ROWS * DEVICES, 3, 3, 1)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, ROWS * DEVICES).astype(np.int32)


def reference_norm(x, scale, bias, norm):
    """The norm written out: groups of rows share statistics, or groups of 8 channels of one row."""
    rows, channels = x.shape
    table = x.reshape(rows, 8, -1) if norm == "group_norm" else x.reshape(-1, SPANS[norm], channels)
    axis, epsilon = (2, 1e-6) if norm == "group_norm" else (1, 1e-5)  # Flax's defaults
    mean = table.mean(axis, keepdims=True)
    variance = ((table - mean) ** 2).mean(axis, keepdims=True)
    return ((table - mean) / jnp.sqrt(variance + epsilon)).reshape(x.shape) * scale + bias


def reference_loss(params, norm):
    x = jnp.asarray(IMAGES, jnp.float64).reshape(len(IMAGES), -1)
    name = "GroupNorm_0" if norm == "group_norm" else "BatchNorm_0"
    x = x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    x = jnp.maximum(reference_norm(x, params[name]["scale"], params[name]["bias"], norm), 0)
    logits = x @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(LABELS)), LABELS])


def one_step(norm, mode, devices=DEVICES):
    """Loss, gradients and new running statistics of one step from a random state."""
    mesh = make_mesh(devices)
    choice = NormChoice(norm, len(LABELS) // devices, devices, axis_name=axis_name(mode))
    model = MLP(choice, classes=CLASSES, widths=(WIDTH,))
    optimizer = optax.sgd(1.0)  # the new parameters are the old ones less the gradient
    state = init_state(model, optimizer, IMAGES[:1], mesh=mesh, mode=mode, seed=1)
    before = jax.tree.map(np.array, state.params)
    place = make_place(mesh, mode)
    step = make_step(model, optimizer, mesh=mesh, mode=mode)
    state, metrics = step(state, place(IMAGES), place(LABELS))
    gradients = jax.tree.map(lambda old, new: old - np.array(new), before, state.params)
    return before, gradients, float(metrics.loss), jax.device_get(state.batch_stats)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [*SPANS, "group_norm"])
def test_gradients_of_every_mode_are_those_of_one_device(norm, mode):
    params, gradients, loss, _ = one_step(norm, mode)

    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        want_loss, want = jax.jit(jax.value_and_grad(reference_loss), static_argnums=1)(params, norm)

    assert loss == pytest.approx(float(want_loss), rel=1e-5)
    for (path, got), expected in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(want)):
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=1e-4, err_msg=f"{path}")


def test_one_device_is_the_same_program():
    many = one_step("sync_bn", "shard_map")
    one = one_step("sync_bn", "shard_map", devices=1)

    for got, expected in zip(jax.tree.leaves(one[1]), jax.tree.leaves(many[1])):
        np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_running_statistics_are_each_devices_own(mode):
    params, _, _, stats = one_step("local_bn", mode)

    hidden = IMAGES.reshape(16, -1) @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    own = hidden.reshape(DEVICES, ROWS, WIDTH)
    np.testing.assert_allclose(stats["BatchNorm_0"]["mean"], 0.1 * own.mean(1), atol=1e-6)
    np.testing.assert_allclose(stats["BatchNorm_0"]["var"], 0.9 + 0.1 * own.var(1), atol=1e-6)


def test_merged_statistics_are_those_of_all_rows():
    rows = RNG.normal(3, 2, (60, 5)).astype(np.float32)
    parts = np.split(rows, [7, 20])  # 7, 13 and 40 rows
    stats = {"a": {"b": {"mean": np.stack([p.mean(0) for p in parts]), "var": np.stack([p.var(0) for p in parts])}}}

    merged = merge_statistics(stats, counts=[7, 13, 40])["a"]["b"]

    np.testing.assert_allclose(merged["mean"], rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(merged["var"], rows.var(0), rtol=1e-5)
    assert merge_statistics({}) == {}


def test_spans_and_virtual_batches():
    assert [NormChoice(norm, 2, 8).span for norm in SPANS] == list(SPANS.values())
    assert NormChoice("ghost_bn", 4, 2, virtual_batch_size=2).span == 2
    assert NormChoice("layer_norm", 2, 8).span is None


@pytest.mark.parametrize(
    "make, fault",
    [
        (lambda: NormChoice("batch", 2, 8), "`norm` is 'batch'; expected one of local_bn"),
        (lambda: NormChoice("ghost_bn", 2, 2), "8 rows; it must divide the global batch of 4 rows"),
        (lambda: NormChoice("ghost_bn", 2, 6, virtual_batch_size=3), "multiple or a divisor of `rows_per_device`, 2"),
        (lambda: build("vgg", NormChoice("local_bn", 2, 8), classes=10), "`model` is 'vgg'"),
        (lambda: make_mesh(0), "`devices` is 0"),
        (lambda: make_mesh(9), "JAX has already started with 8"),
        (lambda: make_step(None, None, mesh=make_mesh(8), mode="vmap"), "`mode` is 'vmap'"),
    ],
)
def test_bad_settings_are_named(make, fault):
    with pytest.raises(ConfigError, match=fault):
        make()


def test_resnet_runs_a_step_with_ghost_batches_inside_a_device():
    mesh = make_mesh(2)
    choice = NormChoice("ghost_bn", 4, 2, axis_name=axis_name("shard_map"), virtual_batch_size=2)
    model, optimizer = ResNet(choice, classes=CLASSES, widths=(8, 16)), optax.sgd(0.1)
    state = init_state(model, optimizer, np.zeros((1, 8, 8, 1), np.float32), mesh=mesh, mode="shard_map", seed=0)
    place = make_place(mesh, "shard_map")
    images = RNG.uniform(0, 1, (8, 8, 8, 1)).astype(np.float32)

    state, metrics = make_step(model, optimizer, mesh=mesh, mode="shard_map")(state, place(images), place(LABELS[:8]))

    assert isinstance(build("resnet", choice, classes=CLASSES), ResNet)
    assert np.isfinite(float(metrics.loss))
    assert int(state.step) == 1


def test_host_devices_get_one_step_in_flight():
    assert default_in_flight(make_mesh(8)) == 1
