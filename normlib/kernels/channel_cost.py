"""What a norm over channels costs, roughly: whether one kernel that holds whole channels is the better way, and how.

Two ways do the same. Whole channels in one kernel: one launch, x read once where it fits, but no more cores than there
are tiles of channels, and rows of a narrow tile are short copies. Moments of parts of the rows, merged, then a map:
every core works on any shape, for three launches and two reads. The prices are of the simulated AI Core (`sim_npu`,
910B2), fitted to its times of 446 shapes forward and backward; choices made with them stand beside simulated times in
`docs/kernel_templates.md`.
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

# Of whole channels, in µs: a launch; what a walk's instructions cost per turn whatever its size, and the pooling of
# lanes per tile; an entry, and a byte of it that moves; what an entry costs beside, times the bytes of the copies that
# it is part of.
LAUNCH, TURN, POOLED = 4.2, 0.59, 0.93
ENTRY, BYTE, BURST = 1.13e-4, 4.2e-6, 9.6e-3
# Of the other way: its three launches; an entry and a byte of it, on one of all cores; an entry of each array but the
# first that is summed along space.
PARTS_LAUNCH, PARTS_ENTRY, PARTS_BYTE, PARTS_SPACE = 12.4, 3.2e-4, 1.11e-5, 2.23e-4
MARGIN = 0.9  # whole channels must be that much cheaper: prices are off by 15 and 18 % (rms)
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
      read: arrays of the full shape that are read.
    """

    moving: int
    temporary: int
    fixed: int
    item: int
    read: int = 1


def bytes_of(sets: Sets, x: Array, others: Sequence[Array | None], written: Sequence[Any], temporary: int) -> Bytes:
    """Of a kernel that reads x and `others`, of its rank, and writes arrays of its shape in these dtypes."""
    present = [t for t in others if t is not None]
    full = [x, *(t for t in present if t.size == x.size or sets.varies(t.shape))]
    moving = sum(2 * t.dtype.itemsize for t in full) + sum(2 * jnp.dtype(d).itemsize for d in written)
    fixed = sum(2 * t.dtype.itemsize for t in present if not (t.size == x.size or sets.varies(t.shape)))
    return Bytes(moving, temporary, fixed + 64, x.dtype.itemsize, len(full))


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
    entry = ENTRY + moved * BYTE + BURST / burst
    pooled = POOLED if sets.group > 1 else 0.0
    return LAUNCH + rounds * (pl.cdiv(m, tile.rows) * TURN + pooled + entries * entry)


def parts_us(sets: Sets, held: Bytes, lane_multiple: int) -> float:
    """µs of moments of parts, merged, and a map."""
    a, m, c, r = sets.sides
    entries = a * m * c * (pl.cdiv(r, lane_multiple) * lane_multiple if sets.spread else r)
    entry = PARTS_ENTRY + held.moving / 2 * PARTS_BYTE
    entry += PARTS_SPACE * (held.read - 1) if sets.spread else 0.0
    return PARTS_LAUNCH + entries / CORES * entry


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
    lanes = machine.lane_multiple
    return whole_us(sets, held, tile, lanes) < MARGIN * parts_us(sets, held, lanes)
