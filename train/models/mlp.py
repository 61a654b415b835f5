"""Dense layers for small images."""

from __future__ import annotations

from collections.abc import Sequence

from flax import linen as nn
from jaxtyping import Array, Float

from train.models.norms import NormChoice


class MLP(nn.Module):
    """Dense layers, each with norm and ReLU, then a dense layer of logits. `[N, H, W, C]` → `[N, classes]`."""

    norm: NormChoice
    classes: int = 10
    widths: Sequence[int] = (128, 128, 128)

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"], *, train: bool) -> Float[Array, "n classes"]:
        x = images.reshape(images.shape[0], -1)
        for width in self.widths:
            x = nn.relu(self.norm.layer(train=train)(nn.Dense(width)(x)))
        return nn.Dense(self.classes)(x)
