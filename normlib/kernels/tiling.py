"""How rows are cut into tiles: what fits a machine, the best guess first, and the rest for a tuner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from normlib.kernels.machine import Machine
from normlib.kernels.tile import lanes_per_tile, rows_per_tile
from normlib.kernels.view import View


@dataclass(frozen=True)
class Tiling:
    """How rows are cut: `rows` per tile, `chunk` lanes at a time, `streamed` where a row does not stay.

    Of whole channels: `rows` of a tile at a time, `chunk` channels per tile; `in_parts` where a tile holds but a part
    of a channel and moments are merged. `others` are further tilings that fit, for a tuner to choose from.
    """

    rows: int
    chunk: int
    streamed: bool
    others: tuple[Tiling, ...] = ()
    in_parts: bool = False


def titled(name: str, dtype: Any, written: Sequence[Any], sums: int = 0) -> str:
    """What a tuner calls a kernel whose results of the full shape, dtypes `written`, and sums over rows decide what
    fits: `name` alone for one result in x's `dtype`."""
    names = [jnp.dtype(d).name for d in written]
    name += "" if names == [jnp.dtype(dtype).name] else f"_to_{'_'.join(names)}"
    return f"{name}_and_{sums}_sums" if sums else name


REREAD = 128 << 20  # bytes of rows in flight that a chip's L2 (192 MiB) keeps until they are read again
CORES = 48  # a tile is no larger than leaves one for every core
STEADY_ROWS = CORES * 64
CHUNKS = (4096, 2048, 1024)
STREAMED = (2048, 4096, 1024)  # several rows of 2048 beat one of 4096 on the simulator


def tiling(
    shape: tuple[int, int, int], machine: Machine, *, moving: int, temporary: int, fixed: int = 0, still: int = 0,
    rows: int | None = None, chunk: int | None = None, residency: str | None = None, pooled: bool = False,
) -> Tiling:  # fmt: skip
    """What fits: whole rows with their temporaries, else resident rows in chunks, else streamed rows.

    Args:
      shape: (A, M, L).
      machine: where it runs.
      moving: bytes per element that stay for the row: operands and outputs of the full shape, twice.
      temporary: bytes per element of float32 values in use at once.
      fixed: bytes per lane that a tile holds once: operands of one row, twice.
      still: likewise of operands that are one row for all tiles, once: rows that stay need no second buffer for them.
      rows, chunk, residency: asked for, or None.
      pooled: a tile holds all M rows; see `pooled_fits`.
    """
    _, m, l = shape
    if machine.steady and not pooled:  # tiles, and with them the bits of a row, do not change with the rows beside it
        m = STEADY_ROWS
    if machine.masked:  # a block is a pointer there: nothing has to stay
        together = _all_rows(m, machine) if pooled else 1
        lanes = lanes_per_tile(l, chunk or max(16, machine.entries // together), machine)
        wanted = rows or max(1, machine.entries // lanes)
        return Tiling(together if pooled else rows_per_tile(m, wanted, machine), lanes, False)
    if rows is not None and chunk is None and residency == "row":
        return Tiling(rows_per_tile(m, rows, machine), l, False)
    cuts = _Cuts(m, l, machine, moving, temporary, fixed, still, pooled)
    chunks = [chunk] if chunk is not None else list(CHUNKS)
    found: list[Tiling] = []
    if residency != "stream":
        if chunk is None:
            found += cuts.whole()
        found += [t for c in chunks for t in cuts.resident(c, force=residency == "row")]
    if residency == "stream" or not found or (machine.tuner is not None and residency is None):
        found += [t for c in (chunks if chunk is not None else STREAMED) for t in cuts.streamed(c)]
    if not found:
        size = (machine.tile_bytes // cuts.least - machine.row_bytes) // (moving + temporary + fixed + 2 * still)
        found = [Tiling(cuts.least, lanes_per_tile(l, max(1, min(size, *chunks, 4096)), machine), True)]
    if rows is not None and not pooled:
        found = [replace(found[0], rows=rows_per_tile(m, rows, machine))]
    return replace(found[0], others=tuple(found[1:]))


@dataclass(frozen=True)
class _Cuts:
    """Tilings of rows of length l that fit a machine, the best guess of each kind first."""

    m: int
    l: int
    machine: Machine
    moving: int
    temporary: int
    fixed: int
    still: int
    pooled: bool = False

    @property
    def least(self) -> int:
        """Fewest rows of a tile."""
        return self.m if self.pooled else rows_per_tile(self.m, 1, self.machine)

    def _tilings(self, chunk: int, bytes_per_row: int, fixed: int, streamed: bool, most: int) -> list[Tiling]:
        least = self.least
        fit = (self.machine.tile_bytes - fixed) // (bytes_per_row + self.machine.row_bytes)
        if fit < least:
            return []
        if self.pooled:
            return [Tiling(least, chunk, streamed)]
        share = min(fit, max(1, pl.cdiv(self.m, CORES)), most)
        counts = dict.fromkeys(rows_per_tile(self.m, n, self.machine) for n in (share, share // 2, share // 4) if n)
        return [Tiling(n, chunk, streamed) for n in counts if n <= max(fit, least)]

    def _padded(self, n: int) -> int:
        return pl.cdiv(n, self.machine.lane_multiple) * self.machine.lane_multiple

    @property
    def held(self) -> int:
        """Bytes per lane of a tile that do not depend on its rows, where rows stay."""
        return self.fixed + self.still

    def whole(self) -> list[Tiling]:
        """A row and its temporaries at once."""
        width = self._padded(self.l)
        return self._tilings(self.l, width * (self.moving + self.temporary), width * self.held, False, 4096)

    def resident(self, chunk: int, force: bool) -> list[Tiling]:
        """A row stays, temporaries are of a chunk."""
        lanes = lanes_per_tile(self.l, chunk, self.machine)
        width = pl.cdiv(self.l, lanes) * lanes
        found = self._tilings(lanes, width * self.moving + lanes * self.temporary, width * self.held, False, 16)
        return found or ([Tiling(self.least, lanes, False)] if force else [])

    def streamed(self, chunk: int) -> list[Tiling]:
        """Chunks of a row come and go."""
        lanes = lanes_per_tile(self.l, chunk, self.machine)
        size = lanes * (self.moving + self.temporary)
        again = REREAD // (CORES * self.l * 4)  # rows in flight on all cores, to be found in L2 by the second phase
        return self._tilings(
            lanes, size, lanes * (self.fixed + 2 * self.still), True, max(1, min(8192 // lanes, again))
        )


def lane_bytes(arrays: Sequence[Array], full: int) -> dict[str, int]:
    """`fixed` and `still` of `tiling` for operands as [1|A, 1|M, 1|L], `full` entries being a whole one."""
    rows = [t for t in arrays if t.shape[2] != 1 and t.size != full]
    still = sum(t.dtype.itemsize for t in rows if t.shape[:2] == (1, 1))
    return {"still": still, "fixed": sum(2 * t.dtype.itemsize for t in rows if t.shape[:2] != (1, 1))}


MOST_POOLED = 1024  # rows of a tile of a Triton program
MOST_MOVED = 80  # bytes per element of a pooled tile: four float32 operands and results, twice, and temporaries


def pooled_fits(view: View, machine: Machine) -> bool:
    """Whether a tile can hold some lanes of all rows of a set."""
    _, m, l = view.tile_shape
    if machine.masked:
        return _all_rows(m, machine) <= MOST_POOLED
    return m * (machine.lane_multiple * MOST_MOVED + machine.row_bytes) <= machine.tile_bytes


def _all_rows(m: int, machine: Machine) -> int:
    return pl.next_power_of_2(m) if machine.power_of_two else m
