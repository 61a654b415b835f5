"""Passes whose kernels are plain Pallas calls: for the simulator, for counting, and for lowering without hardware.

Placed on a mesh, a kernel is wrapped in a custom partitioning, which JAX 0.12 does not lower for an abstract device.
"""

from __future__ import annotations

import dataclasses

from normlib.passes.npu import NpuPass
from normlib.passes.pallas import PallasPass


@dataclasses.dataclass(frozen=True)
class Laid(NpuPass):
    """Kernels of the npu pass, not emulated."""

    def run(self, kernel, arrays, statistics, split):
        return kernel(*arrays)


@dataclasses.dataclass(frozen=True)
class Lowered(PallasPass):
    """Kernels of the pallas pass, not placed."""

    def run(self, kernel, arrays, statistics, split):
        return kernel(*arrays)


def lowered_for(platform: str) -> Lowered:
    """The pass whose kernels `sim_npu.lower_check(platform=...)` takes."""
    return Lowered("gpu" if platform == "cuda" else "tpu", interpret=False)
