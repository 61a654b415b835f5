"""Sums over all cores: a workspace with a synchronisation and a fixed order, or atomic adds in whatever order.

Both are `TileProgram`s that `simulate` times, and both have a function that computes what the hardware would.
The workspace merge gives the same bits on every run; atomic adds depend on the order in which cores arrive, which
`arrival_order` draws from a seed so that the spread can be seen, here and in `emulate` (`arrival_seed` of a policy).

>>> parts = np.float32([[1e8], [1.0], [-1e8], [1.0]])
>>> workspace_sum(parts).item(), sorted({atomic_sum(parts, seed=s).item() for s in range(20)})
(1.0, [0.0, 1.0, 2.0])
"""

from __future__ import annotations

import numpy as np

from sim_npu.builder import Builder
from sim_npu.chips import ChipSpec, get_chip
from sim_npu.ir import TileProgram


def workspace_merge(width: int, *, chip: str | ChipSpec = "910b2", dtype: str = "float32") -> TileProgram:
    """Each core writes its partial row to a workspace, all meet, each core merges a share of the columns in order.

    Args:
      width: columns of the partial result.
      chip: its cores share the work.
      dtype: of the partial results.
    """
    cores = get_chip(chip).cores
    share = max(8, -(-width // cores) // 8 * 8)  # 32 B of float32
    b = Builder("workspace_merge", grid=(cores,))
    partial = b.queue_out("partial", (1, width), dtype, array=(cores, width))
    column = b.queue_in("columns", (cores, share), dtype, array=(cores, width))
    merged = b.queue_out("merged", (1, share), dtype, array=(1, width))
    b.vector("DataCopy", partial, b.buffer("local", (1, width), dtype))
    b.data_copy_pad(partial)
    b.sync_all()
    b.data_copy_pad(column, bursts=cores, burst_bytes=share * 4)
    b.vector("ReduceSum", merged, column, axes=(0,))
    b.data_copy_pad(merged)
    return b.build()


def atomic_merge(width: int, *, chip: str | ChipSpec = "910b2", dtype: str = "float32") -> TileProgram:
    """Each core adds its partial row into one row of global memory."""
    cores = get_chip(chip).cores
    b = Builder("atomic_merge", grid=(cores,))
    partial = b.queue_out("partial", (1, width), dtype, array=(1, width))
    b.vector("DataCopy", partial, b.buffer("local", (1, width), dtype))
    b.atomic_add(partial)
    return b.build()


def workspace_sum(partials: np.ndarray) -> np.ndarray:
    """Sum of `[cores, width]` partial results in the order of the cores, in their own type."""
    total = np.zeros_like(partials[0])
    for row in partials:
        total = (total + row).astype(partials.dtype)
    return total


def arrival_order(count: int, seed: int, region: int = 0) -> np.ndarray:
    """The order, drawn from `seed`, in which `count` cores (or steps) reach a 512 B region of global memory.

    >>> sorted(arrival_order(4, seed=1).tolist())
    [0, 1, 2, 3]
    """
    return np.random.default_rng((seed, region)).permutation(count)


def atomic_sum(partials: np.ndarray, *, seed: int) -> np.ndarray:
    """Sum of `[cores, width]` partial results in an order of arrival drawn from `seed`, one order per 512 B.

    Cores are served per 512 B region, so regions of one row may see different orders. Within the first region it is
    what `emulate` gives for a kernel whose steps add these rows, under the same `arrival_seed`.
    """
    total = np.zeros_like(partials[0])
    width = max(1, 512 // partials.dtype.itemsize)
    for region, start in enumerate(range(0, partials.shape[1], width)):
        part = slice(start, start + width)
        total[part] = workspace_sum(partials[arrival_order(len(partials), seed, region), part])
    return total
