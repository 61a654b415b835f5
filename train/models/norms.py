"""Which norm a model builds, by name, and how many rows share its statistics.

The one line that differs from a Flax model is the import of the norm layers: `normlib.linen` has the same names,
arguments and parameter layout, and adds `virtual_batch_size`: rows that share statistics, inside a device or across
devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

from normlib import linen as norm
from train.errors import ConfigError

NormName = Literal["local_bn", "sync_bn", "ghost_bn", "group_norm", "layer_norm"]
NORMS: tuple[NormName, ...] = get_args(NormName)
BATCH_NORMS: tuple[NormName, ...] = ("local_bn", "sync_bn", "ghost_bn")


@dataclass(frozen=True)
class NormChoice:
    """Which norm layer a model builds, and how many rows share its statistics.

    The three batch norms are one layer with three spans. Where a step function runs once per device (`axis_name`
    given), a span beyond the device's own rows needs that axis; where one program sees the global batch (`axis_name`
    None), a span below the global batch is a virtual batch.

    Args:
      name: one of `NORMS`.
      rows_per_device: rows of the batch on each device.
      devices: number of devices.
      axis_name: the mapped axis that the step function binds, or None where it sees the global batch.
      virtual_batch_size: rows that share statistics in `ghost_bn`; None for four devices' rows.
      momentum: of the running statistics: new = momentum · old + (1 - momentum) · batch.
      num_groups: channel groups of `group_norm`; must divide every width of the model.

    Raises:
      ConfigError: an unknown name, or a `virtual_batch_size` that does not divide the global batch or that cuts a
        device's rows unevenly.

    >>> [NormChoice(name, rows_per_device=2, devices=8).span for name in NORMS]
    [2, 16, 8, None, None]
    """

    name: NormName
    rows_per_device: int
    devices: int
    axis_name: str | None = None
    virtual_batch_size: int | None = None
    momentum: float = 0.9
    num_groups: int = 8

    def __post_init__(self):
        if self.name not in NORMS:
            raise ConfigError(f"`norm` is {self.name!r}; expected one of {', '.join(NORMS)}.")
        if self.name != "ghost_bn":
            return
        span, rows, total = self.ghost_span, self.rows_per_device, self.rows_per_device * self.devices
        if span < 1 or total % span:
            raise ConfigError(
                f"`virtual_batch_size` is {span} rows; it must divide the global batch of {total} rows "
                f"({self.devices} devices × {rows}). Give another `--virtual-batch-size`."
            )
        if span % rows and rows % span:
            raise ConfigError(
                f"`virtual_batch_size` is {span} rows; it must be a multiple or a divisor of `rows_per_device`, {rows}."
            )

    @property
    def ghost_span(self) -> int:
        """Rows per virtual batch of `ghost_bn`."""
        return 4 * self.rows_per_device if self.virtual_batch_size is None else self.virtual_batch_size

    @property
    def span(self) -> int | None:
        """BN span: rows that share statistics; None for norms that use one row alone."""
        spans = {
            "local_bn": self.rows_per_device,
            "sync_bn": self.rows_per_device * self.devices,
            "ghost_bn": self.ghost_span,
        }
        return spans.get(self.name)

    def layer(self, *, train: bool) -> nn.Module:
        """The norm layer; `train` takes the batch's statistics, otherwise the running ones are used."""
        if self.name == "group_norm":
            return norm.GroupNorm(num_groups=self.num_groups)
        if self.name == "layer_norm":
            return norm.LayerNorm()
        span, total = self.span, self.rows_per_device * self.devices
        seen = total if self.axis_name is None else self.rows_per_device  # rows that one call of the layer sees
        return norm.BatchNorm(
            use_running_average=not train,
            momentum=self.momentum,
            skip_nonfinite_update=True,  # one bad batch must not end in the running statistics
            axis_name=self.axis_name if span is not None and span > seen else None,
            virtual_batch_size=span if span not in (seen, total) else None,
        )


def single_value_norms(model: nn.Module, choice: NormChoice, image_shape: Sequence[int]) -> list[str]:
    """Paths of the batch norms that would train on one value per channel, whose output is their bias whatever x is.

    Args:
      model: as `build` makes it.
      choice: its norm.
      image_shape: `[H, W, C]` of one image.

    Returns:
      Names such as "BatchNorm_0", in the order in which they are called; traced, never run.

    >>> from train.models import build
    >>> local = NormChoice("local_bn", rows_per_device=1, devices=8)
    >>> single_value_norms(build("mlp", local, classes=10), local, (8, 8, 1))
    ['BatchNorm_0', 'BatchNorm_1', 'BatchNorm_2']
    """
    found: list[str] = []

    def noticed(call, args, kwargs, context):
        called = isinstance(context.module, norm.BatchNorm) and context.method_name == "__call__"
        if called and choice.span * math.prod(args[0].shape[1:-1]) == 1:
            found.append("/".join(context.module.path))
        return call(*args, **kwargs)

    image = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    with nn.intercept_methods(noticed):
        jax.eval_shape(lambda key, x: model.init(key, x, train=False), jax.random.key(0), image)
    return found
