"""A residual network of three blocks for small images."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from train.models.norms import NormChoice


class Block(nn.Module):
    """Residual block: two 3×3 convolutions; a 1×1 convolution on the short cut where the shape changes."""

    norm: NormChoice
    width: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"], *, train: bool) -> Float[Array, "n h2 w2 c2"]:
        strides = (self.stride, self.stride)
        y = nn.Conv(self.width, (3, 3), strides, use_bias=False)(x)
        y = nn.relu(self.norm.layer(train=train)(y))
        y = nn.Conv(self.width, (3, 3), use_bias=False)(y)
        y = self.norm.layer(train=train)(y)
        if x.shape != y.shape:
            x = self.norm.layer(train=train)(nn.Conv(self.width, (1, 1), strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Small residual network for images of 8×8 to 32×32 pixels. `[N, H, W, C]` → `[N, classes]`."""

    norm: NormChoice
    classes: int = 10
    widths: Sequence[int] = (16, 32, 64)

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"], *, train: bool) -> Float[Array, "n classes"]:
        x = nn.Conv(self.widths[0], (3, 3), use_bias=False)(images)
        x = nn.relu(self.norm.layer(train=train)(x))
        for stage, width in enumerate(self.widths):
            x = Block(self.norm, width, stride=1 if stage == 0 else 2)(x, train=train)
        return nn.Dense(self.classes)(jnp.mean(x, axis=(1, 2)))
