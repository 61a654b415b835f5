"""A whole step (forward, backward, update) laid out operator by operator, from its jaxpr. All of it is assumed:

- a matrix product or convolution takes max(flops / cube peak, bytes / bandwidth) on the cube cores;
- everything else takes its bytes / bandwidth on the vector cores;
- every operator is a kernel and pays a launch;
- with `fuse`, element-wise operators of one shape that feed one another are one kernel, and a reduction ends one;
- with `formats="nd"`, an operand of a cube operator is first rewritten into the cube's fractal format (read and
  written once) unless a cube operator made it; with "fractal", arrays stay in that format and nothing is rewritten;
- a Pallas kernel is simulated tile by tile.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sim_npu import pallas_adapter as adapter
from sim_npu.chips import ChipSpec, get_chip
from sim_npu.ir import dtype_bytes
from sim_npu.oprules import FREE
from sim_npu.plan import TilePlan
from sim_npu.simulate import shapes_of, simulate_program
from sim_npu.translate import translate

FORMATS = ("nd", "fractal")
FUSING = {
    *(
        "add",
        "sub",
        "mul",
        "div",
        "max",
        "min",
        "neg",
        "abs",
        "sign",
        "exp",
        "log",
        "log1p",
        "expm1",
        "tanh",
        "logistic",
    ),
    *(
        "sqrt",
        "rsqrt",
        "pow",
        "integer_pow",
        "square",
        "erf",
        "sin",
        "cos",
        "select_n",
        "clamp",
        "convert_element_type",
    ),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "is_finite", "floor", "ceil", "round", "add_any"),
    *("rem", "shift_left", "shift_right_logical", "reduce_precision", "nextafter", "exp2", "cbrt", "atan2"),
}
REDUCING = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "reduce_and", "reduce_or"}


@dataclass(frozen=True)
class StepOp:
    """One kernel of a step: what it is, on which unit, how often, µs in all, flops and bytes in all."""

    name: str
    kind: str
    unit: str
    times: int
    us: float
    flops: float
    bytes: float
    where: str


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
        out: dict[str, float] = {}
        for op in self.ops:
            out[op.kind] = out.get(op.kind, 0.0) + op.us
        return dict(sorted(out.items(), key=lambda item: -item[1]))

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
        for kind, us in self.shares().items():
            mine = [op for op in self.ops if op.kind == kind]
            flops, moved = sum(op.flops for op in mine) / 1e9, sum(op.bytes for op in mine) / 1e6
            n = sum(op.times for op in mine)
            lines.append(f"{kind:<20} {us:10.1f} {us / total:6.0%} {n:>8} {flops:10.3f} {moved:10.2f}")
        lines += ["", f"{'largest kernels':<36} {'unit':<7} {'us':>10} {'share':>6} {'times':>6}  where"]
        for op in sorted(self.ops, key=lambda op: -op.us)[:10]:
            lines.append(f"{op.name:<36} {op.unit:<7} {op.us:10.1f} {op.us / total:6.0%} {op.times:>6}  {op.where}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from sim_npu.pictures import step_svg  # the pictures import this class

        return f"<div>{step_svg(self)}<pre>{html.escape(str(self))}</pre></div>"


@dataclass
class _Group:
    """Operators that will be one kernel."""

    names: list[str]
    shape: tuple[int, ...]
    where: str
    times: int
    reads: dict[Any, float] = field(default_factory=dict)
    writes: dict[Any, float] = field(default_factory=dict)
    closed: bool = False


def simulate_step(
    fn: Callable,
    *args: Any,
    chip: str | ChipSpec = "910b2",
    fuse: bool = True,
    formats: str = "nd",
    cache: str = "warm",
    **kwargs: Any,
) -> StepReport:
    """Every operator of `fn(*args)` with its time and share. `fn` is traced, never run.

    Args:
      fn: a JAX function, such as a train step.
      args: arrays, structs or `(shape, dtype)` pairs, nested as `fn` likes.
      chip: preset name or ChipSpec.
      fuse: whether element-wise chains are one kernel.
      formats: "nd" (conversions before cube operators) or "fractal" (none).
      cache: state of L2 for Pallas kernels.

    Raises:
      ValueError: for an unknown format.

    >>> import jax.numpy as jnp
    >>> step = simulate_step(lambda x, w: jnp.tanh(x @ w), ((512, 512), "float16"), ((512, 512), "float16"))
    >>> [op.kind for op in step.ops]
    ['format conversion', 'format conversion', 'matrix product', 'element-wise']
    """
    if formats not in FORMATS:
        raise ValueError(f"`formats` must be one of {FORMATS}; got {formats!r}.")
    spec = get_chip(chip)
    jaxpr = adapter.trace(fn, *shapes_of(args), **kwargs)
    walker = _Walker(spec, fuse, formats, cache)
    walker.walk(jaxpr.jaxpr, 1)
    return StepReport(
        getattr(fn, "__name__", "step"), spec, tuple(walker.finish()), fuse, formats, tuple(dict.fromkeys(walker.notes))
    )


class _Walker:
    def __init__(self, chip: ChipSpec, fuse: bool, formats: str, cache: str) -> None:
        self.chip, self.fuse, self.formats, self.cache = chip, fuse, formats, cache
        self.items: list[StepOp | _Group] = []
        self.groups: dict[Any, _Group] = {}  # value -> the group that makes it
        self.alias: dict[Any, Any] = {}
        self.fractal: set[Any] = set()
        self.notes: list[str] = []
        self.used: dict[Any, set[int]] = {}  # value -> ids of items that read it

    def origin(self, atom: Any) -> Any:
        while not adapter.is_literal(atom) and atom in self.alias:
            atom = self.alias[atom]
        return atom

    def walk(self, jaxpr: Any, times: int) -> None:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if adapter.is_kernel_call(eqn):
                self.kernel(eqn, times)
            elif name == "scan":
                parts = adapter.scan_parts(eqn)
                self.inner(parts.body.jaxpr, eqn, times * parts.length)
            elif name == "cond":
                self.inner(adapter.cond_parts(eqn)[-1].jaxpr, eqn, times, skip=1)
                self.notes.append(f"`cond` at {adapter.source_line(eqn)}: the last branch is laid out")
            elif name == "while":
                self.notes.append(f"`while` at {adapter.source_line(eqn)}: turns unknown, not laid out")
            elif (inner := adapter.inner_jaxpr(eqn)) is not None:
                self.inner(inner.jaxpr, eqn, times)
            elif name in ("dot_general", "conv_general_dilated"):
                self.cube(eqn, times)
            elif name in FREE:
                first = next((a for a in eqn.invars if not adapter.is_literal(a)), None)
                if first is not None and eqn.outvars:
                    self.alias[eqn.outvars[0]] = first
            else:
                self.vector(eqn, times)

    def inner(self, jaxpr: Any, eqn: Any, times: int, skip: int = 0) -> None:
        for var, atom in zip(jaxpr.invars, eqn.invars[skip:]):
            if not adapter.is_literal(atom):
                self.alias[var] = atom
        self.walk(jaxpr, times)
        for var, atom in zip(eqn.outvars, jaxpr.outvars):
            if not adapter.is_literal(atom):
                self.alias[var] = atom

    def bandwidth_us(self, moved: float) -> float:
        return moved / self.chip.chip_gbps / 1e3

    def add(self, op: StepOp, reads: list[Any]) -> None:
        self.items.append(op)
        for atom in reads:
            self.used.setdefault(atom, set()).add(id(op))
            if atom in self.groups:
                self.groups[atom].closed = True

    def kernel(self, eqn: Any, times: int) -> None:
        program = translate(adapter.kernel_call(eqn))
        k = simulate_program(program, self.chip, TilePlan(), self.cache)
        if not k.ub.fits:
            self.notes.append(f"kernel `{program.name}` {k.ub.complaint()}")
        where = adapter.source_line(eqn)
        reads = [self.origin(a) for a in eqn.invars if not adapter.is_literal(a)]
        op = StepOp(
            program.name, "Pallas kernel", "vector", times, times * k.total_us, 0.0, times * k.traffic.total, where
        )
        self.add(op, reads)

    def cube(self, eqn: Any, times: int) -> None:
        out = eqn.outvars[0].aval
        operands = [self.origin(a) for a in eqn.invars if not adapter.is_literal(a)]
        where = adapter.source_line(eqn)
        if self.formats == "nd":
            for atom in dict.fromkeys(operands):
                if atom not in self.fractal:
                    moved = 2.0 * _bytes(atom.aval)
                    us = self.chip.launch_us + self.bandwidth_us(moved)
                    op = StepOp(
                        "nd to fractal", "format conversion", "vector", times, times * us, 0.0, times * moved, where
                    )
                    self.add(op, [atom])
                    self.fractal.add(atom)
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[a] for a in contract)
            kind = "matrix product"
        else:
            kernel = eqn.invars[1].aval.shape
            numbers = eqn.params["dimension_numbers"]
            inner = math.prod(kernel[a] for a in numbers.rhs_spec[1:])
            kind = "convolution"
        flops = 2.0 * math.prod(out.shape) * inner
        moved = sum(_bytes(a.aval) for a in eqn.invars) + _bytes(out)
        peak = self.chip.cube_tflops(eqn.invars[0].aval.dtype.name) * 1e6
        us = self.chip.launch_us + max(flops / peak, self.bandwidth_us(moved))
        shape = "x".join(map(str, out.shape))
        op = StepOp(f"{kind} {shape}", kind, "cube", times, times * us, times * flops, times * moved, where)
        self.add(op, operands)
        self.fractal.add(eqn.outvars[0])

    def vector(self, eqn: Any, times: int) -> None:
        name = eqn.primitive.name
        operands = [self.origin(a) for a in eqn.invars if not adapter.is_literal(a)]
        arrays = [a for a in operands if getattr(a.aval, "shape", None) is not None]
        if not eqn.outvars or not hasattr(eqn.outvars[0].aval, "shape"):
            return
        shape = tuple(max((v.aval.shape for v in (*arrays, *eqn.outvars)), key=math.prod))
        group = self.candidate(name, shape, arrays, times)
        if group is None:
            group = _Group([], shape, adapter.source_line(eqn), times)
            self.items.append(group)
        group.names.append(name)
        for atom in arrays:
            if self.groups.get(atom) is not group:
                group.reads[atom] = _bytes(atom.aval)
            self.used.setdefault(atom, set()).add(id(group))
        for var in eqn.outvars:
            group.writes[var] = _bytes(var.aval)
            self.groups[var] = group
        if name not in FUSING:
            group.closed = True

    def candidate(self, name: str, shape: tuple[int, ...], arrays: list[Any], times: int) -> _Group | None:
        """An open kernel that makes an operand and walks the same shape, with nothing of ours made after it."""
        if not self.fuse or name not in FUSING | REDUCING:
            return None
        makers = [self.groups[a] for a in arrays if a in self.groups]
        for group in reversed(makers):
            position = next(i for i in range(len(self.items) - 1, -1, -1) if self.items[i] is group)
            later = {id(item) for item in self.items[position + 1 :]}
            made_later = any(id(self.groups[a]) in later for a in arrays if a in self.groups)
            if not group.closed and group.shape == shape and group.times == times and not made_later:
                return group
        return None

    def finish(self) -> Iterator[StepOp]:
        for item in self.items:
            if isinstance(item, StepOp):
                yield item
                continue
            # A value nobody outside the kernel reads is never written; one nobody reads at all is a result.
            written = sum(size for v, size in item.writes.items() if self.used.get(v, set()) != {id(item)})
            moved = sum(item.reads.values()) + written
            us = self.chip.launch_us + self.bandwidth_us(moved)
            names = list(dict.fromkeys(item.names))
            kind = "element-wise" if set(names) <= FUSING else "reduction" if set(names) & REDUCING else "data movement"
            label = "+".join(names[:3]) + (f"+{len(names) - 3}" if len(names) > 3 else "")
            yield StepOp(label, kind, "vector", item.times, item.times * us, 0.0, item.times * moved, item.where)


def _bytes(aval: Any) -> float:
    return math.prod(aval.shape) * dtype_bytes(aval.dtype.name) if hasattr(aval, "dtype") else 0.0
