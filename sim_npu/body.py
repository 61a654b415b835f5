"""The equations of one kernel body, written as vector operations, loops and branches: see `sim_npu.translate`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from sim_npu import pallas_adapter as adapter
from sim_npu.ir import OPERATORS, UNKNOWN, CubeOp, Expr, Loop, Stmt, VecOp, When, dtype_bytes, expr, walk
from sim_npu.oprules import ARITH, REDUCTIONS, RULES, VIEWS, multiplications
from sim_npu.pallas_adapter import UnsupportedKernel


@dataclass(frozen=True)
class Array:
    """A value in the unified buffer: `stored` is its shape before a broadcast that nobody carried out."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: tuple[int, ...]


class Body:
    """Translates the equations of one kernel; `out` is the list being written."""

    def __init__(self, grid: tuple[int, ...], counter: list[int] | None = None) -> None:
        self.grid = grid
        self.out: list[Stmt] = []
        self.counter = counter if counter is not None else [0]
        self.caller = "unknown line"

    def fresh(self, prefix: str = "t") -> str:
        self.counter[0] += 1
        return f"{prefix}{self.counter[0]}"

    def line(self, eqn: Any) -> str:
        """Source line of an equation; library functions traced earlier have none, then that of their call."""
        line = adapter.source_line(eqn)
        return self.caller if line == "unknown line" else line

    def read(self, env: dict[Any, Any], atom: Any) -> Any:
        if not adapter.is_literal(atom):
            return env[atom]
        shape = tuple(atom.aval.shape)
        if shape == () and atom.aval.dtype.kind in "iub":
            return atom.val.item() if hasattr(atom.val, "item") else int(atom.val)
        return Array("const", shape, atom.aval.dtype.name, ())

    def run(self, jaxpr: Any, env: dict[Any, Any]) -> None:
        uses: dict[Any, int] = {}
        for eqn in jaxpr.eqns:
            for atom in eqn.invars:
                if not adapter.is_literal(atom):
                    uses[atom] = uses.get(atom, 0) + 1
        for atom in jaxpr.outvars:
            if not adapter.is_literal(atom):
                uses[atom] = uses.get(atom, 0) + 1
        for eqn in jaxpr.eqns:
            self.equation(eqn, env, uses)

    def equation(self, eqn: Any, env: dict[Any, Any], uses: dict[Any, int]) -> None:
        name = eqn.primitive.name
        if name == "program_id":
            env[eqn.outvars[0]] = ("axis", eqn.params["axis"])
        elif name == "num_programs":
            env[eqn.outvars[0]] = self.grid[eqn.params["axis"]]
        elif name in ("get", "swap", "addupdate"):
            self.access(eqn, env, uses)
        elif name in ("masked_load", "masked_swap", "atomic_rmw"):
            self.masked(eqn, env)
        elif name == "scan":
            self.scan(eqn, env, uses)
        elif name == "cond":
            self.cond(eqn, env)
        elif (inner := adapter.inner_jaxpr(eqn)) is not None:
            self.inline(eqn, inner, env)
        elif name in ("while", "dma_start", "dma_wait", "semaphore_signal", "semaphore_wait", "run_scoped"):
            remedy = "use a loop with constant bounds" if name == "while" else "write it with `sim_npu.builder`"
            raise UnsupportedKernel(f"`{name}` at {self.line(eqn)} has no rule: {remedy}.")
        elif name == "multiple_of":
            env[eqn.outvars[0]] = self.read(env, eqn.invars[0])
        elif name in ("debug_callback", "debug_print"):
            pass
        else:
            self.compute(eqn, env)

    def inline(self, eqn: Any, inner: Any, env: dict[Any, Any]) -> None:
        local = {v: self.read(env, a) for v, a in zip(inner.jaxpr.invars, eqn.invars)}
        for var, value in zip(inner.jaxpr.constvars, inner.consts):
            local[var] = Array("const", tuple(value.shape), value.dtype.name, tuple(value.shape))
        caller, self.caller = self.caller, self.line(eqn)
        self.run(inner.jaxpr, local)
        self.caller = caller
        for var, atom in zip(eqn.outvars, inner.jaxpr.outvars):
            env[var] = self.read(local, atom)

    # -- stores and loads ------------------------------------------------------------------------------------

    def access(self, eqn: Any, env: dict[Any, Any], uses: dict[Any, int]) -> None:
        ref = env[eqn.invars[0]]
        if not isinstance(ref, Array):
            env[eqn.outvars[0]] = UNKNOWN
            return
        index = adapter.ref_index(eqn)
        where = self.line(eqn)
        if eqn.primitive.name == "get":
            var = eqn.outvars[0]
            shape = tuple(var.aval.shape)
            scalar = shape == () and var.aval.dtype.kind in "iub"
            env[var] = UNKNOWN if scalar else Array(ref.name, shape, ref.dtype, shape)
            return
        value = self.read(env, index.value)
        if not isinstance(value, Array):
            value = Array("const", (), ref.dtype, ())
        shape = tuple(index.value.aval.shape)
        if eqn.primitive.name == "addupdate":
            self.emit("add", ARITH, shape, ref.dtype, ref.name, shape, ref.dtype, (ref, value), where=where)
        elif index.mask is not None:
            mask = self.read(env, index.mask)
            self.emit(
                "masked store", "select", shape, ref.dtype, ref.name, shape, ref.dtype, (value, mask), where=where
            )
        else:
            single = not adapter.is_literal(index.value) and uses.get(index.value, 0) == 1
            self.place(value, ref.name, shape, ref.dtype, where, may_retarget=single)
        if eqn.primitive.name == "swap" and eqn.outvars and type(eqn.outvars[0]).__name__ != "DropVar":
            env[eqn.outvars[0]] = Array(ref.name, shape, ref.dtype, shape)

    def masked(self, eqn: Any, env: dict[Any, Any]) -> None:
        """Loads and stores under a mask: a selection over the tile; an atomic add is an addition as well."""
        stored, mask, _ = adapter.masked_operands(eqn)
        ref, where = env[eqn.invars[0]], self.line(eqn)
        var = eqn.outvars[0]
        shape = tuple(var.aval.shape)
        masks = () if mask is None else (self.read(env, mask),)
        if stored is None:
            tile = self.fresh() if masks else ref.name
            if masks:
                self.emit("masked load", "select", shape, ref.dtype, tile, shape, ref.dtype, (ref, *masks), where=where)
            env[var] = Array(tile, shape, ref.dtype, shape)
            return
        value = self.read(env, stored)
        value = value if isinstance(value, Array) else Array("const", (), ref.dtype, ())
        op, kind = (
            ("add", ARITH) if eqn.primitive.name == "atomic_rmw" else ("masked store", "select" if masks else "move")
        )
        self.emit(op, kind, shape, ref.dtype, ref.name, shape, ref.dtype, (ref, value, *masks), where=where)
        env[var] = Array(ref.name, shape, ref.dtype, shape)

    def place(self, value: Any, target: str, shape: tuple, dtype: str, where: str, *, may_retarget: bool) -> None:
        """Make tile `target` hold `value`: by letting the defining operation write there, or by a copy or fill."""
        if not isinstance(value, Array):
            value = Array("const", (), dtype, ())
        if value.name == target and value.stored == value.shape:
            return
        if may_retarget and value.stored == value.shape and self.retarget(value.name, target):
            return
        kind = "fill" if math.prod(value.stored) == 1 and math.prod(shape) > 1 else "move"
        self.emit(kind, kind, shape, dtype, target, shape, dtype, (value,), where=where)

    def retarget(self, name: str, target: str) -> bool:
        """Rename the output of the operation that defines temporary `name`, if nothing reads either in between."""
        if not name.startswith("t"):
            return False
        for i in range(len(self.out) - 1, -1, -1):
            stmt = self.out[i]
            if isinstance(stmt, (VecOp, CubeOp)) and stmt.out == name:
                self.out[i] = dataclasses.replace(stmt, out=target)
                return True
            touched = {n for s in walk((stmt,)) if isinstance(s, (VecOp, CubeOp)) for n in (s.out, *s.reads)}
            if target in touched or name in touched:
                return False
        return False

    # -- control ---------------------------------------------------------------------------------------------

    def scan(self, eqn: Any, env: dict[Any, Any], uses: dict[Any, int]) -> None:
        parts = adapter.scan_parts(eqn)
        where = self.line(eqn)
        operands = [self.read(env, a) for a in eqn.invars]
        body = Body(self.grid, self.counter)
        inner = parts.body.jaxpr
        local: dict[Any, Any] = {}
        for var, const in zip(inner.constvars, parts.body.consts):
            local[var] = Array("const", tuple(const.shape), const.dtype.name, tuple(const.shape))
        carried: dict[int, str] = {}
        for i, (var, value) in enumerate(zip(inner.invars, operands)):
            scalar = _is_scalar_int(var.aval)
            if i < parts.num_consts:
                local[var] = value
            elif scalar:
                local[var] = UNKNOWN
            elif i < parts.num_consts + parts.num_carry:
                shape, dtype = tuple(var.aval.shape), var.aval.dtype.name
                tile = self.fresh("c")
                atom = eqn.invars[i]
                last = not adapter.is_literal(atom) and uses.get(atom, 0) == 1
                self.place(value, tile, shape, dtype, where, may_retarget=last)
                carried[i - parts.num_consts] = tile
                local[var] = Array(tile, shape, dtype, shape)
            else:
                name = value.name if isinstance(value, Array) else "const"
                shape = tuple(var.aval.shape)
                local[var] = Array(name, shape, var.aval.dtype.name, shape)
        body.run(inner, local)
        for i, (var, atom) in enumerate(zip(eqn.outvars, inner.outvars)):
            shape = tuple(atom.aval.shape)
            if i in carried or i >= parts.num_carry:
                tile = carried.get(i) or self.fresh("y")
                value = body.read(local, atom)
                body.place(value, tile, shape, atom.aval.dtype.name, where, may_retarget=True)
                full = tuple(var.aval.shape)
                env[var] = Array(tile, full, atom.aval.dtype.name, full)
            else:
                env[var] = UNKNOWN
        self.out.append(Loop(parts.length, tuple(body.out), tuple(carried.values())))

    def cond(self, eqn: Any, env: dict[Any, Any]) -> None:
        index = self.read(env, eqn.invars[0])
        predicate: Expr = UNKNOWN if isinstance(index, Array) else index
        where = self.line(eqn)
        tiles = [None if _is_scalar_int(v.aval) else self.fresh("b") for v in eqn.outvars]
        branches = []
        for closed in adapter.cond_parts(eqn):
            body = Body(self.grid, self.counter)
            local = {v: self.read(env, a) for v, a in zip(closed.jaxpr.invars, eqn.invars[1:])}
            body.run(closed.jaxpr, local)
            for tile, atom in zip(tiles, closed.jaxpr.outvars):
                if tile is not None:
                    value = body.read(local, atom)
                    body.place(value, tile, tuple(atom.aval.shape), atom.aval.dtype.name, where, may_retarget=True)
            branches.append(tuple(body.out))
        for tile, var in zip(tiles, eqn.outvars):
            shape = tuple(var.aval.shape)
            env[var] = UNKNOWN if tile is None else Array(tile, shape, var.aval.dtype.name, shape)
        self.out.append(When(predicate, tuple(branches), where))

    # -- arithmetic ------------------------------------------------------------------------------------------

    def compute(self, eqn: Any, env: dict[Any, Any]) -> None:
        name = eqn.primitive.name
        operands = [self.read(env, a) for a in eqn.invars]
        if len(eqn.outvars) == 1 and _is_scalar_int(eqn.outvars[0].aval):
            env[eqn.outvars[0]] = self.scalar(name, operands, eqn)
            return
        arrays = tuple(v if isinstance(v, Array) else Array("const", (), "int32", ()) for v in operands)
        if (viewed := self.view(eqn, arrays)) is not None:
            env |= dict(zip(eqn.outvars, viewed))
            return
        where = self.line(eqn)
        first = eqn.outvars[0].aval
        shape, dtype = tuple(first.shape), first.dtype.name
        reads = tuple(a.dtype for a in arrays if a.name != "const") or (dtype,)
        widest = max((*reads, dtype), key=dtype_bytes)
        tile = self.fresh()
        if name == "dot_general":
            (lhs_axes, _), _ = eqn.params["dimension_numbers"]
            flops = 2 * math.prod(shape) * math.prod(arrays[0].shape[a] for a in lhs_axes)
            moved = int(
                sum(math.prod(a.shape) * dtype_bytes(a.dtype) for a in arrays) + math.prod(shape) * dtype_bytes(dtype)
            )
            names = tuple(a.name for a in arrays)
            self.out.append(CubeOp(name, flops, moved, arrays[0].dtype, tile, shape, dtype, names, where))
        elif name in REDUCTIONS:
            axes = tuple(eqn.params["axes"])
            walked = arrays[0].shape
            self.emit(name, "reduce", walked, widest, tile, shape, dtype, arrays[:1], axes=axes, where=where)
        else:
            kind, steps = RULES.get(name, ("unknown", 1))
            if name == "integer_pow":
                kind, steps = ARITH, multiplications(eqn.params["y"])
            if name == "convert_element_type" and "bool" in (arrays[0].dtype, dtype):
                kind = "select"
            self.emit(name, kind, shape, widest, tile, shape, dtype, arrays, steps=steps, where=where)
        for i, var in enumerate(eqn.outvars):
            extra = tile if i == 0 else self.fresh()
            env[var] = Array(extra, tuple(var.aval.shape), var.aval.dtype.name, tuple(var.aval.shape))

    def scalar(self, name: str, operands: list[Any], eqn: Any) -> Expr:
        if any(isinstance(o, Array) for o in operands):
            return UNKNOWN
        if name in ("convert_element_type", "squeeze", "reshape", "broadcast_in_dim"):
            return operands[0]
        name = {"select_n": "select"}.get(name, name)
        return expr(name, *operands) if name in OPERATORS else UNKNOWN

    def view(self, eqn: Any, arrays: tuple[Array, ...]) -> list[Array] | None:
        """Values of an operation that only renames or re-indexes an operand, or None if it computes."""
        name = eqn.primitive.name
        out = eqn.outvars[0].aval
        shape = tuple(out.shape)
        if name == "broadcast_in_dim":
            source = arrays[0]
            dims = eqn.params["broadcast_dimensions"]
            stored = [1] * len(shape)
            for axis, dim in enumerate(dims):
                stored[dim] = (source.stored or (1,) * len(source.shape))[axis]
            flat = () if math.prod(source.stored) == 1 and math.prod(shape) != 1 else tuple(stored)
            return [Array(source.name, shape, source.dtype, flat)]
        if name in ("reshape", "squeeze", "expand_dims"):
            source = arrays[0]
            if source.stored == source.shape:
                return [Array(source.name, shape, source.dtype, shape)]
            if math.prod(source.stored) == 1:
                return [Array(source.name, shape, source.dtype, ())]
            tile = self.fresh()
            where = self.line(eqn)
            self.emit("move", "move", source.shape, source.dtype, tile, shape, source.dtype, (source,), where=where)
            return [Array(tile, shape, source.dtype, shape)]
        if name == "convert_element_type" and arrays[0].dtype == out.dtype.name:
            return [dataclasses.replace(arrays[0], shape=shape)]
        if name == "convert_element_type" and arrays[0].name == "const":
            return [dataclasses.replace(arrays[0], dtype=out.dtype.name)]
        if name in VIEWS:
            base = arrays if name in ("optimization_barrier",) else arrays[:1] * len(eqn.outvars)
            views = []
            for var, source in zip(eqn.outvars, base):
                s = tuple(var.aval.shape)
                views.append(Array(source.name, s, source.dtype, s if source.stored else ()))
            return views
        return None

    def emit(
        self,
        op: str,
        kind: str,
        shape: tuple[int, ...],
        dtype: str,
        out: str,
        out_shape: tuple[int, ...],
        out_dtype: str,
        arrays: tuple[Array, ...],
        *,
        axes: tuple[int, ...] = (),
        steps: int = 1,
        where: str = "",
    ) -> None:
        if math.prod(shape) <= 1 and kind not in ("unknown", "move", "fill"):
            kind = "scalar"
        reads = tuple(dict.fromkeys(a.name for a in arrays if a.name != "const"))
        broadcast = "" if kind in ("scalar", "fill", "reduce") else _broadcast(shape, arrays)
        self.out.append(VecOp(op, kind, shape, dtype, out, out_shape, out_dtype, reads, axes, broadcast, steps, where))


def _broadcast(shape: tuple[int, ...], arrays: tuple[Array, ...]) -> str:
    """How an operand is repeated; the dearest way if several are: "minor", then "major", then "scalar"."""
    kinds = set()
    for array in arrays:
        stored = array.stored
        if math.prod(stored) == 1:
            kinds.add("scalar" if math.prod(shape) > 1 and array.name != "const" else "")
        elif stored != shape and len(stored) == len(shape):
            kinds.add("minor" if stored[-1] == 1 and shape[-1] > 1 else "major")
    return next((k for k in ("minor", "major", "scalar") if k in kinds), "")


def _is_scalar_int(aval: Any) -> bool:
    return getattr(aval, "shape", None) == () and aval.dtype.kind in "iub" and not hasattr(aval, "inner_aval")
