"""How whole channels are cut into tiles: what fits a machine, the cheapest first, and the rest for a tuner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jax.experimental import pallas as pl

from normlib.kernels.channel_cost import Bytes, ordered
from normlib.kernels.channel_sets import Sets
from normlib.kernels.machine import Machine
from normlib.kernels.tile import lanes_per_tile
from normlib.kernels.tiling import CORES, Tiling

STAGED = 1  # bytes per entry of the first stage of a sum over rows


def channel_tilings(
    sets: Sets, machine: Machine, held: Bytes, *, rows: int | None = None, chunk: int | None = None,
    residency: str | None = None,
) -> Tiling | None:  # fmt: skip
    """Whole channels in tiles that fit, the best guess with the rest as `others`; None where there are none.

    `rows` of M at a time, `chunk` channels in a tile, "row" (they stay) or "stream" (they are read twice) as asked for,
    rounded to what the machine's tiles allow, and no more rows than fit.
    """
    cuts = _Cuts(sets, machine, held, rows, chunk)
    if machine.masked:
        found = list(cuts.masked())
    else:
        found = list(cuts.kept()) if residency != "stream" else []
        found += cuts.streamed() if residency != "row" and machine.sequential else []
    found = ordered(list(dict.fromkeys(found)), sets, machine, held)
    return replace(found[0], others=tuple(found[1:])) if found else None


@dataclass(frozen=True)
class _Cuts:
    sets: Sets
    machine: Machine
    held: Bytes
    asked: int | None
    chunk: int | None

    @property
    def unit(self) -> int:
        """Channels of which a tile holds a multiple, or all."""
        _, _, c, _ = self.sets.sides
        least = self.machine.row_multiple if self.sets.spread else self.machine.lane_multiple
        return min(c, math.lcm(self.sets.group, least))

    def size(self, rows: int, channels: int) -> int:
        """Entries of a tile of so many rows and channels, with padding."""
        lanes = self.machine.lane_multiple
        _, _, _, r = self.sets.sides
        return rows * (channels * _up(r, lanes) if self.sets.spread else _up(channels, lanes))

    def still(self, channels: int) -> int:
        """Bytes of what does not depend on the rows: values per channel, and who is in which group."""
        if self.sets.spread:
            return channels * (8 * self.held.fixed + self.machine.row_bytes)
        pooled = pl.cdiv(channels, self.sets.group) * channels * 16 if self.sets.group > 1 else 0
        return _up(channels, self.machine.lane_multiple) * self.held.fixed + pooled

    def counts(self) -> Iterator[int]:
        """Channels of a tile, the best guess first: one tile for every core, then fewer and more."""
        a, _, c, _ = self.sets.sides
        units = pl.cdiv(c, self.unit)
        if self.chunk is not None:
            yield c if self.chunk >= c else max(1, self.chunk // self.unit) * self.unit
            return
        share = max(1, a * units // CORES) if self.machine.name != "tpu" else units
        for n in dict.fromkeys([share, *(n for n in _halves(units) if n < share), *_halves(units)]):
            yield c if n >= units else n * self.unit

    def kept(self) -> Iterator[Tiling]:
        """All entries of the channels stay in the buffer."""
        _, m, _, _ = self.sets.sides
        for channels in self.counts():
            left = self.machine.tile_bytes - self.still(channels) - self.size(m, channels) * self.held.moving
            if rows := self.rows(left // self.size(1, channels), self.held.temporary):
                yield Tiling(rows, channels, False)

    def streamed(self) -> Iterator[Tiling]:
        """Rows come and go, twice."""
        for channels in self.counts():
            left = self.machine.tile_bytes - self.still(channels)
            if rows := self.rows(left // self.size(1, channels), self.held.moving + self.held.temporary):
                yield Tiling(rows, channels, True)

    def rows(self, left: int, entry: int) -> int:
        """Rows for which `left` bytes per row's entry are enough, as asked for and as the machine's tiles allow.

        An entry takes `entry` bytes, and some more where rows are summed in stages. 0 for too few.
        """
        _, m, _, _ = self.sets.sides
        fit = left // (entry + STAGED)
        fit = fit if fit > self.sets.serial else min(self.sets.serial, left // entry)
        fit = min(fit, self.asked or m, m)
        multiple = 1 if self.sets.spread else self.machine.row_multiple
        return m if fit == m else max(fit, 0) // multiple * multiple

    def masked(self) -> Iterator[Tiling]:
        """A program loops over the rows: nothing has to fit but a chunk."""
        _, m, c, r = self.sets.sides
        group, entries, most = self.sets.group, pl.next_power_of_2(r), self.machine.entries
        if group & (group - 1):  # a tile's lanes are a power of two: all channels, or groups that are one themselves
            lanes = [pl.next_power_of_2(c)]
        else:
            wanted = [self.chunk] if self.chunk else [1, 4, 16] if r > 1 else [32, 16, 64]
            lanes = [lanes_per_tile(c, max(n, group), self.machine) for n in wanted]
        for n in dict.fromkeys(lanes):
            members = pl.next_power_of_2(pl.cdiv(n, group)) * n if group > 1 else 0
            if n * entries <= most and members <= 4 * most:
                rows = min(pl.next_power_of_2(m), max(1, most // (n * entries)))
                rows = min(rows, 1 << (self.asked.bit_length() - 1)) if self.asked else rows
                yield Tiling(rows, n, False)


def _up(n: int, multiple: int) -> int:
    return pl.cdiv(n, multiple) * multiple


def _halves(n: int) -> Iterator[int]:
    while n > 1:
        yield n
        n //= 2
    yield 1
