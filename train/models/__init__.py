"""The models: small classifiers with the norm chosen by name, and the ResNets with any norm put in."""

from __future__ import annotations

from typing import Literal

from flax import linen as nn

from train.errors import ConfigError
from train.models.mlp import MLP as MLP
from train.models.norms import BATCH_NORMS as BATCH_NORMS
from train.models.norms import NORMS as NORMS
from train.models.norms import NormChoice as NormChoice
from train.models.norms import NormName as NormName
from train.models.norms import single_value_norms as single_value_norms
from train.models.resnet import Bottleneck as Bottleneck
from train.models.resnet import DeepResNet as DeepResNet
from train.models.resnet import ResidualBlock as ResidualBlock
from train.models.resnet import resnet18 as resnet18
from train.models.resnet import resnet34 as resnet34
from train.models.resnet import resnet50 as resnet50
from train.models.resnet import resnet101 as resnet101
from train.models.small_resnet import Block as Block
from train.models.small_resnet import ResNet as ResNet

ModelName = Literal["mlp", "resnet"]


def build(name: ModelName, norm_choice: NormChoice, *, classes: int) -> nn.Module:
    """The model called `name`.

    Raises:
      ConfigError: an unknown name.
    """
    models = {"mlp": MLP, "resnet": ResNet}
    if name not in models:
        raise ConfigError(f"`model` is {name!r}; expected one of {', '.join(models)}.")
    return models[name](norm=norm_choice, classes=classes)
