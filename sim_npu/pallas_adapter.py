"""Read `pallas_call` without running it: the only file that knows JAX's private structures.

    kernel_calls(fn, *args, **kwargs) -> tuple[KernelCall, ...]   every pallas_call of fn(*args, **kwargs), in order
    kernel_call(eqn) -> KernelCall                    the same for one equation of a traced function
    is_kernel_call(eqn) -> bool
    trace(fn, *args, **kwargs) -> jax.extend.core.ClosedJaxpr     args: arrays or ShapeDtypeStructs, nested as fn likes
    scan_parts(eqn) -> ScanParts                      counts of constants, carries and scanned inputs; the body
    cond_parts(eqn) -> tuple[ClosedJaxpr, ...]        branches; the first operand of eqn is the branch number
    inner_jaxpr(eqn) -> ClosedJaxpr | None            of jit, custom_jvp_call and the like, to be inlined
    ref_index(eqn) -> RefIndex                        which part of a Ref get, swap and addupdate touch
    source_line(eqn) -> str

`KernelCall.jaxpr` takes, in order, one Ref per scalar-prefetch operand, per input block, per output block and per
scratch tile. `eqn.invars` of the call are the arrays of `KernelCall.inputs`, `eqn.outvars` those of `.outputs`.
Names and shapes here are the same on JAX 0.10 and 0.12; what differs between them (parameters of `scan`, closed
and open jaxprs) is absorbed here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex


class UnsupportedKernel(ValueError):
    """A kernel uses something the model has no rule for; names the primitive and the source line."""


@dataclass(frozen=True)
class BlockMapping:
    """One input or output of a kernel.

    Attributes:
      name: origin given by Pallas, such as `x_ref` or `outputs[0]`.
      role: "in" or "out".
      array_shape, dtype: of the whole array.
      block_shape: one entry per array axis; None where the kernel does not see the axis (squeezed).
      unit: "block" if the index map counts blocks, "element" if it counts elements.
      index_map: closed jaxpr from the grid indices (and prefetched scalars) to one index per array axis.
      ref_shape: shape of the Ref in the kernel.
      space: "scalar" for scalar memory, else "ub".
    """

    name: str
    role: str
    array_shape: tuple[int, ...]
    dtype: np.dtype
    block_shape: tuple[int | None, ...]
    unit: str
    index_map: jex.ClosedJaxpr
    ref_shape: tuple[int, ...]
    space: str

    @property
    def full_block_shape(self) -> tuple[int, ...]:
        """Block shape with 1 in place of None."""
        return tuple(1 if b is None else b for b in self.block_shape)


@dataclass(frozen=True)
class ScratchTile:
    """A scratch tile: shape, dtype, space ("ub" or "scalar")."""

    shape: tuple[int, ...]
    dtype: np.dtype
    space: str


@dataclass(frozen=True)
class KernelCall:
    """One `pallas_call`: see the module's text for the order of `jaxpr`'s Refs.

    Attributes:
      name: of the kernel.
      grid: steps per axis; the last varies fastest.
      inputs, outputs: block mappings.
      scratch: scratch tiles.
      jaxpr: the kernel over Refs (an open jaxpr, nothing returned).
      num_prefetch: scalar-prefetch operands, the first Refs of `jaxpr` and the last arguments of each index map.
      semantics: "parallel" or "arbitrary" per grid axis, or None where the kernel does not say.
      aliases: pairs (input, output) that share an array.
    """

    name: str
    grid: tuple[int, ...]
    inputs: tuple[BlockMapping, ...]
    outputs: tuple[BlockMapping, ...]
    scratch: tuple[ScratchTile, ...]
    jaxpr: Any
    num_prefetch: int
    semantics: tuple[str, ...] | None
    aliases: tuple[tuple[int, int], ...]

    @property
    def blocks(self) -> tuple[BlockMapping, ...]:
        """Inputs, then outputs."""
        return self.inputs + self.outputs


@dataclass(frozen=True)
class ScanParts:
    """`scan`'s operands are consts, carry, xs in this order; `body` maps (consts, carry, x) to (carry, y)."""

    num_consts: int
    num_carry: int
    num_xs: int
    length: int
    reverse: bool
    body: jex.ClosedJaxpr


@dataclass(frozen=True)
class RefIndex:
    """Part of a Ref.

    Attributes:
      dims: per axis an int or variable (the axis is dropped), or `(start, size, stride)`; `start` an int or variable.
      value: the stored value for swap and addupdate, else None.
      mask: the mask variable, else None.
    """

    dims: tuple[Any, ...]
    value: Any = None
    mask: Any = None


def trace(fn: Callable, *args: Any, **kwargs: Any) -> jex.ClosedJaxpr:
    """Jaxpr of `fn(*args, **kwargs)`. Nothing runs; `args` may be ShapeDtypeStructs."""
    return jax.make_jaxpr(lambda *a: fn(*a, **kwargs))(*args)


def is_kernel_call(eqn: Any) -> bool:
    """Whether the equation is a `pallas_call`."""
    return eqn.primitive.name == "pallas_call"


def contains(eqn: Any, primitive: str) -> bool:
    """Whether a primitive of that name is this equation or lies anywhere inside it."""
    return eqn.primitive.name == primitive or any(
        contains(inner, primitive) for jaxpr in _jaxprs(eqn) for inner in jaxpr.eqns
    )


def _jaxprs(eqn: Any) -> Iterator[Any]:
    """Open jaxprs among an equation's parameters: bodies of calls and loops, branches."""
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            jaxpr = part if hasattr(part, "eqns") else getattr(part, "jaxpr", None)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def kernel_calls(fn: Callable, *args: Any, **kwargs: Any) -> tuple[KernelCall, ...]:
    """Every `pallas_call` in `fn(*args, **kwargs)`, in program order, also inside jit and custom derivatives.

    Raises:
      UnsupportedKernel: for a kernel inside a loop or a branch, whose turns a list of calls cannot say.

    >>> kernel_calls(lambda x: x + 1, jax.ShapeDtypeStruct((8,), "float32"))
    ()
    """
    return calls_in(trace(fn, *args, **kwargs).jaxpr)


def calls_in(jaxpr: Any) -> tuple[KernelCall, ...]:
    """`kernel_calls` of a function that is already traced."""
    return tuple(kernel_call(eqn) for eqn in _kernel_equations(jaxpr))


def _kernel_equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if is_kernel_call(eqn):
            yield eqn
        elif (inner := inner_jaxpr(eqn)) is not None:
            yield from _kernel_equations(inner.jaxpr)
        elif eqn.primitive.name == "shard_map":
            yield from _kernel_equations(device_jaxpr(eqn).jaxpr)
        elif any(True for part in _jaxprs(eqn) for _ in _kernel_equations(part)):
            raise UnsupportedKernel(
                f"a kernel inside `{eqn.primitive.name}` at {source_line(eqn)}: simulate what it repeats or chooses by "
                "itself, or the whole function with `sim_npu.simulate_step`, which counts turns."
            )


def kernel_call(eqn: Any) -> KernelCall:
    """The `pallas_call` equation as a `KernelCall`.

    Raises:
      UnsupportedKernel: for a grid whose size is not known when tracing.
    """
    params = eqn.params
    mapping = params["grid_mapping"]
    name = params.get("name") or str(getattr(params["jaxpr"].debug_info, "func_name", None) or "kernel")
    grid = tuple(mapping.grid)
    if not all(isinstance(g, int) for g in grid):
        raise UnsupportedKernel(f"kernel `{name}` at {source_line(eqn)}: the grid {grid} is not known when tracing.")
    num_in = mapping.num_inputs
    refs = params["jaxpr"].invars[mapping.num_index_operands :]
    blocks = [
        _block_mapping(b, "in" if i < num_in else "out", ref.aval)
        for i, (b, ref) in enumerate(zip(mapping.block_mappings, refs))
    ]
    scratch = [ref.aval for ref in refs[len(blocks) :]]
    for aval in scratch:
        if not hasattr(aval, "dtype") or not isinstance(aval.dtype, np.dtype):
            raise UnsupportedKernel(
                f"kernel `{name}` at {source_line(eqn)}: scratch {aval} is not an array. "
                "Explicit copies and semaphores are written with `sim_npu.builder`."
            )
    compiler = params.get("compiler_params")
    if isinstance(compiler, dict):  # older form: {"mosaic_tpu": params}
        compiler = next(iter(compiler.values()), None)
    semantics = getattr(compiler, "dimension_semantics", None)
    return KernelCall(
        name=name,
        grid=grid,
        inputs=tuple(blocks[:num_in]),
        outputs=tuple(blocks[num_in:]),
        scratch=tuple(ScratchTile(tuple(a.shape), np.dtype(a.dtype), _space(a)) for a in scratch),
        jaxpr=params["jaxpr"],
        num_prefetch=mapping.num_index_operands,
        semantics=None if semantics is None else tuple(_semantic(s) for s in semantics),
        aliases=tuple(tuple(pair) for pair in params.get("input_output_aliases") or ()),
    )


def _block_mapping(block: Any, role: str, ref_aval: Any) -> BlockMapping:
    array = block.array_aval
    if np.dtype(array.dtype).kind == "c":
        raise UnsupportedKernel(f"block `{block.origin}` is {array.dtype}: an AI Core has no complex numbers.")
    sizes: list[int | None] = []
    units = set()
    for dim in block.block_shape:
        kind = type(dim).__name__
        if dim is None or kind == "Squeezed":
            sizes.append(None)
        elif isinstance(dim, int):
            sizes.append(dim)
            units.add("block")
        elif kind in ("Blocked", "Element", "BoundedSlice"):
            sizes.append(dim.block_size)
            units.add("block" if kind == "Blocked" else "element")
        else:
            raise UnsupportedKernel(f"block `{block.origin}`: dimension {dim!r} ({kind}) has no rule.")
    if len(units) > 1:
        # Element dimensions count elements beside block dimensions; equal only where the block is the whole axis.
        whole = all(s is None or s == n for s, n, d in zip(sizes, array.shape, block.block_shape) if _is_element(d))
        if not whole:
            raise UnsupportedKernel(f"block `{block.origin}`: element and block dimensions are mixed.")
        units = {"block"}
    return BlockMapping(
        name=str(block.origin),
        role=role,
        array_shape=tuple(array.shape),
        dtype=np.dtype(array.dtype),
        block_shape=tuple(sizes),
        unit=units.pop() if units else "block",
        index_map=block.index_map_jaxpr,
        ref_shape=tuple(ref_aval.shape),
        space=_space(ref_aval),
    )


def _is_element(dim: Any) -> bool:
    return type(dim).__name__ in ("Element", "BoundedSlice")


def _space(aval: Any) -> str:
    space = str(getattr(aval, "memory_space", "")).lower()
    if "smem" in space:
        return "scalar"
    if space.endswith(("any", "hbm", "semaphore_mem")):
        raise UnsupportedKernel(
            f"a Ref in memory space `{space}` is copied by the kernel itself, which has no rule here. "
            "Give it a BlockSpec, or write explicit copies with `sim_npu.builder`."
        )
    return "ub"


def _semantic(value: Any) -> str:
    return "parallel" if str(getattr(value, "value", value)).lower().endswith("parallel") else "arbitrary"


def _closed(jaxpr: Any) -> jex.ClosedJaxpr:
    """`jaxpr` closed over nothing, whichever form this version of JAX stores."""
    if hasattr(jaxpr, "consts") and hasattr(jaxpr, "jaxpr") and jaxpr.jaxpr is not jaxpr:
        return jaxpr
    return jex.ClosedJaxpr(jaxpr, list(getattr(jaxpr, "consts", ()) or ()))


def scan_parts(eqn: Any) -> ScanParts:
    """Structure of a `scan` equation, whose parameters differ between JAX versions.

    JAX 0.10 stores the counts; 0.12 stores trees whose leaves are counted here.
    """
    body = _closed(eqn.params["jaxpr"])
    length = eqn.params["length"]
    if "num_carry" in eqn.params:
        num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    else:
        num_consts, num_carry = (len(list(tree)) for tree in eqn.params["ft_in"].unpack()[:2])
    num_xs = len(eqn.invars) - num_consts - num_carry
    return ScanParts(num_consts, num_carry, num_xs, length, eqn.params["reverse"], body)


def cond_parts(eqn: Any) -> tuple[jex.ClosedJaxpr, ...]:
    """Branches of a `cond` equation; branch i runs when the first operand is i."""
    return tuple(_closed(b) for b in eqn.params["branches"])


def device_jaxpr(eqn: Any) -> jex.ClosedJaxpr:
    """What one device of a `shard_map` equation runs, on shapes of its part."""
    return _closed(eqn.params["jaxpr"])


_INLINED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
_CONTROL = {"scan", "while", "cond", "pallas_call", "shard_map", "run_scoped"}


def inner_jaxpr(eqn: Any) -> jex.ClosedJaxpr | None:
    """The jaxpr a call-like equation (jit, remat, custom_jvp_call, ...) stands for, or None for any other."""
    if eqn.primitive.name in _CONTROL:
        return None
    for key in _INLINED:
        inner = eqn.params.get(key)
        if inner is not None and (hasattr(inner, "eqns") or hasattr(inner, "jaxpr")):
            closed = _closed(inner)
            if len(closed.jaxpr.invars) == len(eqn.invars):
                return closed
    return None


def ref_index(eqn: Any) -> RefIndex:
    """What part of its Ref a `get`, `swap` or `addupdate` equation touches.

    Raises:
      UnsupportedKernel: for a chain of indexers or an index that is an array.
    """
    stored = eqn.primitive.name != "get"
    first = 2 if stored else 1
    operands = list(eqn.invars[first:])
    tree = eqn.params["tree"]
    leaves = tree.num_leaves
    transforms = jax.tree.unflatten(tree, operands[:leaves])
    mask = operands[leaves] if len(operands) > leaves else None
    value = eqn.invars[1] if stored else None
    return RefIndex(_indexed_dims(eqn, transforms), value, mask)


def masked_operands(eqn: Any) -> tuple[Any, Any, Any]:
    """(stored value or None, mask or None, what masked-off elements are or None) of `masked_load` and its like."""
    _, _, third, fourth = eqn.params["args_tree"].unflatten(eqn.invars)
    return (None, third, fourth) if eqn.primitive.name == "masked_load" else (third, fourth, None)


def masked_index(eqn: Any) -> RefIndex:
    """`ref_index` of `masked_load`, `masked_swap` and `atomic_rmw`.

    Raises:
      UnsupportedKernel: for a chain of indexers, an index that is an array, or an atomic operation other than add.
    """
    kind = eqn.params.get("atomic_type")
    if kind is not None and kind.name.lower() not in ("add", "fadd"):
        raise UnsupportedKernel(f"`atomic_rmw` at {source_line(eqn)}: only add has a rule, not {kind.name.lower()}.")
    transforms = eqn.params["args_tree"].unflatten(eqn.invars)[1]
    value, mask, _ = masked_operands(eqn)
    return RefIndex(_indexed_dims(eqn, transforms or ()), value, mask)


def _indexed_dims(eqn: Any, transforms: Any) -> tuple[Any, ...]:
    if not transforms:
        return tuple((0, n, 1) for n in eqn.invars[0].aval.shape)
    if len(transforms) > 1 or not hasattr(transforms[0], "indices"):
        raise UnsupportedKernel(
            f"`{eqn.primitive.name}` at {source_line(eqn)}: only one index per access has a rule, not {transforms}."
        )
    dims: list[Any] = []
    for index in transforms[0].indices:
        if hasattr(index, "size") and hasattr(index, "start"):
            dims.append((index.start, index.size, index.stride))
        elif getattr(getattr(index, "aval", None), "shape", ()) != ():
            raise UnsupportedKernel(f"`{eqn.primitive.name}` at {source_line(eqn)}: an array of indices has no rule.")
        else:
            dims.append(getattr(index, "val", index))
    return tuple(dims)


def while_parts(eqn: Any) -> tuple[jex.ClosedJaxpr, int, jex.ClosedJaxpr, int]:
    """Condition and body of a `while`, each with the number of constants that precede the carry in the operands."""
    params = eqn.params
    return (
        _closed(params["cond_jaxpr"]),
        params["cond_nconsts"],
        _closed(params["body_jaxpr"]),
        params["body_nconsts"],
    )


UNKNOWN_LINE = "unknown line"


def source_line(eqn: Any) -> str:
    """`file.py:12 (function)` of the user's code that made the equation, or "unknown line"."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return UNKNOWN_LINE
    for frame in traceback.frames:
        path = frame.file_name.replace("\\", "/")
        if "/jax/" not in path and "/jaxlib/" not in path:
            return f"{path.rsplit('/', 1)[-1]}:{frame.line_num} ({frame.function_name.rsplit('.', 1)[-1]})"
    return UNKNOWN_LINE


def scope(eqn: Any) -> str:
    """Named scopes around an equation, and the name of the function if it is a jitted call, joined by slashes."""
    parts = (str(eqn.source_info.name_stack), str(eqn.params.get("name") or "") if inner_jaxpr(eqn) else "")
    return "/".join(p for p in parts if p)


def is_literal(atom: Any) -> bool:
    """Whether a jaxpr operand is a constant written into the equation."""
    return isinstance(atom, jex.Literal)


def outside_kernels(jaxpr: Any, free: Collection[str]) -> list[str]:
    """Names of the primitives of `jaxpr` that lie outside its kernels, in order, but for those in `free`."""
    names: list[str] = []
    for eqn in jaxpr.eqns:
        if (inner := inner_jaxpr(eqn)) is not None:
            names += outside_kernels(inner.jaxpr, free)
        elif not is_kernel_call(eqn) and eqn.primitive.name not in free:
            names.append(eqn.primitive.name)
    return names
