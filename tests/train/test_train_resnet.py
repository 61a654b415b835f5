"""ResNets: the reference's sizes, stable names, any norm put in, and training steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as flax_linen
from flax import traverse_util

from normlib import linen as norm
from normlib.tuning import affine_mask, residual_scale_init
from train.errors import ConfigError
from train.models import Bottleneck, DeepResNet, ResidualBlock, resnet18, resnet34, resnet50, resnet101

# torchvision's figures with 1000 classes (its documentation of the weights of each model), and the norms counted
# from the layers: the stem's, those in the blocks, and one in each short cut that changes shape.
SIZES = {
    resnet18: (11_689_512, 1 + 2 * 8 + 3),
    resnet34: (21_797_672, 1 + 2 * 16 + 3),
    resnet50: (25_557_032, 1 + 3 * 16 + 4),
    resnet101: (44_549_160, 1 + 3 * 33 + 4),
}
TINY = functools.partial(DeepResNet, stage_sizes=(1, 2), width=8, classes=3, stem="cifar")
RNG = np.random.default_rng(0)
LABELS = np.arange(8, dtype=np.int32) % 3
IMAGES = RNG.normal(size=(8, 8, 8, 3)).astype(np.float32) + np.eye(3, dtype=np.float32)[LABELS][:, None, None]


def shapes(model, size=224, rows=2):
    images = jax.ShapeDtypeStruct((rows, size, size, 3), jnp.float32)
    return jax.eval_shape(functools.partial(model.init, train=True), jax.random.key(0), images)


def initial(model, images=IMAGES):
    return jax.jit(lambda key: model.init(key, images, train=True))(jax.random.key(0))


@pytest.mark.parametrize("make", SIZES)
def test_parameters_and_norms_are_those_of_the_reference(make):
    parameters, norms = SIZES[make]

    variables = shapes(make())

    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == parameters
    assert len(jax.tree.leaves(variables["batch_stats"])) == 2 * norms  # mean and var each


def test_statistics_of_resnet50_take_212_kilobytes():
    # 26,560 channels, mean and var in float32: the figure for what synchronising them sends
    assert sum(4 * leaf.size for leaf in jax.tree.leaves(shapes(resnet50())["batch_stats"])) == 212_480


@pytest.mark.parametrize(("stem", "size", "last"), [("imagenet", 224, 7), ("cifar", 32, 4)])
def test_output_and_last_feature_map_have_the_expected_shape(stem, size, last):
    model = resnet50(classes=10, stem=stem)
    images = jax.ShapeDtypeStruct((2, size, size, 3), jnp.float32)

    def of_the_last_block(module, method):
        return module.name == "stage4_block3" and method == "__call__"

    def apply(variables, images):
        return model.apply(variables, images, train=False, capture_intermediates=of_the_last_block)

    logits, seen = jax.eval_shape(apply, shapes(model, size), images)

    assert (logits.shape, logits.dtype) == ((2, 10), jnp.float32)
    (feature_map,) = jax.tree.leaves(seen)
    assert feature_map.shape == (2, last, last, 2048)


def test_names_of_the_parameters_are_stable():
    flat = traverse_util.flatten_dict(shapes(TINY(block=Bottleneck), 16)["params"], sep="/")

    def conv(name, *shape):
        return {f"{name}/kernel": shape}

    def bn(name, features):
        return {f"{name}/scale": (features,), f"{name}/bias": (features,)}

    def block(name, into, width, *, short):
        found = conv(f"{name}/conv1", 1, 1, into, width) | bn(f"{name}/norm1", width)
        found |= conv(f"{name}/conv2", 3, 3, width, width) | bn(f"{name}/norm2", width)
        found |= conv(f"{name}/conv3", 1, 1, width, 4 * width) | bn(f"{name}/norm3", 4 * width)
        joint = conv(f"{name}/short_conv", 1, 1, into, 4 * width) | bn(f"{name}/short_norm", 4 * width)
        return found | (joint if short else {})

    want = conv("stem_conv", 3, 3, 3, 8) | bn("stem_norm", 8) | {"head/kernel": (64, 3), "head/bias": (3,)}
    for each in (("stage1_block1", 8, 8, True), ("stage2_block1", 32, 16, True), ("stage2_block2", 64, 16, False)):
        want |= block(*each[:3], short=each[3])
    assert {name: leaf.shape for name, leaf in flat.items()} == want


def test_the_stride_of_a_bottleneck_is_in_its_3x3_convolution():
    images = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)
    jaxpr = jax.make_jaxpr(functools.partial(TINY(block=Bottleneck).init, train=True))(jax.random.key(0), images)

    strided = [
        eqn.invars[1].aval.shape[:2]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "conv_general_dilated" and eqn.params["window_strides"] == (2, 2)
    ]

    assert sorted(strided) == [(1, 1), (3, 3)]  # the short cut's and the branch's


@pytest.mark.parametrize("block", [ResidualBlock, Bottleneck])
def test_swapping_the_import_keeps_the_tree_and_the_bits(block):
    theirs = functools.partial(flax_linen.BatchNorm, momentum=0.9)

    here, there = initial(TINY(block=block)), initial(TINY(block=block, norm=theirs))

    assert jax.tree.structure(here) == jax.tree.structure(there)
    for (path, mine), other in zip(jax.tree.leaves_with_path(here), jax.tree.leaves(there)):
        np.testing.assert_array_equal(mine, other, err_msg=str(path), strict=True)


@pytest.mark.parametrize(
    ("factory", "dtype"),
    [
        (norm.BatchNorm, None),
        pytest.param(norm.BatchNorm, jnp.bfloat16, marks=pytest.mark.nightly),
        pytest.param(norm.LayerNorm, None, marks=pytest.mark.nightly),
        (functools.partial(flax_linen.GroupNorm, num_groups=4), None),
    ],
    ids=["BatchNorm", "BatchNorm bfloat16", "LayerNorm", "flax GroupNorm"],
)
def test_training_lowers_the_loss_with_finite_gradients(factory, dtype):
    model = TINY(block=Bottleneck, norm=factory, dtype=dtype)
    variables = initial(model)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss_of(params, stats):
        logits, updates = model.apply(
            {"params": params, "batch_stats": stats}, IMAGES, train=True, mutable=["batch_stats"]
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()
        return loss, updates.get("batch_stats", {})

    def step(carry, _):
        params, stats, state = carry
        (loss, stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, stats)
        updates, state = optimizer.update(gradients, state, params)
        finite = jnp.all(jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients)]))
        return (optax.apply_updates(params, updates), stats, state), (loss, finite)

    params = variables["params"]
    start = params, variables.get("batch_stats", {}), optimizer.init(params)
    (params, _, _), (losses, finite) = jax.jit(lambda c: jax.lax.scan(step, c, None, length=8))(start)

    assert losses.dtype == jnp.float32 and all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    assert finite.all()
    assert losses[-1] < 0.5 * losses[0]


def test_last_scale_of_each_branch_starts_as_asked():
    for init, want in ((flax_linen.initializers.zeros, 0.0), (residual_scale_init(25), 0.2)):
        flat = traverse_util.flatten_dict(initial(TINY(block=Bottleneck, last_scale_init=init))["params"])
        scales = {path: np.unique(leaf).tolist() for path, leaf in flat.items() if path[-1] == "scale"}
        assert all(values == [pytest.approx(want if path[-2] == "norm3" else 1.0)] for path, values in scales.items())


def test_affine_mask_finds_the_norms_and_not_the_head():
    params = shapes(TINY(block=ResidualBlock), 16)["params"]

    masked = traverse_util.flatten_dict(affine_mask(params))

    assert {path for path, on in masked.items() if on} == {path for path in masked if "norm" in path[-2]}


def test_unknown_stem_is_named():
    with pytest.raises(ConfigError, match="`stem` is 'large'; expected one of imagenet, cifar"):
        shapes(resnet18(stem="large"), 32)
