"""Whole networks, folded: the same results, with norms kept as the identity or taken out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as flax_nnx

import normlib as nl
from normlib import linen, nnx

X = np.random.default_rng(0).normal(size=(2, 9, 9, 4)).astype(np.float32)


def random_like(tree, seed=0):
    """Random values for every leaf, positive for variances."""
    rng = np.random.default_rng(seed)
    leaf = lambda p, t: jnp.asarray(  # noqa: E731
        rng.uniform(0.2, 2, t.shape) if p[-1].key == "var" else rng.normal(size=t.shape) * 0.5, t.dtype
    )
    return jax.tree_util.tree_map_with_path(leaf, tree)


class Block(nn.Module):
    """norm - conv - norm - grouped conv - norm, the first convolution without padding."""

    norms: bool = True
    bias: bool = True
    residual: bool = False

    @nn.compact
    def __call__(self, x):
        def norm(x, name, **options):
            return linen.BatchNorm(use_running_average=True, name=name, **options)(x) if self.norms else x

        x = norm(x, "before")
        h = x = nn.Conv(8, (3, 3), padding="VALID", use_bias=self.bias, name="first")(x)
        x = nn.relu(norm(x, "after", epsilon=0.01))
        x = norm(
            nn.Conv(8, (3, 3), feature_group_count=4, use_bias=self.bias, name="grouped")(x), "last", use_bias=False
        )
        return x + h if self.residual else x


PAIRS = [
    nl.FoldPair("first", "before", norm_first=True, padding="VALID"),
    nl.FoldPair("first", "after", eps=0.01),
    nl.FoldPair("grouped", "last", groups=4),
]


def network(**options):
    model = Block(**options)
    variables = random_like(jax.jit(model.init)(jax.random.key(0), X))
    return model, jax.jit(model.apply), variables["params"], variables["batch_stats"]


@pytest.mark.parametrize("remove", [False, True])
def test_a_network_folds(remove):
    _, apply, params, stats = network()
    other = jax.jit(Block(norms=not remove).apply)
    old = jax.tree.map(np.array, (params, stats))
    folded = nl.fold(params, stats, PAIRS, remove_norms=remove, check=(apply, other, X))
    expected = np.asarray(apply({"params": params, "batch_stats": stats}, X))
    np.testing.assert_allclose(other(folded._asdict(), X), expected, atol=3e-6 * abs(expected).max())
    jax.tree.map(np.testing.assert_array_equal, old, (params, stats))
    if remove:
        assert set(folded.params) == {"first", "grouped"}
        assert folded.batch_stats == {}
    else:
        assert jax.tree.structure(folded) == jax.tree.structure(nl.FoldedNetwork(params, stats))
        np.testing.assert_allclose(folded.batch_stats["after"]["var"], 0.99)


def test_layers_without_bias_leave_it_to_the_norm():
    _, apply, params, stats = network(bias=False)
    folded = nl.fold(params, stats, PAIRS[1:], check=(apply, X), tolerance=1e-5)
    assert "bias" not in folded.params["first"]
    assert folded.batch_stats["last"]["mean"].any()  # a norm without bias holds it as its mean
    assert not folded.batch_stats["after"]["mean"].any()
    with pytest.raises(ValueError, match="'first' has no bias to take up"):
        nl.fold(params, stats, PAIRS[:1])


def test_a_result_used_elsewhere_is_found():  # CASES: F4
    _, apply, params, stats = network(residual=True)
    with pytest.raises(ValueError, match="read by its norm alone"):
        nl.fold(params, stats, PAIRS[1:2], check=(apply, X))


def test_a_wrong_epsilon_is_found():
    _, apply, params, stats = network()
    with pytest.raises(ValueError, match="the folded network differs by"):
        nl.fold(params, stats, [("first", "after")], check=(apply, X))


@pytest.mark.parametrize("transpose", [False, True])
def test_a_transposed_convolution_in_flax(transpose):  # CASES: F1, F2
    model = nn.Sequential([
        nn.ConvTranspose(4, (3, 3), strides=(2, 2), transpose_kernel=transpose),
        linen.BatchNorm(use_running_average=True),
    ])  # fmt: skip
    variables = random_like(jax.jit(model.init)(jax.random.key(0), X))
    pair = nl.FoldPair("layers_0", "layers_1", transposed=True, layout="HWOI" if transpose else None)
    nl.fold(**variables, pairs=[pair], check=(jax.jit(model.apply), X), tolerance=1e-5)
    wrong = nl.FoldPair("layers_0", "layers_1", transposed=True, layout=None if transpose else "HWOI")
    with pytest.raises(ValueError, match="differs by"):
        nl.fold(**variables, pairs=[wrong], check=(jax.jit(model.apply), X))


def test_an_nnx_model_folds():
    class Net(flax_nnx.Module):
        def __init__(self, rngs):
            self.layers = flax_nnx.List([flax_nnx.Linear(4, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs)])

        def __call__(self, x):
            return self.layers[1](self.layers[0](x), use_running_average=True)

    model = Net(flax_nnx.Rngs(0))
    params, stats = (
        random_like(flax_nnx.to_pure_dict(flax_nnx.state(model, kind))) for kind in (flax_nnx.Param, flax_nnx.BatchStat)
    )

    def apply(variables, x):
        net = flax_nnx.clone(model)
        for kind, name in ((flax_nnx.Param, "params"), (flax_nnx.BatchStat, "batch_stats")):
            own = flax_nnx.state(net, kind)
            flax_nnx.replace_by_pure_dict(own, variables[name])
            flax_nnx.update(net, own)
        return net(x)

    folded = nl.fold(params, stats, [("layers/0", "layers/1")], check=(apply, X), tolerance=1e-5)
    assert jax.tree.structure(folded.params) == jax.tree.structure(params)


TWICE = [("first", "after"), ("grouped", "after")]


@pytest.mark.parametrize(("pairs", "match"), [
    ([("first", "nowhere")], "'nowhere' is not in batch_stats"),
    ([("no/first", "after")], "'no/first' is not in params"), ([("after", "last")], "'after' has no kernel"),
    (TWICE, "names the norm 'after' twice"),
    ([nl.FoldPair("first", "before", norm_first=True)], "`padding` of 'first'.*must be given"),
    ([nl.FoldPair("first", "before", norm_first=True, padding="SAME")], "`padding` must be 'VALID'"),
])  # fmt: skip
def test_pairs_that_do_not_fit(pairs, match):
    _, _, params, stats = network()
    with pytest.raises(ValueError, match=match):
        nl.fold(params, stats, pairs)


def test_a_norm_before_a_transposed_convolution():
    with pytest.raises(ValueError, match="pads between its entries"):
        nl.FoldPair("a", "b", norm_first=True, transposed=True)


def test_a_check_of_another_form():
    _, apply, params, stats = network()
    with pytest.raises(ValueError, match="`check` must be"):
        nl.fold(params, stats, [], check=(apply,))
    with pytest.raises(ValueError, match="other shapes"):
        nl.fold(params, stats, [], check=(apply, lambda v, x: apply(v, x)[:1], X))
