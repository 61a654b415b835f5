"""Masks of norm parameters, training them alone, and how scales start."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx as flax_nnx

import normlib as nl
from normlib import linen, nnx

pytestmark = pytest.mark.family
X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = linen.RMSNorm()(linen.BatchNorm(use_running_average=False)(nn.Dense(5)(x)))
        return nn.Dense(2, use_bias=False)(nn.LayerNorm(use_scale=False)(x))


class NnxNet(flax_nnx.Module):
    def __init__(self, rngs):
        self.layers = flax_nnx.List([flax_nnx.Linear(4, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


def test_a_mask_marks_the_norms_of_a_linen_model():
    params = jax.jit(Net().init)(jax.random.key(0), X)["params"]
    assert nl.affine_mask(params) == {
        "Dense_0": {"kernel": False, "bias": False}, "Dense_1": {"kernel": False},
        "BatchNorm_0": {"scale": True, "bias": True}, "RMSNorm_0": {"scale": True}, "LayerNorm_0": {"bias": True},
    }  # fmt: skip
    assert nl.affine_mask({"scale": 1.0, "bias": 1.0}) == {"scale": True, "bias": True}


def test_a_parent_named_like_a_parameter_is_no_norm():
    assert nl.affine_mask({"scale": {"kernel": 1.0}, "bias": {"bias": 1.0}}) == {
        "scale": {"kernel": False}, "bias": {"bias": True},
    }  # fmt: skip


def test_only_norms_of_a_linen_model_train():
    variables = jax.jit(Net().init)(jax.random.key(0), X)
    params, tx = variables["params"], nl.train_affine_only(optax.adam(0.1))

    @jax.jit
    def step(params):
        loss = lambda p: (Net().apply({**variables, "params": p}, X, mutable="batch_stats")[0] ** 3).sum()  # noqa: E731
        updates, _ = tx.update(jax.grad(loss)(params), tx.init(params), params)
        return optax.apply_updates(params, updates)

    new = step(params)
    for name in ("Dense_0", "Dense_1"):
        jax.tree.map(np.testing.assert_array_equal, new[name], params[name])
    for name in ("BatchNorm_0", "RMSNorm_0", "LayerNorm_0"):
        for old, moved in zip(jax.tree.leaves(params[name]), jax.tree.leaves(new[name])):
            np.testing.assert_allclose(abs(moved - old), 0.1, rtol=1e-3)  # Adam's first step
    assert sum(leaf.size for leaf in jax.tree.leaves(tx.init(params)) if leaf.ndim) == 2 * (5 + 5 + 5 + 5)


def test_only_norms_of_an_nnx_model_train():
    model = NnxNet(flax_nnx.Rngs(0))
    before = jax.tree.map(np.array, flax_nnx.to_pure_dict(flax_nnx.state(model, flax_nnx.Param)))
    optimizer = flax_nnx.Optimizer(model, nl.train_affine_only(optax.sgd(0.5)), wrt=flax_nnx.Param)
    optimizer.update(model, flax_nnx.grad(lambda m: m(X).sum())(model))
    after = flax_nnx.to_pure_dict(flax_nnx.state(model, flax_nnx.Param))["layers"]
    jax.tree.map(np.testing.assert_array_equal, after[0], before["layers"][0])
    np.testing.assert_allclose(after[1]["bias"], -0.5 * len(X), rtol=1e-6)


def test_parameters_without_norms():
    with pytest.raises(ValueError, match="`params` holds no norm's scale or bias"):
        nl.train_affine_only(optax.sgd(1.0)).init({"fc": {"kernel": jnp.ones(2)}})


@pytest.mark.parametrize(("blocks", "value"), [(1, 0.3), (16, 0.25), (50, 50**-0.5), (1000, 0.1)])
def test_scales_start_by_depth(blocks, value):
    layer = linen.BatchNorm(use_running_average=False, scale_init=nl.residual_scale_init(blocks))
    scale = jax.jit(layer.init)(jax.random.key(0), X)["params"]["scale"]
    np.testing.assert_allclose(scale, np.full(4, value), rtol=1e-6)
    zero = nnx.BatchNorm(4, scale_init=nl.residual_scale_init(blocks, zero=True), rngs=flax_nnx.Rngs(0))
    assert not zero(X).any()


@pytest.mark.parametrize("blocks", [0, -1, 2.5])
def test_a_number_of_blocks_that_is_none(blocks):
    with pytest.raises(ValueError, match="`num_blocks` must be a positive integer"):
        nl.residual_scale_init(blocks)
