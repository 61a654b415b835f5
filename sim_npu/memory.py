"""Global memory: which bytes hit L2, how fast all cores together move them, and how cores share that rate.

The working set W is every array's bytes once. A set that fits L2 is read from it when `cache="warm"` (the kernel
ran before on the same arrays) and written back later, outside the kernel. Beyond L2 the share that hits falls
linearly to nothing at W = 2 L2 (a random-replacement cache; assumed). First reads of a cold cache come from HBM.
Re-reads (a second pass over a row, a parameter read by every core) hit L2 if what all cores touch in between fits.

    chip rate = min(L2 rate, HBM rate / share of bytes that miss)
    its own rate = 1 / (share that misses / HBM rate of a core + share that hits / L2 rate of a core)
    read rate of a core = min(its own, chip rate * reads / (reads + writes) / (cores * duty^1/2),
                              L2 read rate / share of reads that hit / (cores * duty^1/2))
    write rate of a core = min(its own, chip rate / (cores * duty^1/2))

`duty` is the share of time that copy unit is busy: cores that rarely copy seldom meet. The exponent lies between cores
in lockstep (0) and cores at random phases (1); it is fitted to the A2 add and 910B4 samples together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sim_npu.chips import ChipSpec
from sim_npu.ir import TileProgram, dtype_bytes
from sim_npu.schedule import Schedule

CACHES = ("warm", "cold", "bypass")
DUTY_EXPONENT = 0.5
GAP_LIMIT = 4096  # bytes between two pieces of a copy beyond which a larger gap costs no more


@dataclass(frozen=True)
class Traffic:
    """Bytes of one kernel on all cores.

    Attributes:
      reads, writes: between global memory and unified buffers.
      unique_reads, unique_writes: every array element once.
      hbm_reads, hbm_writes: part that misses L2.
      chip_gbps: rate of all cores together, GB/s.
      read_gbps: rate of all their reads together, GB/s, where L2 limits them by themselves.
    """

    reads: int
    writes: int
    unique_reads: int
    unique_writes: int
    hbm_reads: float
    hbm_writes: float
    chip_gbps: float
    read_gbps: float = math.inf

    @property
    def total(self) -> int:
        """Reads and writes."""
        return self.reads + self.writes

    @property
    def l2_hit(self) -> float:
        """Share of the traffic that stays in L2."""
        return 1.0 - (self.hbm_reads + self.hbm_writes) / self.total if self.total else 1.0

    @property
    def bound_us(self) -> float:
        """Time in which the chip can move all of it, µs."""
        return max(self.total / self.chip_gbps, self.reads / self.read_gbps) / 1e3


def traffic(program: TileProgram, sched: Schedule, chip: ChipSpec, cache: str) -> Traffic:
    """Where the bytes of a scheduled program come from and go to.

    Raises:
      ValueError: if `cache` is not "warm", "cold" or "bypass" (inputs do not enter L2).
    """
    unique = {"in": 0, "out": 0}
    for block in program.blocks:
        unique[block.role] += math.ceil(math.prod(block.array_shape) * dtype_bytes(block.dtype))
    unique_in, unique_out = min(unique["in"], sched.bytes_in), min(unique["out"], sched.bytes_out)
    between = sched.core_bytes_in * sched.cores / max(1, len(sched.codes))  # all cores, one parallel position
    return split_traffic(sched.bytes_in, sched.bytes_out, unique_in, unique_out, between, chip, cache)


def split_traffic(
    reads: int, writes: int, unique_in: int, unique_out: int, between: float, chip: ChipSpec, cache: str
) -> Traffic:
    """`traffic` from byte counts: `between` is what all cores touch between two reads of the same bytes."""
    if cache not in CACHES:
        raise ValueError(f"`cache` must be one of {CACHES}; got {cache!r}.")
    working_set = unique_out if cache == "bypass" else unique_in + unique_out
    hit = min(1.0, max(0.0, 2.0 - working_set / chip.l2_bytes))
    first = unique_in * (1.0 - hit if cache == "warm" else 1.0)
    again = (reads - unique_in) * (0.0 if between <= chip.l2_bytes and cache != "bypass" else 1.0 - hit)
    hbm_reads, hbm_writes = first + again, writes * (1.0 - hit)
    share = (hbm_reads + hbm_writes) / max(1, reads + writes)
    rate = min(chip.l2_gbps, chip.chip_gbps / share if share > 0 else chip.l2_gbps)
    hits = 1.0 - hbm_reads / max(1, reads)
    reading = chip.l2_read_gbps / hits if chip.l2_read_gbps and hits > 0 else math.inf
    return Traffic(reads, writes, unique_in, unique_out, hbm_reads, hbm_writes, rate, reading)


def core_rates(t: Traffic, cores: int, duty: tuple[float, float], chip: ChipSpec) -> tuple[float, float]:
    """(read, write) bytes per cycle of one of `cores` equal cores whose copy units are busy `duty` of the time."""
    chip_rate = t.chip_gbps * 1e3 / chip.clock_mhz  # bytes per cycle
    reading, writing = (max(1.0, cores * max(min(d, 1.0), 1e-3) ** DUTY_EXPONENT) for d in duty)
    read_share = t.reads / t.total if t.total else 1.0
    own_read = _mixed(t.reads, t.hbm_reads, chip.mte2_bytes_per_cycle, chip.l2_read_bytes_per_cycle)
    own_write = _mixed(t.writes, t.hbm_writes, chip.mte3_bytes_per_cycle, chip.l2_write_bytes_per_cycle)
    all_reads = min(chip_rate * read_share, t.read_gbps * 1e3 / chip.clock_mhz)
    return min(own_read, all_reads / reading), min(own_write, chip_rate / writing)


def _mixed(moved: float, missed: float, hbm: float, l2: float | None) -> float:
    """Rate of a core of which `missed` of `moved` bytes go at the HBM rate, the rest at the L2 rate."""
    miss = missed / moved if moved else 1.0
    return hbm if l2 is None else 1.0 / (miss / hbm + (1.0 - miss) / l2)


def copy_cycles(bursts: int, size: int, head: float, rate: float, chip: ChipSpec, gap_cycles: float = 0.0) -> float:
    """Cycles of one copy instruction of `bursts` pieces, `size` bytes in all: each piece rounds up to 32 B.

    `gap_cycles` is what the gap between two pieces in global memory costs (`gap_cost`).
    """
    if size <= 0:
        return 0.0
    bursts = max(1, bursts)
    piece = -(-size // bursts)
    return head + (bursts - 1) * (chip.burst_cycles + gap_cycles) + bursts * (-(-piece // 32) * 32) / rate


def gap_cost(gap: int, per_byte: float) -> float:
    """Cycles per piece of a strided copy: the gap's bytes, at most `GAP_LIMIT` of them, at `per_byte`.

    >>> gap_cost(1000, 0.01), gap_cost(1 << 20, 0.01)
    (10.0, 40.96)
    """
    return per_byte * min(gap, GAP_LIMIT)
