"""The machines a tile kernel runs on: what fits, what must be aligned, and how a tile is read and written.

One kernel source serves all: the differences are numbers (bytes, multiples) and one question, whether the machine
masks what lies beyond an array by itself. Triton does not: there every load and store carries its mask.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton


@dataclass(frozen=True)
class Machine:
    """Where a kernel runs.

    Attributes:
      name: "npu", "tpu", "gpu" or "cpu".
      tile_bytes: bytes that the tiles of one grid step, their second buffers and their temporaries may fill.
      row_multiple: rows of a tile are a multiple of it, unless they are all rows.
      lane_multiple: lanes of a tile are a multiple of it, unless they are the whole row.
      power_of_two: sides of a tile are powers of two.
      masked: loads and stores must be masked beyond the end of an array.
      steady: tiles of row kernels have the same number of rows for any number of rows: the order in which lanes are
        summed may depend on it.
      sequential: grid steps run in order on one core and a block that is visited again keeps its values.
      interpret: run in Pallas' interpreter: a bool, or `pltpu.InterpretParams` for its checks.
      row_bytes: bytes that a row of a tile takes besides its entries (padding of columns, work space of reductions).
      tuner: chooses among tilings of rows by what they cost (`normlib.passes.tuner`); None for the first that fits.
      warp_entries, column_warp_entries: elements of a tile, of rows or of columns, for each warp of a Triton program:
        adding columns needs no exchange between threads.
      num_stages: loads that a loop of a Triton program has in flight.
      entries: elements of a tile of a Triton program.
      column_lanes: lanes of a tile of columns at most.
      column_rows: rows of a tile of columns of a Triton program.
      parts: partial sums of a column at most, which a second kernel merges.

    >>> MACHINES["gpu"].power_of_two, MACHINES["npu"].sequential
    (True, True)
    """

    name: str
    tile_bytes: int
    row_multiple: int = 1
    lane_multiple: int = 1
    power_of_two: bool = False
    masked: bool = False
    steady: bool = False
    sequential: bool = True
    interpret: Any = False
    row_bytes: int = 0
    tuner: Any = None
    warp_entries: int = 512
    column_warp_entries: int = 2048
    num_stages: int = 2
    entries: int = 4096
    column_lanes: int = 512
    column_rows: int = 128
    parts: int = 48

    def replace(self, **changes: Any) -> Machine:
        """A machine with some fields changed."""
        return dataclasses.replace(self, **changes)

    def compiler_params(self, semantics: tuple[str, ...], entries: int, *, columns: bool = False) -> Any:
        """What Pallas is told for a grid with `semantics` and tiles of `entries` elements, of rows or of columns."""
        if self.name == "gpu":
            warps = max(1, min(16, entries // (self.column_warp_entries if columns else self.warp_entries)))
            return pltriton.CompilerParams(num_warps=1 << (warps.bit_length() - 1), num_stages=self.num_stages)
        return pltpu.CompilerParams(dimension_semantics=semantics)  # type: ignore[arg-type]


# The unified buffer of an A2 core is 192 KiB, of which the fit-check of sim_npu must find all tiles inside; a v5e core
# has 16 MiB of VMEM for Pallas; a Triton program keeps its tile in registers and shared memory.
MACHINES: dict[str, Machine] = {
    "npu": Machine("npu", 180 * 1024, lane_multiple=16, row_bytes=640),
    "tpu": Machine("tpu", 8 << 20, row_multiple=16, lane_multiple=128),
    "gpu": Machine(
        "gpu", 128 * 1024, power_of_two=True, masked=True, steady=True, sequential=False, parts=264, column_lanes=64
    ),
    "cpu": Machine("cpu", 1 << 20, steady=True, interpret=True),
}
