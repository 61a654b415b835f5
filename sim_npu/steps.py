"""A whole step (forward, backward, update) laid out operator by operator, from its jaxpr. All of it is assumed:

- a matrix product or convolution takes max(flops / cube peak, bytes / bandwidth) on the cube cores;
- everything else takes its bytes / bandwidth on the vector cores;
- every operator is a kernel and pays a launch;
- with `fuse`, element-wise operators of one shape that feed one another are one kernel, and a reduction ends one;
- with `formats="nd"`, an operand of a cube operator is first rewritten into the cube's fractal format (read and
  written once) unless a cube operator made it; with "fractal", arrays stay in that format and nothing is rewritten;
- a Pallas kernel is simulated tile by tile;
- what no result needs is not laid out, as a compiler would not run it.

Calls are walked through (jit, custom derivatives, remat, custom partitioning), a scan counts its turns, of a branch
the dearest side counts, and of `shard_map` what one device runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sim_npu import pallas_adapter as adapter
from sim_npu.arguments import check_call, plan_for, shapes_of
from sim_npu.chips import ChipSpec, get_chip
from sim_npu.ir import TileProgram, dtype_bytes
from sim_npu.memory import CACHES
from sim_npu.oprules import FREE
from sim_npu.plan import TilePlan
from sim_npu.result import KernelResult
from sim_npu.simulate import simulate_program
from sim_npu.step_report import StepOp, StepReport
from sim_npu.translate import translate

FORMATS = ("nd", "fractal")
Chooser = Callable[[str, TileProgram], TilePlan]
# fmt: off
FUSING = {
    "add", "sub", "mul", "div", "max", "min", "neg", "abs", "sign", "exp", "log", "log1p", "expm1", "tanh",
    "logistic", "sqrt", "rsqrt", "pow", "integer_pow", "square", "erf", "sin", "cos", "select_n", "clamp",
    "convert_element_type", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "is_finite",
    "floor", "ceil", "round", "add_any", "rem", "shift_left", "shift_right_logical", "reduce_precision",
    "nextafter", "exp2", "cbrt", "atan2",
}
REDUCING = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "reduce_and", "reduce_or"}
COLLECTIVE = {
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant",
    "reduce_scatter", "all_to_all", "ppermute", "pbroadcast", "reshard",
}
# fmt: on
_UNMOVED = FREE | {"axis_index", "pcast", "create_token", "mesh_cast", "sharding_constraint"}


BRANCHES: dict[str, Callable] = {"dearest": max, "cheapest": min}


def simulate_step(
    fn: Callable,
    *args: Any,
    chip: str | ChipSpec = "910b2",
    plan: TilePlan | Chooser | None = None,
    fuse: bool = True,
    formats: str = "nd",
    cache: str = "warm",
    branches: str = "dearest",
    **kwargs: Any,
) -> StepReport:
    """Every operator of `fn(*args)` with its time and share. `fn` is traced, never run.

    Args:
      fn: a JAX function, such as a train step.
      args: arrays, structs or `(shape, dtype)` pairs, nested as `fn` likes.
      chip: preset name or ChipSpec.
      plan: for Pallas kernels: a TilePlan, or a function of a kernel's name and TileProgram that gives one. A kernel is
        already tiled when it is seen: only queue depth, cores, in-place and bank padding of a plan count.
      fuse: whether element-wise chains are one kernel.
      formats: "nd" (conversions before cube operators) or "fractal" (none).
      cache: state of L2 for Pallas kernels.
      branches: which branch of a `cond` is laid out: the "dearest", or the "cheapest" where the other is an
        exception.

    Raises:
      TypeError: for arguments that `fn` does not take.
      ValueError: for an unknown format, cache or choice of branches, or a plan deeper than the chip's queues.

    >>> import jax.numpy as jnp
    >>> step = simulate_step(lambda x, w: jnp.tanh(x @ w), ((512, 512), "float16"), ((512, 512), "float16"))
    >>> [op.kind for op in step.ops]
    ['format conversion', 'format conversion', 'matrix product', 'element-wise']
    """
    if formats not in FORMATS:
        raise ValueError(f"`formats` must be one of {FORMATS}; got {formats!r}.")
    if plan is not None and not isinstance(plan, TilePlan) and not callable(plan):
        raise ValueError(f"`plan` must be a TilePlan, a function (name, program) -> TilePlan, or None; got {plan!r}.")
    if branches not in BRANCHES:
        raise ValueError(f"`branches` must be one of {tuple(BRANCHES)}; got {branches!r}.")
    if cache not in CACHES:
        raise ValueError(f"`cache` must be one of {CACHES}; got {cache!r}.")
    if not isinstance(fuse, bool):
        raise ValueError(f"`fuse` must be True or False; got {fuse!r}.")
    spec, shaped = get_chip(chip), shapes_of(args)
    if isinstance(plan, TilePlan):
        plan_for(plan, spec)
    check_call(fn, shaped, kwargs)
    jaxpr = adapter.trace(fn, *shaped, **kwargs).jaxpr
    walker = _Walker(spec, plan, fuse, formats, cache, branches)
    walker.walk(jaxpr, {}, _Place(1, ""), [True] * len(jaxpr.outvars))
    ops, notes = tuple(walker.finish()), tuple(dict.fromkeys(walker.notes))
    return StepReport(getattr(fn, "__name__", "step"), spec, ops, fuse, formats, notes)


@dataclass(eq=False)
class _Array:
    """A value in global memory: its bytes, the kernel that makes it, the kernels that read it."""

    size: float
    maker: StepOp | _Group | None = None
    readers: set[int] = field(default_factory=set)
    fractal: bool = False


@dataclass(frozen=True)
class _View:
    """What reading a value takes: the array it lies in, and the bytes of it (fewer for a slice or a broadcast)."""

    array: _Array
    size: float


@dataclass(frozen=True)
class _Place:
    """Where the walk is: how often the body runs, and the scopes around it."""

    times: int
    scope: str

    def inside(self, eqn: Any, turns: int = 1) -> _Place:
        return _Place(self.times * turns, "/".join(p for p in (self.scope, adapter.scope(eqn)) if p))


@dataclass(eq=False)
class _Group:
    """Operators that will be one kernel."""

    names: list[str]
    shape: tuple[int, ...]
    where: str
    place: _Place
    reads: dict[_Array, float] = field(default_factory=dict)
    writes: list[_Array] = field(default_factory=list)
    closed: bool = False


Env = dict[Any, _View]


class _Walker:
    def __init__(
        self, chip: ChipSpec, plan: TilePlan | Chooser | None, fuse: bool, formats: str, cache: str, branches: str
    ) -> None:
        self.chip, self.plan, self.fuse, self.formats, self.cache = chip, plan, fuse, formats, cache
        self.branches = branches
        self.items: list[StepOp | _Group] = []
        self.order: dict[int, int] = {}  # id of an item -> its position
        self.notes: list[str] = []
        self.simulated: dict[tuple[TileProgram, TilePlan], KernelResult] = {}

    # -- walking -------------------------------------------------------------------------------------------------

    def walk(self, jaxpr: Any, env: Env, place: _Place, wanted: Sequence[bool]) -> None:
        for eqn, used in _live(jaxpr, wanted):
            name = eqn.primitive.name
            if adapter.is_kernel_call(eqn):
                self.kernel(eqn, env, place)
            elif name == "scan":
                self.scan(eqn, env, place, used)
            elif name == "cond":
                self.cond(eqn, env, place, used)
            elif name == "while":
                _, skip, body, consts = adapter.while_parts(eqn)
                operands = [*eqn.invars[skip : skip + consts], *eqn.invars[skip + consts :]]
                self.notes.append(f"`while` at {adapter.source_line(eqn)}: turns unknown, one is laid out")
                self.inner(body.jaxpr, operands, eqn, env, place.inside(eqn), [True] * len(eqn.outvars))
            elif name == "shard_map":
                self.notes.append(f"`shard_map` at {adapter.source_line(eqn)}: what one device runs is laid out")
                self.inner(adapter.device_jaxpr(eqn).jaxpr, eqn.invars, eqn, env, place.inside(eqn), used)
            elif (inner := adapter.inner_jaxpr(eqn)) is not None:
                self.inner(inner.jaxpr, eqn.invars, eqn, env, place.inside(eqn), used)
            elif name in ("dot_general", "conv_general_dilated"):
                self.cube(eqn, env, place)
            elif name in _UNMOVED:
                self.unmoved(eqn, env)
            else:
                self.vector(eqn, env, place)

    def view(self, env: Env, atom: Any) -> _View | None:
        """What reading an operand takes; None for a constant in the equation, or what is not an array."""
        if adapter.is_literal(atom) or not hasattr(atom.aval, "shape"):
            return None
        if atom not in env:
            size = _bytes(atom.aval)
            env[atom] = _View(_Array(size), size)
        return env[atom]

    def views(self, env: Env, atoms: Sequence[Any]) -> list[_View]:
        return [v for v in (self.view(env, a) for a in atoms) if v is not None]

    def inner(
        self, jaxpr: Any, operands: Sequence[Any], eqn: Any, env: Env, place: _Place, wanted: Sequence[bool]
    ) -> None:
        """Walk a body on its operands; one of another shape inside (a turn's or device's part) is a value by itself."""
        local: Env = {}
        for var, atom in zip(jaxpr.invars, operands):
            outer = self.view(env, atom)
            if outer is not None and _same(var.aval, atom.aval):
                local[var] = outer
            elif outer is not None:
                outer.array.readers.add(id(eqn))
        self.walk(jaxpr, local, place, wanted)
        for var, atom in zip(eqn.outvars, jaxpr.outvars):
            result = self.view(local, atom)
            if result is not None and _same(var.aval, atom.aval):
                env[var] = result
            elif result is not None:
                result.array.readers.add(id(eqn))

    def scan(self, eqn: Any, env: Env, place: _Place, used: Sequence[bool]) -> None:
        parts = adapter.scan_parts(eqn)
        wanted = [True] * parts.num_carry + list(used[parts.num_carry :])
        self.inner(parts.body.jaxpr, eqn.invars, eqn, env, place.inside(eqn, parts.length), wanted)

    def cond(self, eqn: Any, env: Env, place: _Place, used: Sequence[bool]) -> None:
        """The branch that takes longest, or least, by itself."""
        branches = [b.jaxpr for b in adapter.cond_parts(eqn)]
        where = place.inside(eqn)

        def alone(jaxpr: Any) -> float:
            other = _Walker(self.chip, self.plan, self.fuse, self.formats, self.cache, self.branches)
            other.walk(jaxpr, {}, where, used)
            return sum(op.us for op in other.finish())

        chosen = BRANCHES[self.branches](branches, key=alone)
        self.inner(chosen, eqn.invars[1:], eqn, env, where, used)
        line = adapter.source_line(eqn)
        self.notes.append(f"`cond` at {line}: the {self.branches} of {len(branches)} branches is laid out")

    # -- operators -----------------------------------------------------------------------------------------------

    def bandwidth_us(self, moved: float) -> float:
        return moved / self.chip.chip_gbps / 1e3

    def add(self, item: StepOp | _Group, views: Sequence[_View]) -> None:
        self.order[id(item)] = len(self.items)
        self.items.append(item)
        for view in views:
            view.array.readers.add(id(item))
            if isinstance(view.array.maker, _Group) and isinstance(item, StepOp):
                view.array.maker.closed = True

    def make(self, env: Env, eqn: Any, maker: StepOp | _Group, *, fractal: bool = False) -> list[_Array]:
        arrays = []
        for var in eqn.outvars:
            size = _bytes(var.aval)
            arrays.append(_Array(size, maker, fractal=fractal))
            env[var] = _View(arrays[-1], size)
        return arrays

    def unmoved(self, eqn: Any, env: Env) -> None:
        """A reshape, slice or broadcast: reading it reads part of its operand; an iota or index takes no bytes."""
        source = next(iter(self.views(env, eqn.invars)), None)
        for var in eqn.outvars:
            if hasattr(var.aval, "shape"):
                empty = _View(_Array(0.0), 0.0)
                env[var] = empty if source is None else _View(source.array, min(source.size, _bytes(var.aval)))

    def kernel(self, eqn: Any, env: Env, place: _Place) -> None:
        where, views = adapter.source_line(eqn), self.views(env, eqn.invars)
        scope = place.inside(eqn).scope
        try:
            program = translate(adapter.kernel_call(eqn))
        except adapter.UnsupportedKernel as error:
            moved = sum(v.size for v in views) + sum(_bytes(v.aval) for v in eqn.outvars)
            name, us = str(eqn.params.get("name") or "kernel"), self.chip.launch_us + self.bandwidth_us(moved)
            self.notes.append(f"priced by its bytes: {error}")
        else:
            plan = self.plan(program.name, program) if callable(self.plan) else self.plan or TilePlan()
            key = (program, plan)
            if key not in self.simulated:
                self.simulated[key] = simulate_program(program, self.chip, plan, self.cache)
            k = self.simulated[key]
            if not k.ub.fits:
                self.notes.append(f"kernel `{program.name}` {k.ub.complaint()}")
            name, us, moved = program.name, k.total_us, float(k.traffic.total)
        n = place.times
        op = StepOp(name, "Pallas kernel", "vector", n, n * us, 0.0, n * moved, where, scope)
        self.add(op, views)
        self.make(env, eqn, op)

    def cube(self, eqn: Any, env: Env, place: _Place) -> None:
        out, n = eqn.outvars[0].aval, place.times
        views = self.views(env, eqn.invars)
        where, scope = adapter.source_line(eqn), place.inside(eqn).scope
        if self.formats == "nd":
            for view in {v.array: v for v in views}.values():
                if not view.array.fractal:
                    moved = 2.0 * view.size
                    us = self.chip.launch_us + self.bandwidth_us(moved)
                    name, kind = "nd to fractal", "format conversion"
                    self.add(StepOp(name, kind, "vector", n, n * us, 0.0, n * moved, where, scope), [view])
                    view.array.fractal = True
        kind, flops = _cube_work(eqn)
        moved = sum(v.size for v in views) + _bytes(out)
        peak = self.chip.cube_tflops(eqn.invars[0].aval.dtype.name) * 1e6
        us = self.chip.launch_us + max(flops / peak, self.bandwidth_us(moved))
        name = f"{kind} {'x'.join(map(str, out.shape))}"
        op = StepOp(name, kind, "cube", n, n * us, n * flops, n * moved, where, scope)
        self.add(op, views)
        self.make(env, eqn, op, fractal=True)

    def vector(self, eqn: Any, env: Env, place: _Place) -> None:
        if not eqn.outvars or not hasattr(eqn.outvars[0].aval, "shape"):
            return
        name, views = eqn.primitive.name, self.views(env, eqn.invars)
        if name in COLLECTIVE:
            self.notes.append(f"`{name}` at {adapter.source_line(eqn)}: bytes in memory alone, links are not modelled")
        avals = (a.aval for a in (*eqn.invars, *eqn.outvars) if hasattr(a.aval, "shape"))
        shape = tuple(max((a.shape for a in avals), key=math.prod))
        group = self.candidate(name, shape, views, place)
        if group is None:
            group = _Group([], shape, adapter.source_line(eqn), place.inside(eqn))
            self.add(group, ())
        group.names.append(name)
        for view in views:
            if view.array.maker is not group:
                group.reads[view.array] = max(group.reads.get(view.array, 0.0), view.size)
            view.array.readers.add(id(group))
        group.writes += self.make(env, eqn, group)
        if name not in FUSING:
            group.closed = True

    def candidate(self, name: str, shape: tuple[int, ...], views: Sequence[_View], place: _Place) -> _Group | None:
        """The kernel that makes the last of the operands, if it is open and walks the same shape as often."""
        makers = [v.array.maker for v in views if v.array.maker is not None]
        if not self.fuse or name not in FUSING | REDUCING or not makers:
            return None
        last = max(makers, key=lambda item: self.order[id(item)])
        fits = isinstance(last, _Group) and not last.closed and last.shape == shape
        return last if fits and last.place.times == place.times else None  # type: ignore[return-value, union-attr]

    def finish(self) -> Iterator[StepOp]:
        for item in self.items:
            if isinstance(item, StepOp):
                yield item
                continue
            # A value nobody outside the kernel reads is never written; one nobody reads at all is a result.
            written = sum(a.size for a in item.writes if a.readers != {id(item)})
            moved, n = sum(item.reads.values()) + written, item.place.times
            us = self.chip.launch_us + self.bandwidth_us(moved)
            names = list(dict.fromkeys(item.names))
            label = "+".join(names[:3]) + (f"+{len(names) - 3}" if len(names) > 3 else "")
            yield StepOp(label, _kind(names), "vector", n, n * us, 0.0, n * moved, item.where, item.place.scope)


def _live(jaxpr: Any, wanted: Sequence[bool]) -> list[tuple[Any, list[bool]]]:
    """The equations that wanted results need, in order, each with which of its own results are needed."""
    needed = {v for v, want in zip(jaxpr.outvars, wanted) if want and not adapter.is_literal(v)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        used = [v in needed for v in eqn.outvars]
        if any(used) or eqn.effects:
            kept.append((eqn, used))
            needed |= {a for a in eqn.invars if not adapter.is_literal(a)}
    return kept[::-1]


def _kind(names: Sequence[str]) -> str:
    if set(names) <= FUSING:
        return "element-wise"
    return "collective" if set(names) & COLLECTIVE else "reduction" if set(names) & REDUCING else "data movement"


def _cube_work(eqn: Any) -> tuple[str, float]:
    """(kind, flops) of a matrix product or convolution; zeros that fill a dilated input are not multiplied."""
    out, params = eqn.outvars[0].aval, eqn.params
    if eqn.primitive.name == "dot_general":
        (contract, _), _ = params["dimension_numbers"]
        return "matrix product", 2.0 * math.prod(out.shape) * math.prod(eqn.invars[0].aval.shape[a] for a in contract)
    kernel = eqn.invars[1].aval.shape
    taps = math.prod(kernel[a] for a in params["dimension_numbers"].rhs_spec[1:])
    return "convolution", 2.0 * math.prod(out.shape) * taps / math.prod(params["lhs_dilation"] or (1,))


def _same(first: Any, second: Any) -> bool:
    return getattr(first, "shape", None) == getattr(second, "shape", None)


def _bytes(aval: Any) -> float:
    return math.prod(aval.shape) * dtype_bytes(aval.dtype.name) if hasattr(aval, "dtype") else 0.0
