"""The pallas pass: tile kernels on a GPU (Triton) or TPU, or in Pallas' interpreter elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from normlib import _arguments as check
from normlib.kernels.machine import MACHINES, Machine
from normlib.passes.placement import Split, place
from normlib.passes.tiles import TilePass

PLATFORMS = {"gpu": "gpu", "cuda": "gpu", "tpu": "tpu", "cpu": "cpu"}


@dataclass(frozen=True)
class PallasPass(TilePass):
    """Tile kernels through Pallas.

    Attributes:
      platform: "gpu", "tpu" or "cpu" (the interpreter); None for the platform JAX runs on.
      interpret: run the kernels of `platform` in the interpreter; None where that platform is not the one at hand.

    Raises:
      ValueError: for another platform.
    """

    platform: str | None = None
    interpret: bool | None = None

    def __post_init__(self) -> None:
        if self.platform is not None and self.platform not in PLATFORMS:
            raise ValueError(f"`platform` must be one of {', '.join(PLATFORMS)}, or None; got {self.platform!r}.")

    @property
    def machine(self) -> Machine:
        here = PLATFORMS.get(jax.default_backend(), "cpu")
        machine = MACHINES[here if self.platform is None else PLATFORMS[self.platform]]
        if machine.interpret:
            return machine
        return machine.replace(interpret=machine.name != here if self.interpret is None else self.interpret)

    def run(
        self, kernel: Callable[..., Any], arrays: Sequence[Array], statistics: Sequence[int], split: Split | None
    ) -> Any:
        return place(kernel, arrays, split, interpreted=self.machine.interpret)

    def computes(self, x: Array) -> bool:
        """No kernels of float64 on a GPU or TPU, nor of float16 on a TPU (Mosaic refuses its loads)."""
        check.known_shape(x, "pallas")
        refused = {"tpu": (jnp.float64, jnp.float16), "gpu": (jnp.float64,)}.get(self.machine.name, ())
        return super().computes(x) and (self.machine.interpret or x.dtype not in refused)
