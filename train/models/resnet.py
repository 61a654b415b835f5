"""ResNet-18, 34, 50 and 101 for images, with any norm put in.

Version 1.5: the stride of a bottleneck is in its 3×3 convolution. Layers, padding and initial values are those of the
reference figures (torchvision): ResNet-50 with 1000 classes has 25,557,032 parameters and 53 norms. Layers carry
names of their own (`stage2_block1/conv3`), so that a tree of parameters does not depend on which norm is used.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from normlib import linen as norm
from train.errors import ConfigError

Norm = Callable[..., nn.Module]
_he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
_STEMS = ("imagenet", "cifar")


def _make_norm(factory: Norm, *, train: bool, **arguments: Any) -> nn.Module:
    """A layer from `factory`; a norm with running statistics also hears whether to use them."""
    if "use_running_average" in inspect.signature(factory).parameters:
        arguments["use_running_average"] = not train
    return factory(**arguments)


class _Unit(nn.Module):
    """What the two kinds of block share: a residual branch of convolutions with norms, and a short cut.

    Attributes:
      features: channels inside the branch.
      stride: of the block.
      norm: factory of the norm layers.
      last_scale_init: initialiser of the scale of the branch's last norm.
      dtype: of the computation; None for that of the input and the parameters.
    """

    features: int
    stride: int
    norm: Norm
    last_scale_init: Callable
    dtype: Any = None

    expansion = 1  # channels out of the block, in units of `features`

    def convolved(self, x: Array, name: str, features: int, size: int, stride: int = 1) -> Array:
        pad = size // 2  # explicit: SAME pads a strided convolution on one side only
        return nn.Conv(
            features,
            (size, size),
            (stride, stride),
            padding=((pad, pad), (pad, pad)),
            use_bias=False,
            dtype=self.dtype,
            kernel_init=_he_normal,
            name=name,
        )(x)

    def normed(self, x: Array, name: str, train: bool, **arguments: Any) -> Array:
        return _make_norm(self.norm, train=train, dtype=self.dtype, name=name, **arguments)(x)

    def joined(self, x: Array, y: Array, train: bool) -> Array:
        """relu(short cut of x + y): the short cut is a 1×1 convolution with norm where the shape changes."""
        if x.shape != y.shape:
            x = self.convolved(x, "short_conv", y.shape[-1], 1, self.stride)
            x = self.normed(x, "short_norm", train)
        return nn.relu(x + y)


class ResidualBlock(_Unit):
    """Two 3×3 convolutions (ResNet-18 and 34). `[N, H, W, C]` → `[N, H/stride, W/stride, features]`."""

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"], *, train: bool) -> Float[Array, "n h2 w2 c2"]:
        y = self.convolved(x, "conv1", self.features, 3, self.stride)
        y = nn.relu(self.normed(y, "norm1", train))
        y = self.convolved(y, "conv2", self.features, 3)
        y = self.normed(y, "norm2", train, scale_init=self.last_scale_init)
        return self.joined(x, y, train)


class Bottleneck(_Unit):
    """1×1, 3×3 and 1×1 convolutions, the stride in the 3×3. `[N, H, W, C]` → `[N, H/stride, W/stride, 4·features]`."""

    expansion = 4

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"], *, train: bool) -> Float[Array, "n h2 w2 c2"]:
        y = self.convolved(x, "conv1", self.features, 1)
        y = nn.relu(self.normed(y, "norm1", train))
        y = self.convolved(y, "conv2", self.features, 3, self.stride)
        y = nn.relu(self.normed(y, "norm2", train))
        y = self.convolved(y, "conv3", self.features * self.expansion, 1)
        y = self.normed(y, "norm3", train, scale_init=self.last_scale_init)
        return self.joined(x, y, train)


class DeepResNet(nn.Module):
    """A residual network. `[N, H, W, C]` images → `[N, classes]` logits, in float32 for 16-bit `dtype`.

    Attributes:
      stage_sizes: blocks per stage; the first stage keeps the size, each later one halves it.
      block: `ResidualBlock` or `Bottleneck`.
      classes: number of logits.
      norm: factory of the norm layers, called with `name`, `dtype` and sometimes `scale_init`, and with
        `use_running_average` if it takes that: `normlib.linen.BatchNorm`, `flax.linen.GroupNorm`, a
        `functools.partial` of either, or a function of these keywords.
      last_scale_init: initialiser of the scale of the last norm in every residual branch; zeros (the default) start
        each block as the identity, `normlib.tuning.residual_scale_init(n)` gives 0.1 to 0.3, ones torchvision's start.
      dtype: of the computation (jnp.bfloat16, say); parameters stay float32. None for the
        dtype of the images.
      stem: "imagenet", a 7×7 convolution of stride 2 and max pooling of stride 2; or "cifar", one 3×3 convolution,
        for images of 32×32.
      width: channels of the first stage.

    Raises:
      ConfigError: an unknown `stem`.

    Source: He et al. 2015, "Deep residual learning for image recognition", with the stride moved as in version 1.5;
    zeros: Goyal et al. 2017, "Accurate, large minibatch SGD", section 5.1.

    >>> model = resnet18(classes=10, stem="cifar", width=8)
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> variables = jax.eval_shape(lambda key: model.init(key, images, train=True), jax.random.key(0))
    >>> variables["params"]["head"]["kernel"].shape
    (64, 10)
    """

    stage_sizes: Sequence[int]
    block: type[ResidualBlock] | type[Bottleneck]
    classes: int = 1000
    norm: Norm = functools.partial(norm.BatchNorm, momentum=0.9)
    last_scale_init: Callable = nn.initializers.zeros
    dtype: Any = None
    stem: str = "imagenet"
    width: int = 64

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"], *, train: bool) -> Float[Array, "n classes"]:
        if self.stem not in _STEMS:
            raise ConfigError(f"`stem` is {self.stem!r}; expected one of {', '.join(_STEMS)}.")
        x = images if self.dtype is None else images.astype(self.dtype)
        size, stride = (7, 2) if self.stem == "imagenet" else (3, 1)
        x = nn.Conv(
            self.width,
            (size, size),
            (stride, stride),
            padding=[(size // 2, size // 2)] * 2,
            use_bias=False,
            dtype=self.dtype,
            kernel_init=_he_normal,
            name="stem_conv",
        )(x)
        x = nn.relu(_make_norm(self.norm, train=train, dtype=self.dtype, name="stem_norm")(x))
        if self.stem == "imagenet":
            x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage, blocks in enumerate(self.stage_sizes):
            for number in range(blocks):
                x = self.block(
                    features=self.width * 2**stage,
                    stride=2 if stage > 0 and number == 0 else 1,
                    norm=self.norm,
                    last_scale_init=self.last_scale_init,
                    dtype=self.dtype,
                    name=f"stage{stage + 1}_block{number + 1}",
                )(x, train=train)
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.promote_types(x.dtype, jnp.float32))
        return nn.Dense(self.classes, name="head")(x)


resnet18 = functools.partial(DeepResNet, stage_sizes=(2, 2, 2, 2), block=ResidualBlock)
resnet34 = functools.partial(DeepResNet, stage_sizes=(3, 4, 6, 3), block=ResidualBlock)
resnet50 = functools.partial(DeepResNet, stage_sizes=(3, 4, 6, 3), block=Bottleneck)
resnet101 = functools.partial(DeepResNet, stage_sizes=(3, 4, 23, 3), block=Bottleneck)
