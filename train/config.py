"""The settings of a run: frozen, checked when built, and read from the command line by tyro."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.errors import ConfigError
from train.models import ModelName, NormName
from train.parallel import Mode

# Settings that may differ between a run and its continuation: the computed bits do not depend on them.
_FREE = ("out", "resume", "overwrite", "steps_in_flight", "checkpoint_every")


@dataclass(frozen=True)
class Classify:
    """Train a classifier of images on one or several devices."""

    norm: NormName = "sync_bn"
    """Norm layer; local_bn, sync_bn and ghost_bn differ in how many rows share statistics."""
    model: ModelName = "mlp"
    """mlp: three dense layers of 128; resnet: three residual blocks."""
    mode: Mode = "shard_map"
    """How a step runs on several devices."""
    devices: int | None = None
    """Devices, simulated on the host where there are too few others. Default: all accelerators, or one host device."""
    rows_per_device: int = 2
    """Rows of a batch on each device."""
    virtual_batch_size: int | None = None
    """Rows that share statistics in ghost_bn. Default: the rows of four devices."""
    epochs: int = 10
    """Passes over the training rows."""
    learning_rate: float = 0.05
    """Of SGD at the first step; falls to 0 along a cosine."""
    momentum: float = 0.9
    """Of SGD."""
    norm_momentum: float = 0.9
    """Of the running statistics: new = momentum · old + (1 - momentum) · batch."""
    seed: int = 0
    """Of the parameters and of the order of the rows."""
    data_dir: Path | None = None
    """Directory with MNIST-like IDX files or CIFAR-10's binary files. Default: scikit-learn's digits."""
    out: Path = Path("runs/classify")
    """Directory for the log, the checkpoints, the curves and the summary."""
    resume: bool = False
    """Continue from the latest checkpoint in `out`, if there is one."""
    overwrite: bool = False
    """Replace an earlier run in `out`."""
    checkpoint_every: int = 500
    """Steps between two checkpoints; the last step is saved in any case."""
    log_every: int = 10
    """Steps between two records in the log; every epoch gets one in any case."""
    steps_in_flight: int | None = None
    """Steps queued ahead of the devices. Default: 1 on host devices, where more can deadlock, else 4."""

    def __post_init__(self):
        for name in (
            "devices",
            "rows_per_device",
            "virtual_batch_size",
            "epochs",
            "checkpoint_every",
            "log_every",
            "steps_in_flight",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` is {value}; expected at least 1.")
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError(f"`learning_rate` is {self.learning_rate}; expected a number above 0.")
        for name in ("momentum", "norm_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"`{name}` is {getattr(self, name)}; expected 0 to below 1.")
        if self.seed < 0:
            raise ConfigError(f"`seed` is {self.seed}; expected 0 or more.")
        if self.resume and self.overwrite:
            raise ConfigError("`resume` continues an earlier run and `overwrite` replaces it; give one of them.")

    def to_json(self) -> str:
        """The settings as text, for `config.json`."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        return json.dumps(values, indent=2) + "\n"

    def check_same_run(self, text: str, *, source: Path) -> None:
        """Raise unless a run with these settings can continue one whose `config.json` is `text`.

        Raises:
          ConfigError: naming the settings that differ, with both values.
        """
        mine: dict[str, Any] = json.loads(self.to_json())
        try:
            other = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{source}: cannot be read as JSON: {error}. Give `--overwrite` or another `--out`."
            ) from error
        different = [name for name in mine if name not in _FREE and mine[name] != other.get(name)]
        if different:
            listed = "; ".join(f"`{name}` was {other.get(name)} and is now {mine[name]}" for name in different)
            raise ConfigError(f"`resume`: {source.parent} holds a run with other settings: {listed}.")


@dataclass(frozen=True)
class Demo:
    """Compare four norms at few rows per device: local, synchronised and ghost batch norm, and group norm."""

    devices: int = 8
    """Devices; simulated host devices where there are too few others."""
    rows_per_device: int = 2
    """Rows of a batch on each device."""
    epochs: int = 10
    """Passes over the training rows of scikit-learn's digits."""
    seed: int = 0
    """Of the parameters and of the order of the rows."""
    mode: Mode = "shard_map"
    """How a step runs on several devices."""
    out: Path = Path("runs/demo")
    """Directory for the log, the checkpoints, the curves and the summary; an earlier demo there is replaced."""

    def runs(self) -> list[Classify]:
        """The four runs, in the order of the table."""
        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "out"}
        names: tuple[NormName, ...] = ("local_bn", "sync_bn", "ghost_bn", "group_norm")
        return [Classify(norm=name, out=self.out / name, overwrite=True, **common) for name in names]
