"""The npu pass: tile kernels on the simulated AI Core, with its rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

import sim_npu
from normlib import _arguments as check
from normlib.kernels.machine import MACHINES, Machine
from normlib.passes.placement import Split, place
from normlib.passes.recording import lays_out, left_out, record
from normlib.passes.tiles import TilePass
from normlib.passes.tuner import Tuner
from sim_npu.precision import PrecisionPolicy, resolve


@dataclass(frozen=True)
class NpuPass(TilePass):
    """Tile kernels emulated as an AI Core would round them.

    Attributes:
      chip: name or `sim_npu.ChipSpec`: its buffer decides the tiles, its kernels the rounding where `precision` is
        None.
      precision: a `sim_npu.PrecisionPolicy` or a preset's name ("fp32", "fp16_fp32acc", "bf16_fp32acc", "fp16",
        "fp16_sequential", "fp16_tree", "ascend_a2", "ascend_950", ...).
      order: order of sums, see `sim_npu.reduction`; None for the policy's.
      tune: choose the tiling of row kernels by simulating what fits, once per shape; False takes the first that fits.

    Raises:
      ValueError: for an unknown chip, precision or order.
    """

    chip: Any = "910b2"
    precision: str | PrecisionPolicy | None = "fp32"
    order: str | None = None
    tune: bool = False

    def __post_init__(self) -> None:
        sim_npu.get_chip(self.chip)
        self.policy  # noqa: B018  checked when built

    @property
    def policy(self) -> PrecisionPolicy:
        """What rounds."""
        chip = self.chip if self.precision is None else None
        return resolve(self.precision, self.order, chip)  # type: ignore[arg-type]

    @property
    def machine(self) -> Machine:
        room = sim_npu.get_chip(self.chip).ub_bytes * 15 // 16
        return MACHINES["npu"].replace(tile_bytes=room, tuner=Tuner(self.chip) if self.tune else None)

    def run(
        self, kernel: Callable[..., Any], arrays: Sequence[Array], statistics: Sequence[int], split: Split | None
    ) -> Any:
        if lays_out():
            return kernel(*arrays)
        arrays = record(kernel, arrays, self.chip)

        def emulated(*arrays: Array) -> Any:
            return sim_npu.emulate(kernel, *arrays, precision=self.policy, statistics=tuple(statistics))

        return place(emulated, arrays, split, interpreted=True, partition=False)

    def computes(self, x: Array) -> bool:
        """An AI Core has no float64. What is not computed is noted for a profile."""
        check.known_shape(x, "npu")
        able = super().computes(x) and x.dtype != jnp.float64
        if not able and x.size and x.dtype != jnp.bool_:
            left_out(x)
        return able
