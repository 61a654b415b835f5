"""What a norm over channels costs, roughly: whether one kernel that holds whole channels is the better way, and how.

Two ways do the same. Whole channels in one kernel: one launch, x read once where it fits, but no more cores than there
are tiles of channels, and rows of a narrow tile are short copies. Moments of parts of the rows, merged, then a map:
every core works on any shape, for three launches and two reads. The prices are of the simulated AI Core
(`sim_npu`, 910B2), read off 36 shapes of ResNet-50 and a UNet, forward and backward; choices made with them
stand beside simulated times in `docs/kernel_templates.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from normlib.kernels.channel_sets import Sets
from normlib.kernels.machine import Machine
from normlib.kernels.tiling import CORES, Tiling

LAUNCH = 3.0  # µs
TURN = 0.9  # µs of the instructions that a walk has per turn, whatever its size
POOLED = 1.0  # µs of pooling the lanes of groups, per tile
BYTE = 0.015e-3  # µs per byte moved by a core alone
SHARED = 0.016e-3  # µs more where all cores move bytes at once
BURST = 6e-3  # µs * bytes: what an entry costs beside, by the length of the copies it is part of
PARTS_LAUNCH = 14.0  # µs of the launches of the other way
PARTS_BYTE = 0.04e-3  # µs per byte and core
MOST_LOOPED = 4096  # entries of a channel that one Triton program walks by itself: one tile, so x is read once or twice
LEAST_PROGRAMS = 64  # Triton programs: half of a large GPU's multiprocessors


@dataclass(frozen=True)
class Bytes:
    """What a tile of channels holds.

    Attributes:
      moving: bytes per entry for operands and outputs of the full shape, both buffers.
      temporary: bytes per entry for float32 values in use.
      fixed: bytes per channel for what is one value per channel.
      item: bytes of an entry of x.
    """

    moving: int
    temporary: int
    fixed: int
    item: int


def bytes_of(sets: Sets, x: Array, others: Sequence[Array | None], written: Sequence[Any], temporary: int) -> Bytes:
    """Of a kernel that reads x and `others`, of its rank, and writes arrays of its shape in these dtypes."""
    moving, fixed = 2 * x.dtype.itemsize + sum(2 * jnp.dtype(d).itemsize for d in written), 64
    for t in others:
        if t is not None and (t.size == x.size or sets.varies(t.shape)):
            moving += 2 * t.dtype.itemsize
        elif t is not None:
            fixed += 2 * t.dtype.itemsize
    return Bytes(moving, temporary, fixed, x.dtype.itemsize)


def whole_us(sets: Sets, held: Bytes, tile: Tiling, lane_multiple: int) -> float:
    """µs of whole channels in one kernel."""
    a, m, c, r = sets.sides
    tiles = a * pl.cdiv(c, tile.chunk)
    rounds = pl.cdiv(tiles, CORES)
    item = held.item
    if sets.spread:
        entries, burst = m * tile.chunk * pl.cdiv(r, lane_multiple) * lane_multiple, r * item
    else:
        entries, burst = m * tile.chunk, (tile.chunk if tile.chunk < c else m * c) * item
    moved = held.moving / 2 * (1.5 if tile.streamed else 1.0)
    entry = moved * (BYTE + SHARED * min(1.0, tiles / CORES)) + BURST / burst
    pooled = POOLED if sets.group > 1 else 0.0
    return LAUNCH + rounds * (pl.cdiv(m, tile.rows) * TURN + pooled + entries * entry)


def parts_us(sets: Sets, held: Bytes) -> float:
    """µs of moments of parts, merged, and a map."""
    a, m, c, r = sets.sides
    return PARTS_LAUNCH + a * m * c * r / CORES * held.moving / 2 * 1.5 * PARTS_BYTE


def ordered(tilings: list[Tiling], sets: Sets, machine: Machine, held: Bytes) -> list[Tiling]:
    """The cheapest first."""
    if machine.masked:
        return tilings
    if machine.name == "tpu":  # one core: entries that stay are read once, and wide tiles are long copies
        return sorted(tilings, key=lambda t: (t.streamed, -t.chunk, -t.rows))
    return sorted(tilings, key=lambda t: (whole_us(sets, held, t, machine.lane_multiple), -t.rows))


def pays(sets: Sets, machine: Machine, held: Bytes, tile: Tiling) -> bool:
    """Whether whole channels are the better way, where nothing says which to take.

    On a GPU a program loops over the entries of its channels: only many channels of few entries keep it at work. A TPU
    has one core: it saves launches and a read.
    """
    if machine.masked:
        a, m, c, r = sets.sides
        small = a * m * c * r <= 16 * MOST_LOOPED
        return small or (m * r <= MOST_LOOPED and a * pl.cdiv(c, tile.chunk) >= LEAST_PROGRAMS)
    if machine.name == "tpu":
        return True
    return whole_us(sets, held, tile, machine.lane_multiple) < parts_us(sets, held)
