"""What the nnx layers keep for the backward, and what bad settings say when a layer is built."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import normlib.linen
import normlib.nnx

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("norm", [
    lambda: normlib.nnx.BatchNorm(8, rngs=nnx.Rngs(0)), lambda: normlib.nnx.LayerNorm(8, rngs=nnx.Rngs(0)),
    lambda: normlib.nnx.RMSNorm(8, rngs=nnx.Rngs(0)), lambda: normlib.nnx.GroupNorm(8, 2, rngs=nnx.Rngs(0)),
    lambda: normlib.nnx.InstanceNorm(8, rngs=nnx.Rngs(0)),
])  # fmt: skip
def test_a_16_bit_array_is_kept_for_the_backward_as_it_is(norm):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 5, 8)), jnp.bfloat16)
    y, pull = jax.vjp(lambda x: norm()(x), x)
    kept = [t.dtype for t in jax.tree.leaves(pull) if getattr(t, "shape", ()) == x.shape]
    assert y.dtype == jnp.float32 and kept == [jnp.bfloat16]


@pytest.mark.parametrize(("setting", "error", "match"), [
    ({"epsilon": -1.0}, ValueError, "`epsilon` must be >= 0"),
    ({"epsilon": "a"}, TypeError, "`epsilon` must be a number"),
    ({"method": "best"}, ValueError, "`method` must be one of"),
    ({"rule": "best"}, ValueError, "`rule` must be one of"),
    ({"scale_offset": jnp.ones(8)}, TypeError, "`scale_offset` must be a number"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "InstanceNorm", "AddLayerNorm", "GroupNormSiLU"])
def test_settings_are_checked_when_the_layer_is_built(name, setting, error, match):
    with pytest.raises(error, match=match):
        getattr(normlib.nnx, name)(32, rngs=nnx.Rngs(0), **setting)


@pytest.mark.parametrize(("momentum", "error"), [("a", TypeError), (np.float32(1.5), ValueError), (1j, TypeError)])
def test_a_momentum_is_checked_when_the_layer_is_built(momentum, error):
    with pytest.raises(error, match="`momentum`"):
        normlib.nnx.BatchNorm(8, momentum=momentum, rngs=nnx.Rngs(0))


def test_a_mask_of_numbers_measures_where_it_is_not_zero():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8)), jnp.float32)
    mask = np.arange(8) < 5
    numbers = jnp.asarray(mask, jnp.float32) * 0.5
    kept = np.float64(x)[:, mask]
    want = (np.float64(x) - kept.mean(1, keepdims=True)) / np.sqrt(kept.var(1, keepdims=True) + 1e-6)
    outputs = {
        "nnx": normlib.nnx.LayerNorm(8, rngs=nnx.Rngs(0))(x, mask=numbers),
        "linen": normlib.linen.LayerNorm().init_with_output(jax.random.key(0), x, mask=numbers)[0],
        "flax.linen": nn.LayerNorm().init_with_output(jax.random.key(0), x, mask=numbers)[0],  # flax.nnx refuses them
    }
    for name, y in outputs.items():
        np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-6, err_msg=name)
