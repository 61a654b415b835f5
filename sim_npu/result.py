"""What a simulation found: plain numbers with their units, in data classes that print well."""

from __future__ import annotations

from dataclasses import dataclass

from sim_npu.chips import ChipSpec
from sim_npu.cost import BodyCost
from sim_npu.footprint import UbMap
from sim_npu.ir import TileProgram
from sim_npu.memory import Traffic
from sim_npu.plan import TilePlan
from sim_npu.schedule import Schedule
from sim_npu.timeline import CoreTimeline


@dataclass(frozen=True)
class KernelResult:
    """One kernel on one chip; times in µs, of the core with the most work unless they say otherwise.

    Attributes:
      name, program, plan, ub, schedule, traffic, timeline: what was simulated and the parts' own results.
      launch_us: start of the kernel and of its cores.
      core_us: from the first copy to the last, not below the time the chip needs for the bytes.
      busy_us: per unit (MTE2, V, MTE3).
      vector_us, repeats_us, conflict_us: V without bank conflicts, the part doing repeats, lost to bank conflicts.
      instructions, repeats: of V.
      cube_us: matrix products inside the kernel, all cores.
      vec_head: cycles per vector instruction.
      bodies: cost of each kind of step.
    """

    name: str
    program: TileProgram
    plan: TilePlan
    ub: UbMap
    schedule: Schedule
    traffic: Traffic
    timeline: CoreTimeline
    launch_us: float
    core_us: float
    busy_us: dict[str, float]
    vector_us: float
    repeats_us: float
    conflict_us: float
    instructions: int
    repeats: int
    cube_us: float
    vec_head: float
    bodies: tuple[BodyCost, ...]

    @property
    def total_us(self) -> float:
        """Device time: launch, then cores; a cube product may overlap the rest."""
        return self.launch_us + max(self.core_us, self.cube_us)

    @property
    def bounds_us(self) -> dict[str, float]:
        """Least times by one resource alone: "memory" (bytes at the chip's rate), "vector" (repeats, no heads)."""
        return {"memory": self.traffic.bound_us, "vector": self.repeats_us}

    @property
    def limit(self) -> tuple[str, float]:
        """The larger bound: its name and time."""
        return max(self.bounds_us.items(), key=lambda item: item[1])

    @property
    def bottleneck(self) -> str:
        """The unit that is busy longest."""
        return max(self.busy_us.items(), key=lambda item: item[1])[0]

    @property
    def fraction(self) -> float:
        """Share of the speed of light: the larger bound over the device time."""
        return self.limit[1] / self.total_us

    def ratio(self, unit: str) -> float:
        """Busy share of a unit while the core runs."""
        return min(1.0, self.busy_us[unit] / self.core_us) if self.core_us else 0.0


@dataclass(frozen=True)
class SimReport:
    """The kernels of one call, in order; `str(report)` is a table, a notebook shows it as HTML.

    Attributes:
      name: of the function.
      chip, plan, profile, cache: what was asked.
      kernels: results in order.
      total_us: device time of all kernels, µs, under the profile.
    """

    name: str
    chip: ChipSpec
    plan: TilePlan
    profile: str
    cache: str
    kernels: tuple[KernelResult, ...]
    total_us: float

    @property
    def bytes(self) -> int:
        """Global memory traffic, all kernels and cores."""
        return sum(k.traffic.total for k in self.kernels)

    @property
    def unknown(self) -> tuple[tuple[str, str], ...]:
        """(operation, source line) priced with the default cost."""
        return tuple(dict.fromkeys(u for k in self.kernels for u in k.program.unknown()))

    def __str__(self) -> str:
        from sim_npu.report import text_report  # the report imports these classes

        return text_report(self)

    def _repr_html_(self) -> str:
        from sim_npu.html import html_report

        return html_report(self)
