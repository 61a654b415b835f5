"""Whole models converted to synchronised, ghost and frozen batch norm: other arguments and variables stay."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec as P

from normlib import interop, linen, linen_tools, nnx, nnx_tools
from tests.distributed import mesh

pytestmark = pytest.mark.family

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32) + np.arange(8, dtype=np.float32)[:, None]


class Inner(nn.Module):
    norm: nn.Module

    def setup(self):
        self.own = nn.BatchNorm(use_running_average=False, epsilon=0.3, momentum=0.8, use_bias=False)

    def __call__(self, x):
        return self.own(self.norm(x))


class Net(nn.Module):
    """Batch norms of a compact method, of setup and given as an attribute."""

    width: int = 3

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, scale_init=nn.initializers.constant(2.0))(nn.Dense(self.width)(x))
        return Inner(linen.BatchNorm(use_running_average=False, epsilon=0.1, name="given"))(x)


class NnxNet(flax_nnx.Module):
    def __init__(self, rngs):
        self.first = flax_nnx.BatchNorm(4, epsilon=0.3, momentum=0.8, use_bias=False, rngs=rngs)
        self.shared = self.first
        self.blocks = flax_nnx.List([flax_nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, epsilon=0.1, rngs=rngs)])

    def __call__(self, x):
        return self.blocks[1](self.blocks[0](self.shared(self.first(x))))


def norm(x, eps, scale=1.0):
    x = np.float64(x)
    return scale * (x - x.mean(0)) / np.sqrt(x.var(0) + eps)


def linen_reference(params, x):
    """What `Net` computes on the rows of x, in float64."""
    x = np.float64(x) @ np.float64(params["Dense_0"]["kernel"])
    return norm(norm(norm(x, 1e-5, 2.0), 0.1), 0.3)


def nnx_reference(model, x):
    x = norm(norm(x, 0.3), 0.3)
    return norm(x @ np.float64(model.blocks[0].kernel[...]), 0.1)


def sharded(f):
    run = jax.shard_map(f, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P("d"), check_vma=False)
    return jax.jit(run)


def test_a_linen_model_initialises_and_stores_the_same():
    model, synced = Net(), interop.convert_batch_norm(Net(), axis_name="d")
    a, b = (m.init(jax.random.key(1), X) for m in (model, synced))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert type(synced).__name__ == "Net"
    assert synced.width == 3


def test_a_linen_model_becomes_synchronised():  # CASES: A1, J49
    model = Net()
    variables = jax.jit(model.init)(jax.random.key(1), X)
    synced = interop.convert_batch_norm(model, axis_name="d")
    apply = lambda m: sharded(lambda v, x: m.apply(v, x, mutable="batch_stats")[0])  # noqa: E731
    np.testing.assert_allclose(apply(synced)(variables, X), linen_reference(variables["params"], X), atol=3e-5)
    local = np.concatenate([linen_reference(variables["params"], X[i : i + 2]) for i in range(0, 8, 2)])
    np.testing.assert_allclose(apply(model)(variables, X), local, atol=3e-3)  # by the one-pass variance of Flax


def test_a_linen_model_becomes_ghost_and_keeps_its_momentum():
    variables = jax.jit(Net().init)(jax.random.key(1), X)
    ghost = linen_tools.convert_batch_norm(Net(), virtual_batch_size=4)
    y, updates = jax.jit(lambda v, x: ghost.apply(v, x, mutable="batch_stats"))(variables, X)
    expected = np.concatenate([linen_reference(variables["params"], X[i : i + 4]) for i in (0, 4)])
    np.testing.assert_allclose(y, expected, atol=3e-5)
    own = updates["batch_stats"]["Inner_0"]["own"]
    between = np.concatenate(
        [norm(norm(h, 1e-5, 2.0), 0.1) for h in np.split(X @ variables["params"]["Dense_0"]["kernel"], 2)]
    )
    np.testing.assert_allclose(own["var"], 0.8 + 0.2 * between.var(0), rtol=1e-4)


def test_a_linen_model_becomes_frozen():  # CASES: B8
    variables = jax.jit(Net().init)(jax.random.key(1), X)
    frozen = linen_tools.convert_batch_norm(Net(), frozen=True)
    y, updates = frozen.apply(variables, X, mutable="batch_stats")
    jax.tree.map(np.testing.assert_array_equal, updates["batch_stats"], variables["batch_stats"])
    expected = X @ variables["params"]["Dense_0"]["kernel"] * 2 / np.sqrt(1.00001 * 1.1 * 1.3)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_a_converted_linen_model_can_be_converted_again():
    variables = jax.jit(Net().init)(jax.random.key(1), X)
    both = linen_tools.convert_batch_norm(linen_tools.convert_batch_norm(Net(), axis_name="d"), virtual_batch_size=4)
    y = sharded(lambda v, x: both.apply(v, x, mutable="batch_stats")[0])(variables, X)
    expected = np.concatenate([linen_reference(variables["params"], X[i : i + 4]) for i in (0, 4)])
    np.testing.assert_allclose(y, expected, atol=3e-5)


def test_an_nnx_model_becomes_synchronised_and_the_original_stays():  # CASES: A1
    model = NnxNet(flax_nnx.Rngs(0))
    synced = interop.convert_batch_norm(model, axis_name="d")
    assert type(model.first) is flax_nnx.BatchNorm
    assert type(synced.first) is nnx.BatchNorm
    assert synced.first is synced.shared
    assert (synced.first.epsilon, synced.first.momentum, synced.first.use_bias) == (0.3, 0.8, False)
    a, b = (flax_nnx.to_pure_dict(flax_nnx.state(m)) for m in (model, synced))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    graph, state = flax_nnx.split(synced)
    y = sharded(lambda s, x: flax_nnx.merge(graph, s)(x))(state, X)
    np.testing.assert_allclose(y, nnx_reference(model, X), atol=3e-5)


def test_an_nnx_model_becomes_ghost():
    model = NnxNet(flax_nnx.Rngs(0))
    ghost = nnx_tools.convert_batch_norm(model, virtual_batch_size=4, unbiased=True)
    expected = np.concatenate([nnx_reference(model, X[i : i + 4]) for i in (0, 4)])
    np.testing.assert_allclose(ghost(X), expected, atol=3e-5)
    assert ghost.blocks[1].unbiased


@pytest.mark.parametrize("model", [Net(), NnxNet(flax_nnx.Rngs(0))], ids=["linen", "nnx"])
@pytest.mark.parametrize(("changes", "match"), [
    ({}, "no argument to change"), ({"axes": "d"}, "`axes` is not an argument of BatchNorm"),
    ({"use_scale": False}, "`use_scale`=False would change which variables"),
    ({"momentum": None}, "`momentum`=None would change"), ({"scale_init": None}, "`scale_init`=None would change"),
])  # fmt: skip
def test_changes_that_cannot_be_made(model, changes, match):
    with pytest.raises(TypeError, match=match):
        interop.convert_batch_norm(model, **changes)


def test_a_thing_that_is_no_model():
    with pytest.raises(TypeError, match="`model` must be a linen or an nnx module; got dict"):
        interop.convert_batch_norm({}, axis_name="d")


def test_settings_that_contradict_one_another():
    with pytest.raises(ValueError, match="`momentum`"):
        nnx_tools.convert_batch_norm(NnxNet(flax_nnx.Rngs(0)), momentum=2.0)


def test_a_converted_linen_model_is_measured_once():
    """The layer that stands in for another is not counted beside it."""
    variables = jax.jit(Net().init)(jax.random.key(1), X)
    ghost = linen_tools.convert_batch_norm(Net(), virtual_batch_size=4)
    _, moments = linen_tools.apply_with_moments(ghost, variables, X)
    assert moments["BatchNorm_0"].count.tolist() == [len(X)] * 3
    assert moments["Inner_0"]["own"].count.tolist() == [len(X)] * 3
    assert moments["given"].count.tolist() == [len(X)] * 3
