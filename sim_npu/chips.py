"""Chips: sizes, rates and overheads of an AI Core, each with its source and how far it can be trusted.

A `ChipSpec` is a plain frozen dataclass, so a chip that does not exist is one call away:

>>> wide = get_chip("910b2").replace(name="910b2 with a 1 MiB UB", ub_bytes=1 << 20)
>>> wide.ub_bytes, wide.cores
(1048576, 48)

Confidence of a constant is `documented` (vendor file or manual), `fitted` (to public measurements, in
`sim_npu.calibration`) or `assumed` (by us, to be replaced when somebody measures it).
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass, field

INI = "CANN 8.1.RC1 platform configuration files"
MANUAL = "AscendC programming manual (asc-devkit)"
A2_ADD = "AscendC manual, A2 add sample with six variants"
B4_TRACE = "AscendC manual, 910B4 profiler samples"
OPS_NN = "public ops-nn device times, odd cases"
GE = "cost model of the graph engine's fusion for 950 (hicann/ge, perf_param_v2: LoadStride, StoreStride)"


@dataclass(frozen=True)
class Provenance:
    """Where a constant comes from: confidence (`documented`, `fitted`, `assumed`) and source."""

    confidence: str
    source: str


def _rates(**changes: float) -> dict[str, float]:
    base = {
        "arith": 1.0,
        "transcendental": 2.0,
        "cast": 1.0,
        "compare": 1.0,
        "select": 1.0,
        "move": 1.0,
        "fill": 1.0,
        "single": 1.0,
        "reduce": 7.0,
        "transpose": 4.0,
        "gather": 16.0,
        "unknown": 4.0,
    }
    return base | changes


_COUNTS = (
    *("cores", "cube_cores", "ub_bytes", "l2_bytes", "hbm_bytes", "ub_bank_groups", "ub_banks_per_group"),
    *("ub_bank_bytes", "repeat_bytes", "max_repeats", "max_queue_depth", "event_ids"),
)
_OPTIONAL = ("l2_read_bytes_per_cycle", "l2_write_bytes_per_cycle", "l2_read_gbps")
_RATES = (
    *("clock_mhz", "chip_gbps", "l2_gbps", "mte2_bytes_per_cycle", "mte3_bytes_per_cycle", *_OPTIONAL),
    *("vector_issue", "atomic_factor", "cube_flops_per_cycle"),
)
_OVERHEADS = (
    *("vec_head", "vec_head_first", "mte2_head", "mte3_head", "burst_cycles", "gap_read_cycles", "gap_write_cycles"),
    *("launch_us", "setup_us", "core_start_us", "scalar_step", "loop_cycles", "sync_us"),
)


def _is_rate(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and float(value) > 0


def _is_overhead(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf


@dataclass(frozen=True)
class ChipSpec:
    """One chip. Rates are per core unless they say chip; cycles are at `clock_mhz`.

    Attributes:
      name: preset name or your own.
      cores, cube_cores: vector and cube cores.
      clock_mhz: MHz.
      ub_bytes: usable unified buffer, bytes.
      ub_bank_groups, ub_banks_per_group, ub_bank_bytes: organisation of the UB: group (address >> 5) % groups, bank
        address // (groups * bank bytes) of that group.
      repeat_bytes, max_repeats: bytes of one repeat and repeats per instruction.
      cycles_per_repeat: cost classes, cycles per 256 B repeat of float32 (64 elements).
      vec_head, vec_head_first: cycles per vector instruction; the first after a wait.
      mte2_head, mte3_head: cycles per copy instruction.
      burst_cycles: extra cycles per contiguous piece of a strided copy.
      gap_read_cycles, gap_write_cycles: more of them per byte of the gap between two pieces, up to 4 KiB.
      mte2_bytes_per_cycle, mte3_bytes_per_cycle: rate of one core alone, to and from HBM.
      l2_read_bytes_per_cycle, l2_write_bytes_per_cycle: the same for bytes that hit L2; None: as HBM.
      chip_gbps: all reads and writes that miss L2, GB/s.
      l2_gbps: all reads and writes that hit L2, GB/s.
      l2_read_gbps: all reads from L2 at most, GB/s; None: their share of `l2_gbps` alone limits them.
      l2_bytes: capacity.
      hbm_bytes: capacity.
      launch_us: until the first core starts, µs.
      setup_us: scalar work of a core before its first copy, µs.
      core_start_us: added when all cores start, in proportion to the cores used, µs.
      scalar_step: scalar cycles to prepare a step, hidden behind copies.
      loop_cycles: scalar cycles per turn of a loop in the body.
      sync_us: one synchronisation of all cores, µs.
      atomic_factor: an atomic add's share of a plain write's rate.
      vector_issue: repeats started per cycle.
      vector_registers: values between operations stay in registers, so that operands do not meet in a bank.
      max_queue_depth: buffers per queue position.
      event_ids: events per pair of pipes.
      has_datacopypad, has_syncall, has_bf16_arith, tree_reduce: abilities.
      cube_flops_per_cycle: flops per cycle and cube core for fp16; a quarter for fp32, double for int8.
      sources: provenance per field, over the defaults in `PROVENANCE`.

    Raises:
      ValueError: for a count that is no positive whole number, a rate that is not positive, a negative overhead, or
        cost classes that are missing or unknown.
    """

    name: str
    cores: int
    cube_cores: int
    clock_mhz: float
    ub_bytes: int
    l2_bytes: int
    hbm_bytes: int
    chip_gbps: float
    l2_gbps: float
    ub_bank_groups: int = 16
    ub_banks_per_group: int = 3
    ub_bank_bytes: int = 4096
    repeat_bytes: int = 256
    max_repeats: int = 255
    cycles_per_repeat: dict[str, float] = field(default_factory=_rates, hash=False)
    vec_head: float = 22.0
    vec_head_first: float = 22.0
    mte2_head: float = 113.0
    mte3_head: float = 0.0
    burst_cycles: float = 2.0
    gap_read_cycles: float = 0.0
    gap_write_cycles: float = 0.0
    mte2_bytes_per_cycle: float = 34.6
    mte3_bytes_per_cycle: float = 27.5
    l2_read_bytes_per_cycle: float | None = None
    l2_write_bytes_per_cycle: float | None = None
    l2_read_gbps: float | None = None
    launch_us: float = 0.55
    setup_us: float = 1.7
    core_start_us: float = 0.75
    scalar_step: float = 40.0
    loop_cycles: float = 8.0
    sync_us: float = 3.0
    atomic_factor: float = 0.5
    vector_issue: float = 1.0
    vector_registers: bool = False
    max_queue_depth: int = 8
    event_ids: int = 8
    has_datacopypad: bool = True
    has_syncall: bool = True
    has_bf16_arith: bool = False
    tree_reduce: bool = False
    cube_flops_per_cycle: float = 8192.0
    sources: dict[str, Provenance] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` of a ChipSpec must be a positive whole number; got {value!r}.")
        for names, least, kind in ((_RATES, "more than 0", _is_rate), (_OVERHEADS, "0 or more", _is_overhead)):
            for name in names:
                value = getattr(self, name)
                if not kind(value) and not (value is None and name in _OPTIONAL):
                    raise ValueError(f"`{name}` of a ChipSpec must be a number, {least}; got {value!r}.")
        if set(self.cycles_per_repeat) != set(_rates()) or not all(map(_is_rate, self.cycles_per_repeat.values())):
            raise ValueError(
                f"`cycles_per_repeat` of a ChipSpec must hold a number, more than 0, for each of "
                f"{', '.join(_rates())}; got {self.cycles_per_repeat!r}."
            )

    def replace(self, **changes: object) -> ChipSpec:
        """A chip with some fields changed; their provenance becomes `assumed`, source "user"."""
        unknown = set(changes) - {f.name for f in dataclasses.fields(self)}
        if unknown:
            known = ", ".join(f.name for f in dataclasses.fields(self))
            raise ValueError(f"`{sorted(unknown)[0]}` is not a field of ChipSpec; the fields are {known}.")
        marks = {name: Provenance("assumed", "user") for name in changes if name not in ("name", "sources")}
        return dataclasses.replace(self, **{"sources": self.sources | marks, **changes})  # type: ignore[arg-type]

    def provenance(self, name: str) -> Provenance:
        """Where the field `name` comes from."""
        return self.sources.get(name) or PROVENANCE.get(name) or Provenance("assumed", "this package")

    def us(self, cycles: float) -> float:
        """Microseconds of `cycles`."""
        return cycles / self.clock_mhz

    def cube_tflops(self, dtype: str = "float16") -> float:
        """Peak of the cube cores, Tflop/s."""
        factor = {"float32": 0.25, "int8": 2.0, "uint8": 2.0}.get(dtype, 2.0 if dtype.startswith("float8") else 1.0)
        return self.cube_cores * self.clock_mhz * self.cube_flops_per_cycle * factor / 1e6


PROVENANCE = {
    **dict.fromkeys(("cores", "cube_cores", "clock_mhz", "l2_bytes", "hbm_bytes"), Provenance("documented", INI)),
    **dict.fromkeys(
        ("ub_bank_groups", "ub_banks_per_group", "ub_bank_bytes", "repeat_bytes"), Provenance("documented", INI)
    ),
    **dict.fromkeys(("ub_bytes", "max_repeats", "max_queue_depth", "event_ids"), Provenance("documented", MANUAL)),
    **dict.fromkeys(
        ("vector_issue", "vector_registers"), Provenance("documented", "asc-devkit examples: 950 vector functions")
    ),
    **dict.fromkeys(("has_datacopypad", "has_syncall", "has_bf16_arith"), Provenance("documented", MANUAL)),
    "cycles_per_repeat": Provenance(
        "documented",
        f"{MANUAL}; single: asc-devkit, table of single and dual issue; move, transpose, gather, unknown assumed",
    ),
    "vec_head": Provenance("fitted", f"{A2_ADD}; {B4_TRACE}"),
    "vec_head_first": Provenance("fitted", B4_TRACE),
    "mte2_head": Provenance("fitted", A2_ADD),
    "mte3_head": Provenance("fitted", A2_ADD),
    "mte2_bytes_per_cycle": Provenance("fitted", A2_ADD),
    "mte3_bytes_per_cycle": Provenance("fitted", A2_ADD),
    "l2_read_bytes_per_cycle": Provenance("fitted", OPS_NN),
    "l2_write_bytes_per_cycle": Provenance("fitted", OPS_NN),
    "l2_read_gbps": Provenance("fitted", OPS_NN),
    "chip_gbps": Provenance("fitted", A2_ADD),
    "l2_gbps": Provenance("assumed", "cores x clock x rate of one core"),
    "launch_us": Provenance("fitted", B4_TRACE),
    "setup_us": Provenance("fitted", B4_TRACE),
    "core_start_us": Provenance("fitted", A2_ADD),
    "cube_flops_per_cycle": Provenance("documented", "16 x 16 x 16 multiply-adds per cycle, MANUAL"),
}

MIB, GIB = 1 << 20, 1 << 30


def _a2(name: str, cores: int, clock: float, **changes: object) -> ChipSpec:
    base: dict[str, object] = {
        "name": name,
        "cores": cores,
        "cube_cores": cores // 2,
        "clock_mhz": clock,
        "ub_bytes": 196352,
        "l2_bytes": 192 * MIB,
        "hbm_bytes": 64 * GIB,
        "chip_gbps": 32e-3 * cores * clock,  # the configuration file's 32 B per cycle and core
        "l2_gbps": 64e-3 * cores * clock,
        "l2_read_bytes_per_cycle": 50.0,
        "l2_write_bytes_per_cycle": 40.0,
    }
    return ChipSpec(**(base | changes))  # type: ignore[arg-type]


_INI_RATE = {"chip_gbps": Provenance("documented", f"{INI}: rate per core and cycle x cores x clock")}

_B4_PIPES = {
    "vec_head": 19.0,
    "vec_head_first": 36.0,
    "mte2_head": 190.0,
    "mte3_head": 220.0,
    "mte2_bytes_per_cycle": 65.0,
    "mte3_bytes_per_cycle": 95.0,
    "l2_read_bytes_per_cycle": None,
    "l2_write_bytes_per_cycle": None,
    "launch_us": 0.55,
    "setup_us": 1.7,
}
_B2_SOURCES = {
    "chip_gbps": Provenance("fitted", f"{A2_ADD}, scaled by clock"),
    "core_start_us": Provenance("fitted", OPS_NN),
}
_B4_SOURCES = dict.fromkeys((*_B4_PIPES, "chip_gbps"), Provenance("fitted", B4_TRACE))
_950_SOURCES = {
    **dict.fromkeys(
        ("l2_gbps", "l2_read_gbps", "vec_head", "mte2_bytes_per_cycle", "mte3_bytes_per_cycle"),
        Provenance("fitted", OPS_NN),
    ),
    **dict.fromkeys(("gap_read_cycles", "gap_write_cycles"), Provenance("documented", GE)),
}

CHIPS: dict[str, ChipSpec] = {
    c.name: c
    for c in (
        _a2("910b1", 48, 1850.0, chip_gbps=1640.0, core_start_us=10.0),
        _a2("910b2", 48, 1800.0, chip_gbps=1600.0, core_start_us=2.0, sources=_B2_SOURCES),
        _a2("910b3", 40, 1800.0, sources=_INI_RATE),
        _a2(
            "910b4",
            40,
            1650.0,
            l2_bytes=96 * MIB,
            hbm_bytes=32 * GIB,
            chip_gbps=850.0,
            **_B4_PIPES,
            sources=_B4_SOURCES,
        ),
        _a2("910_93", 48, 1850.0, sources=_INI_RATE),
        ChipSpec(
            name="310p",
            cores=15,
            cube_cores=8,
            clock_mhz=1060.0,
            ub_bytes=262144,
            l2_bytes=16 * MIB,
            hbm_bytes=24_000_000_000,
            chip_gbps=140.0,
            l2_gbps=1800.0,
            ub_banks_per_group=4,
            has_datacopypad=False,
            has_syncall=False,
            tree_reduce=True,
            sources=_INI_RATE,
        ),
        ChipSpec(
            name="950",
            cores=64,
            cube_cores=32,
            clock_mhz=1650.0,
            ub_bytes=253952,
            l2_bytes=128 * MIB,
            hbm_bytes=128 * GIB,
            chip_gbps=1640.0,
            l2_gbps=2770.0,
            l2_read_gbps=1540.0,
            vec_head=2.0,
            mte2_bytes_per_cycle=60.0,
            mte3_bytes_per_cycle=88.0,
            gap_read_cycles=0.005,
            gap_write_cycles=0.0385,
            ub_bank_groups=8,
            ub_banks_per_group=2,
            ub_bank_bytes=16384,
            max_repeats=1 << 30,  # loops in registers instead of counted repeats
            vector_issue=2.0,
            vector_registers=True,
            has_bf16_arith=True,
            tree_reduce=True,
            sources=_INI_RATE | _950_SOURCES,
        ),
        ChipSpec(
            name="generic",
            cores=32,
            cube_cores=16,
            clock_mhz=1500.0,
            ub_bytes=192 * 1024,
            l2_bytes=64 * MIB,
            hbm_bytes=32 * GIB,
            chip_gbps=1000.0,
            l2_gbps=3000.0,
            sources={
                n: Provenance("assumed", "round numbers") for n in ("cores", "clock_mhz", "chip_gbps", "ub_bytes")
            },
        ),
    )
}
_ALIASES = {"910b": "910b2", "a2": "910b2", "a3": "910_93", "910_9391": "910_93", "950pr": "950", "310p3": "310p"}


def get_chip(chip: str | ChipSpec) -> ChipSpec:
    """The preset of that name, or the spec itself.

    >>> get_chip("910B4").cores
    40

    Raises:
      ValueError: for a name that is no preset.
    """
    if isinstance(chip, ChipSpec):
        return chip
    name = chip.lower() if isinstance(chip, str) else ""
    name = _ALIASES.get(name, name)
    if name not in CHIPS:
        raise ValueError(f"`chip` must be one of {', '.join(CHIPS)} or a ChipSpec; got {chip!r}.")
    return CHIPS[name]
