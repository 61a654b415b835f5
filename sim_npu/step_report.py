"""What `sim_npu.simulate_step` found: the kernels of a step, their shares, and two steps side by side."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sim_npu.chips import ChipSpec


@dataclass(frozen=True)
class StepOp:
    """One kernel of a step; times are in all.

    Attributes:
      name: of the Pallas kernel, or what was fused.
      kind, unit: kind of operator; "cube" or "vector".
      times: launches.
      us, flops, bytes: of all launches together.
      where: source line.
      scope: functions under jit and `jax.named_scope` around it, outermost first; `jvp(…)` and `transpose(…)` as
        JAX writes them.
    """

    name: str
    kind: str
    unit: str
    times: int
    us: float
    flops: float
    bytes: float
    where: str
    scope: str = ""


@dataclass(frozen=True)
class StepPart:
    """Some kernels of a step: µs, share of the step's time, launches, flops and bytes of global memory."""

    us: float
    share: float
    launches: int
    flops: float
    bytes: float


@dataclass(frozen=True)
class StepReport:
    """A laid-out step; `str(report)` is a table.

    Attributes:
      name: of the function.
      chip: the chip.
      ops: kernels in program order; those in a loop are counted, not repeated.
      fuse, formats: the rules used.
      notes: what was guessed.
    """

    name: str
    chip: ChipSpec
    ops: tuple[StepOp, ...]
    fuse: bool
    formats: str
    notes: tuple[str, ...] = ()

    @property
    def total_us(self) -> float:
        """Sum of all kernels, one after another."""
        return sum(op.us for op in self.ops)

    def shares(self) -> dict[str, float]:
        """µs per kind of operator, largest first."""
        return {kind: part.us for kind, part in self.kinds().items()}

    def kinds(self) -> dict[str, StepPart]:
        """Time, share, launches, flops and bytes per kind of operator, largest time first."""
        return self.groups(lambda op: op.kind)

    def groups(self, rule: Callable[[StepOp], str]) -> dict[str, StepPart]:
        """The same per name that `rule` gives a kernel, largest time first.

        >>> from sim_npu import simulate_step
        >>> step = simulate_step(lambda x, w: x @ w, ((64, 64), "float16"), ((64, 64), "float16"))
        >>> {unit: part.launches for unit, part in step.groups(lambda op: op.unit).items()}
        {'vector': 2, 'cube': 1}
        """
        found: dict[str, list[StepOp]] = {}
        for op in self.ops:
            found.setdefault(rule(op), []).append(op)
        parts = {name: self._sum(ops) for name, ops in found.items()}
        return dict(sorted(parts.items(), key=lambda item: -item[1].us))

    def part(self, match: str | Callable[[StepOp], bool]) -> StepPart:
        """The kernels that match, together.

        Args:
          match: a regular expression, searched in each kernel's name and scope, or a predicate of the kernel.

        >>> from sim_npu import demos, simulate_step
        >>> fn = lambda x, s, w: demos.rms_norm(x, s) @ w
        >>> step = simulate_step(fn, ((256, 512), "float16"), ((512,), "float16"), ((512, 512), "float16"))
        >>> step.part("norm").launches, 0 < step.part("norm").share < 1
        (1, True)
        """
        if isinstance(match, str):
            pattern = re.compile(match)
            return self._sum(op for op in self.ops if pattern.search(op.name) or pattern.search(op.scope))
        return self._sum(op for op in self.ops if match(op))

    def _sum(self, ops: Iterable[StepOp]) -> StepPart:
        ops = tuple(ops)
        us = sum(op.us for op in ops)
        flops, moved = sum(op.flops for op in ops), sum(op.bytes for op in ops)
        return StepPart(us, us / (self.total_us or 1.0), sum(op.times for op in ops), flops, moved)

    def __str__(self) -> str:
        total = self.total_us or 1.0
        cube = sum(op.us for op in self.ops if op.unit == "cube")
        count = sum(op.times for op in self.ops)
        lines = [
            f"{self.name} on {self.chip.name}: {self.total_us:.1f} us in {count} kernels   (a model; rules assumed)",
            f"fused: {'yes' if self.fuse else 'no'}; formats: {self.formats}; cube {cube / total:.0%}, "
            f"vector {1 - cube / total:.0%}",
            "",
            f"{'kind':<20} {'us':>10} {'share':>6} {'kernels':>8} {'Gflop':>10} {'MB':>10}",
        ]
        for kind, part in self.kinds().items():
            lines.append(
                f"{kind:<20} {part.us:10.1f} {part.share:6.0%} {part.launches:>8} {part.flops / 1e9:10.3f} "
                f"{part.bytes / 1e6:10.2f}"
            )
        lines += ["", f"{'largest kernels':<36} {'unit':<7} {'us':>10} {'share':>6} {'times':>6}  where"]
        for op in sorted(self.ops, key=lambda op: -op.us)[:10]:
            lines.append(f"{op.name:<36} {op.unit:<7} {op.us:10.1f} {op.us / total:6.0%} {op.times:>6}  {op.where}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from sim_npu.pictures import step_svg  # the pictures import this class

        return f"<div>{step_svg(self)}<pre>{html.escape(str(self))}</pre></div>"


@dataclass(frozen=True)
class StepChange:
    """Two layouts of a step, such as with other `formats`; `str(change)` is a table.

    Attributes:
      before, after: the reports.
    """

    before: StepReport
    after: StepReport

    @property
    def us(self) -> float:
        """What `after` takes more than `before`, µs; negative where it saves."""
        return self.after.total_us - self.before.total_us

    @property
    def kinds(self) -> dict[str, float]:
        """The same per kind of operator, in either report; largest change first."""
        before, after = self.before.shares(), self.after.shares()
        changes = {kind: after.get(kind, 0.0) - before.get(kind, 0.0) for kind in {**before, **after}}
        return dict(sorted(changes.items(), key=lambda item: -abs(item[1])))

    def __str__(self) -> str:
        before, after = self.before, self.after
        columns = [f"{'fused' if r.fuse else 'not fused'}, {r.formats}" for r in (before, after)]
        chips = " and ".join(dict.fromkeys((before.chip.name, after.chip.name)))
        lines = [
            f"{after.name} on {chips}   (a model; rules assumed)",
            f"{'kind':<20} {columns[0]:>20} {columns[1]:>20} {'change us':>12}",
        ]
        old, new = before.shares(), after.shares()
        for kind, change in self.kinds.items():
            lines.append(f"{kind:<20} {old.get(kind, 0.0):20.1f} {new.get(kind, 0.0):20.1f} {change:+12.1f}")
        share = f"{self.us / before.total_us:+.1%}" if before.total_us else "none"
        lines.append(f"{'total':<20} {before.total_us:20.1f} {after.total_us:20.1f} {self.us:+12.1f}  ({share})")
        return "\n".join(lines)


def compare_steps(before: StepReport, after: StepReport) -> StepChange:
    """What a change is worth, in all and per kind of operator.

    >>> from sim_npu import simulate_step
    >>> args = ((64, 64), "float16"), ((64, 64), "float16")
    >>> nd, fractal = (simulate_step(lambda x, w: x @ w, *args, formats=f) for f in ("nd", "fractal"))
    >>> change = compare_steps(nd, fractal)
    >>> [kind for kind, us in change.kinds.items() if us < 0]
    ['format conversion']

    Raises:
      ValueError: for something that is no StepReport.
    """
    for name, report in (("before", before), ("after", after)):
        if not isinstance(report, StepReport):
            raise ValueError(f"`{name}` must be a StepReport, as `simulate_step` returns; got {report!r}.")
    return StepChange(before, after)
