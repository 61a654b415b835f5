"""The simulator's own program form: what one AI Core does with its tiles, free of JAX.

A `TileProgram` is a grid of steps. Before a step the blocks whose index changed are copied in (MTE2), the body
runs on the vector unit (V), and after it the output blocks whose index is about to change are copied out (MTE3).
Everything that analyses a kernel (footprint, cost, timeline, reports) sees only these classes, so a new front end
is one function that builds a `TileProgram`. All of it turns into plain JSON and back: `to_json`, `from_json`.

Index maps and predicates are small expression trees over the grid position, evaluated for all steps at once
with NumPy:

>>> grid = np.arange(6)
>>> evaluate(("floordiv", ("axis", 0), 2), [grid]).tolist()
[0, 0, 1, 1, 2, 2]
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Expr = int | float | bool | tuple
"""A constant, `("axis", k)` (grid position), `("unknown",)`, or `(operator, operand, ...)`."""

UNKNOWN: Expr = ("unknown",)


def _number(value: Any) -> np.ndarray:
    """A comparison's result counts as 0 or 1 in arithmetic (NumPy would or and and booleans)."""
    array = np.asarray(value)
    return array.astype(np.int64) if array.dtype == bool else array


def _arithmetic(function: Any) -> Any:
    return lambda *operands: function(*(_number(o) for o in operands))


# XLA's integer division and remainder truncate towards zero; its logic is bitwise, which on booleans is logic.
_OPERATORS: dict[str, Any] = {
    "add": _arithmetic(np.add),
    "sub": _arithmetic(np.subtract),
    "mul": _arithmetic(np.multiply),
    "floordiv": _arithmetic(np.floor_divide),
    "div": _arithmetic(lambda a, b: np.trunc(np.divide(a, b)).astype(np.int64)),
    "rem": _arithmetic(np.fmod),
    "min": _arithmetic(np.minimum),
    "max": _arithmetic(np.maximum),
    "neg": _arithmetic(np.negative),
    "sign": _arithmetic(np.sign),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "select": lambda c, no, yes: np.where(c, yes, no),
}
OPERATORS = frozenset(_OPERATORS)


def expr(op: str, *operands: Expr) -> Expr:
    """Build an expression, folding constants; an unknown operand makes the whole unknown.

    >>> expr("add", 2, 3), expr("mul", ("axis", 0), 1)
    (5, ('axis', 0))
    """
    if any(operand == UNKNOWN for operand in operands):
        return UNKNOWN
    if all(isinstance(operand, (int, float, bool)) for operand in operands):
        return _OPERATORS[op](*(np.asarray(o) for o in operands)).item()
    if op == "mul" and 1 in operands:
        return operands[1] if operands[0] == 1 else operands[0]
    if op == "add" and 0 in operands:
        return operands[1] if operands[0] == 0 else operands[0]
    return (op, *operands)


def evaluate(expression: Expr, axes: Sequence[np.ndarray]) -> np.ndarray:
    """Value of `expression` at every grid position.

    Args:
      expression: the tree.
      axes: one integer array per grid axis, all of one shape.

    Raises:
      ValueError: if the expression depends on something the grid position does not determine.
    """
    if not isinstance(expression, tuple):
        return np.broadcast_to(np.asarray(expression), axes[0].shape if axes else ())
    op, *operands = expression
    if op == "axis":
        return axes[operands[0]]
    if op == "unknown":
        raise ValueError("`expression` depends on data, not only on the grid position.")
    return _OPERATORS[op](*(evaluate(operand, axes) for operand in operands))


def blocks_beyond(block: str, role: str, index: np.ndarray, axis: int, tile: int, length: int) -> int:
    """At how many steps a block begins behind the end of its array: an input may (nothing is read there).

    Args:
      block: name, for the error.
      role: "in" or "out".
      index: block numbers along `axis` at every step (first elements with `tile` 1).
      axis: of the array.
      tile: elements of a block along it.
      length: elements of the array along it.

    Raises:
      ValueError: naming an index before the array, or one of an output behind it.

    >>> blocks_beyond("x", "in", np.array([0, 1, 2]), 0, 4, 8)
    1
    """
    most = max(0, -(-length // tile) - 1)
    beyond = index > most
    outside = (index < 0) | beyond if role == "out" else index < 0
    if outside.any():
        raise ValueError(
            f"the index map of block `{block}` must stay within 0 and {most} along axis {axis} (an array of {length} "
            f"in blocks of {tile}); it gives {int(index[outside].flat[0])} at some step."
        )
    return int(np.count_nonzero(beyond))


def axes_of(expression: Expr) -> frozenset[int]:
    """Grid axes that `expression` depends on."""
    if not isinstance(expression, tuple):
        return frozenset()
    if expression[0] == "axis":
        return frozenset((expression[1],))
    return frozenset().union(*(axes_of(operand) for operand in expression[1:]))


def is_known(expression: Expr) -> bool:
    """Whether the grid position alone determines `expression`."""
    if not isinstance(expression, tuple):
        return True
    return expression[0] != "unknown" and all(is_known(o) for o in expression[1:])


_BITS = {"float64": 64, "int64": 64, "uint64": 64, "bool": 8, "float16": 16, "bfloat16": 16, "float32": 32}


def dtype_bytes(dtype: str) -> float:
    """Bytes of one element; booleans take a byte, int4 half of one.

    >>> dtype_bytes("bfloat16"), dtype_bytes("int8"), dtype_bytes("float8_e4m3fn")
    (2.0, 1.0, 1.0)
    """
    if dtype in _BITS:
        return _BITS[dtype] / 8
    if dtype.startswith(("float8", "float4", "int2", "int4", "uint2", "uint4")):
        return 1.0 if dtype.startswith("float8") else int(dtype.strip("uintfloa")[0]) / 8
    return int("".join(c for c in dtype if c.isdigit())) / 8


def tile_bytes(shape: Sequence[int], dtype: str, *, align: int = 32) -> int:
    """Bytes a tile takes in the unified buffer: each row (last axis) is padded to `align` bytes.

    >>> tile_bytes((3, 5), "float16")
    96
    """
    rows = math.prod(shape[:-1]) if shape else 1
    row = math.ceil((shape[-1] if shape else 1) * dtype_bytes(dtype))
    return rows * (-(-row // align) * align)


@dataclass(frozen=True)
class BlockUse:
    """An array in global memory and the block of it that each step sees.

    Attributes:
      name: for reports.
      role: "in" or "out".
      array_shape, dtype: of the array in global memory.
      block_shape: of the block, one entry per array axis (1 where the kernel does not see the axis).
      index: block index per axis; times the block shape it is the start, unless `unit` is "element".
      unit: "block" or "element".
      space: "ub" or "scalar" (a scalar operand costs a scalar load, no vector tile).
    """

    name: str
    role: str
    array_shape: tuple[int, ...]
    dtype: str
    block_shape: tuple[int, ...]
    index: tuple[Expr, ...]
    unit: str = "block"
    space: str = "ub"

    @property
    def axes(self) -> frozenset[int]:
        """Grid axes the block moves with."""
        return frozenset().union(*(axes_of(e) for e in self.index)) if self.index else frozenset()


@dataclass(frozen=True)
class Scratch:
    """A tile that lives through all steps of a core."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class VecOp:
    """One array operation on the vector unit.

    Attributes:
      op: name of the operation, for reports.
      kind: cost class, a key of `ChipSpec.cycles_per_repeat`, or "view" (free), "reduce", "scalar", "unknown".
      shape: elements it walks over (the input's shape for a reduction).
      dtype: type whose width decides how many elements a repeat holds: the widest operand.
      out: name of the value it defines; the name of a buffer when it writes there directly.
      out_shape, out_dtype: of the value it defines.
      reads: names of values and buffers read.
      axes: axes a reduction removes.
      broadcast: "", or how an operand is repeated: "minor" (constant along the last axis), "major" (along leading
        axes), "scalar" (a single element).
      steps: primitive instructions it stands for, each over the whole shape.
      where: source line.
    """

    op: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    out: str
    out_shape: tuple[int, ...]
    out_dtype: str
    reads: tuple[str, ...] = ()
    axes: tuple[int, ...] = ()
    broadcast: str = ""
    steps: int = 1
    where: str = ""


@dataclass(frozen=True)
class Loop:
    """`body` run `count` times on the same tiles. `carry` names the values that live through the loop."""

    count: int
    body: tuple[Stmt, ...]
    carry: tuple[str, ...] = ()


@dataclass(frozen=True)
class When:
    """Branches chosen by the grid position; `predicate` gives the branch number."""

    predicate: Expr
    branches: tuple[tuple[Stmt, ...], ...]
    where: str = ""


@dataclass(frozen=True)
class Copy:
    """An explicit transfer inside the body.

    Attributes:
      queue: name of the queue (a `Queue` of the program).
      direction: "in" (global memory to unified buffer) or "out".
      bursts: contiguous pieces in global memory.
      burst_bytes: bytes of each piece.
      pad: True for DataCopyPad (byte granularity), False for DataCopy (32 B units, rounded down).
      atomic: True to add into global memory instead of overwriting.
      more: True for a further piece of the tile that the copy before began to fill.
      gap: bytes between two pieces in global memory.
    """

    queue: str
    direction: str
    bursts: int
    burst_bytes: int
    pad: bool = True
    atomic: bool = False
    more: bool = False
    gap: int = 0


@dataclass(frozen=True)
class Queue:
    """Tiles of one size handed between a copy unit and the vector unit."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    depth: int = 1


@dataclass(frozen=True)
class CrossCore:
    """A synchronisation: kind "sync" of all cores, or "barrier" of the units of one core (PipeBarrier)."""

    kind: str
    bytes: int = 0


@dataclass(frozen=True)
class CubeOp:
    """A matrix product on the cube unit: `flops` of `dtype`, `bytes` of operands and result."""

    op: str
    flops: int
    bytes: int
    dtype: str
    out: str = ""
    out_shape: tuple[int, ...] = ()
    out_dtype: str = "float32"
    reads: tuple[str, ...] = ()
    where: str = ""


Stmt = VecOp | Loop | When | Copy | CrossCore | CubeOp


@dataclass(frozen=True)
class TileProgram:
    """A kernel as the simulator sees it.

    Attributes:
      name: for reports.
      grid: number of steps along each axis; the last varies fastest.
      parallel: per axis, whether its steps may run on different cores.
      blocks: arrays in global memory, inputs first.
      scratch: tiles that live through all steps.
      body: what a step does.
      queues: queues of explicit copies (builder programs).
      notes: what the reader of a report must know about the translation.
    """

    name: str
    grid: tuple[int, ...]
    parallel: tuple[bool, ...]
    blocks: tuple[BlockUse, ...]
    scratch: tuple[Scratch, ...]
    body: tuple[Stmt, ...]
    queues: tuple[Queue, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def steps(self) -> int:
        """Steps of the whole grid."""
        return math.prod(self.grid)

    def unknown(self) -> tuple[tuple[str, str], ...]:
        """(operation, source line) of everything priced with the default cost, once each."""
        return tuple(
            dict.fromkeys((s.op, s.where) for s in walk(self.body) if isinstance(s, VecOp) and s.kind == "unknown")
        )

    def to_json(self) -> str:
        """The program as JSON text, stable across JAX versions."""
        return json.dumps(_plain(self), indent=1)

    @staticmethod
    def from_json(text: str) -> TileProgram:
        """The program that `to_json` wrote."""
        return _rebuild(json.loads(text))


def walk(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """Every statement of `body`, depth first."""
    for stmt in body:
        yield stmt
        if isinstance(stmt, Loop):
            yield from walk(stmt.body)
        elif isinstance(stmt, When):
            for branch in stmt.branches:
                yield from walk(branch)


_CLASSES = {c.__name__: c for c in (BlockUse, Scratch, VecOp, Loop, When, Copy, Queue, CrossCore, CubeOp, TileProgram)}


def _plain(node: Any) -> Any:
    if dataclasses.is_dataclass(node):
        changed = {
            f.name: _plain(getattr(node, f.name))
            for f in dataclasses.fields(node)
            if f.default is dataclasses.MISSING or getattr(node, f.name) != f.default
        }
        return {"is": type(node).__name__, **changed}
    if isinstance(node, tuple):
        return [_plain(item) for item in node]
    return node


def _rebuild(node: Any) -> Any:
    if isinstance(node, dict):
        return _CLASSES[node["is"]](**{k: _rebuild(v) for k, v in node.items() if k != "is"})
    if isinstance(node, list):
        return tuple(_rebuild(item) for item in node)
    return node
