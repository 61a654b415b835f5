"""From a `KernelCall` to a `TileProgram`: what each array operation of a kernel costs the vector unit to do.

The rules, in the order of a kernel's life:

- reading a Ref is free: vector instructions address the unified buffer directly;
- a broadcast is not carried out: the operation that uses it repeats the operand (a zero stride);
- the last operation before a store writes into the Ref itself, if nothing else uses its value;
- a loop's carried values live in tiles of their own, updated in place;
- integers of shape () are scalar-unit work, kept as expressions of the grid position where they can be.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sim_npu.body import Array, Body
from sim_npu.ir import (
    UNKNOWN,
    BlockUse,
    CubeOp,
    Scratch,
    Stmt,
    TileProgram,
    VecOp,
    When,
    axes_of,
    evaluate,
    is_known,
    walk,
)
from sim_npu.pallas_adapter import KernelCall


def translate(call: KernelCall) -> TileProgram:
    """The simulator's form of a kernel.

    Raises:
      UnsupportedKernel: naming the primitive and the source line, for a kernel whose cost has no rule.
    """
    blocks = tuple(_block(call, i) for i in range(len(call.blocks)))
    scratch = tuple(Scratch(f"scratch{i}", s.shape, s.dtype.name) for i, s in enumerate(call.scratch))
    body = Body(call.grid)
    env: dict[Any, Any] = {}
    refs = call.jaxpr.invars
    for var in refs[: call.num_prefetch]:
        env[var] = UNKNOWN
    names = [b.name for b in blocks] + [s.name for s in scratch]
    for var, name in zip(refs[call.num_prefetch :], names):
        env[var] = Array(name, tuple(var.aval.shape), var.aval.dtype.name, tuple(var.aval.shape))
    body.run(call.jaxpr, env)
    statements = tuple(body.out)
    notes = []
    if call.num_prefetch:
        notes.append("Scalar-prefetch operands are treated as unknown: blocks they move are copied at every step.")
    if any(isinstance(s, When) and not is_known(s.predicate) for s in walk(statements)):
        notes.append("A branch depends on data: its most expensive side is costed at every step.")
    if any(b.dtype == "float64" for b in blocks):
        notes.append("The vector unit has no float64: such operations are costed by their bytes alone.")
    parallel = _parallel_axes(call, blocks, scratch, statements)
    return TileProgram(call.name, call.grid, parallel, blocks, scratch, statements, (), tuple(notes))


def _block(call: KernelCall, i: int) -> BlockUse:
    block = call.blocks[i]
    body = Body(call.grid)
    jaxpr = block.index_map.jaxpr
    env: dict[Any, Any] = {v: ("axis", k) for k, v in enumerate(jaxpr.invars[: len(call.grid)])}
    env |= dict.fromkeys(jaxpr.invars[len(call.grid) :], UNKNOWN)
    env |= {
        v: int(c) if not getattr(c, "shape", ()) else UNKNOWN for v, c in zip(jaxpr.constvars, block.index_map.consts)
    }
    body.run(jaxpr, env)
    index = tuple(body.read(env, v) for v in jaxpr.outvars)
    n = i if block.role == "in" else i - len(call.inputs)
    return BlockUse(
        name=f"{block.role}{n}",
        role=block.role,
        array_shape=block.array_shape,
        dtype=block.dtype.name,
        block_shape=block.full_block_shape,
        index=index,
        unit=block.unit,
        space=block.space,
    )


def _parallel_axes(
    call: KernelCall, blocks: tuple[BlockUse, ...], scratch: tuple[Scratch, ...], body: tuple[Stmt, ...]
) -> tuple[bool, ...]:
    """Axes whose steps may run on different cores: those the kernel says, or those nothing is carried along."""
    if call.semantics is not None:
        return tuple(s == "parallel" for s in call.semantics)
    sequential: set[int] = set()
    axes = range(len(call.grid))
    for block in blocks:
        if block.role == "out":
            sequential |= {a for a in axes if call.grid[a] > 1 and not _tells(block, a, call.grid)}
    if any(_carried(s.name, body) for s in scratch):
        tested = {a for s in body if isinstance(s, When) for a in axes_of(s.predicate)}
        sequential |= tested or set(axes)
    return tuple(a not in sequential for a in axes)


def _tells(block: BlockUse, axis: int, grid: tuple[int, ...]) -> bool:
    """Whether a block tells the grid index along an axis: no block is visited again at another one."""
    if axis not in block.axes:
        return False
    if any(e == ("axis", axis) for e in block.index) or not all(map(is_known, block.index)):
        return True
    shape = [n if a in block.axes else 1 for a, n in enumerate(grid)]
    places = [i.ravel() for i in np.indices(shape)]
    indices = np.stack([np.broadcast_to(evaluate(e, places), places[0].shape) for e in block.index], axis=-1)
    blocks, number = np.unique(indices, axis=0, return_inverse=True)
    pairs = np.unique(np.stack([number.ravel(), places[axis]], axis=-1), axis=0)
    return len(pairs) == len(blocks)


def _carried(name: str, body: tuple[Stmt, ...]) -> bool:
    """Whether a scratch tile's value from the step before can be seen: its first use is not an unconditional write."""
    for stmt in body:
        if isinstance(stmt, When):
            if any(name in (s.out, *s.reads) for s in walk((stmt,)) if isinstance(s, (VecOp, CubeOp))):
                return True
            continue
        for inner in walk((stmt,)):
            if isinstance(inner, (VecOp, CubeOp)) and name in (inner.out, *inner.reads):
                return name in inner.reads
    return False
