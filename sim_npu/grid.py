"""Run a kernel over its grid: steps that write separate blocks side by side, the rest one after the other.

Lanes (see `sim_npu.layout`) are one `vmap`; turns are a `scan` that carries the output blocks and the scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sim_npu.arithmetic import Arithmetic, opaque_zero
from sim_npu.evaluate import Evaluator
from sim_npu.layout import Operand, Steps, layout
from sim_npu.pallas_adapter import KernelCall, contains
from sim_npu.precision import Kind, PrecisionPolicy
from sim_npu.values import Ref, Value, container, unwritten

LANE_BYTES = 512 << 20  # inputs and outputs of the lanes that run side by side; their temporaries are some times that


def run_kernel(
    call: KernelCall, policy: PrecisionPolicy, arrays: Sequence[Any], kinds: Sequence[Kind]
) -> tuple[list[Any], list[Kind]]:
    """Outputs of a kernel under a policy, in the outputs' own dtypes, and their kinds.

    Args:
      call: from the adapter.
      policy: see `sim_npu.precision`.
      arrays, kinds: one per operand of the call, prefetched scalars first.

    Raises:
      UnsupportedKernel: at a primitive without a rounding rule.
    """
    scalars, inputs = arrays[: call.num_prefetch], arrays[call.num_prefetch :]
    policy = policy.for_inputs(tuple(b.dtype.name for b in call.inputs))
    arithmetic = Arithmetic(policy, opaque_zero([*inputs, *scalars]))
    atomic = any(contains(eqn, "atomic_rmw") for eqn in call.jaxpr.eqns)
    steps, operands = layout(call, policy.arrival_seed if atomic else None)
    return _Run(call, arithmetic, steps, operands, scalars, kinds).outputs(inputs)


class _Run:
    """One kernel call being evaluated."""

    def __init__(
        self,
        call: KernelCall,
        arithmetic: Arithmetic,
        steps: Steps,
        operands: Sequence[Operand],
        scalars: Sequence[Any],
        kinds: Sequence[Kind],
    ) -> None:
        self.call, self.arithmetic, self.steps, self.operands = call, arithmetic, steps, operands
        self.scalars = list(scalars)
        self.kinds = list(kinds)
        aliased = {o: i for i, o in call.aliases}
        self.out_kinds = [self.kinds[aliased[o]] if o in aliased else Kind.CONSTANT for o in range(len(call.outputs))]
        self.scratch_kinds = [Kind.CONSTANT for _ in call.scratch]

    def outputs(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Kind]]:
        """Arrays in the outputs' dtypes, and kinds."""
        call = self.call
        held = [jnp.asarray(a).astype(container(b.dtype)) for a, b in zip(inputs, call.inputs)]
        aliased = {o: held[i - call.num_prefetch] for i, o in call.aliases}
        before = [aliased[o] if o in aliased else unwritten(b.array_shape, b.dtype) for o, b in enumerate(call.outputs)]
        parts = [op.split(a) for op, a in zip(self.operands, [*held, *before])]
        ins, outs = parts[: len(held)], parts[len(held) :]
        scratch = [unwritten(s.shape, s.dtype) for s in call.scratch]
        outs = self._lanes(ins, outs, scratch)
        joined = [op.join(a, b) for op, a, b in zip(self.operands[len(held) :], outs, before)]
        return [a.astype(b.dtype) for a, b in zip(joined, call.outputs)], self.out_kinds

    def _lanes(self, ins: list[Any], outs: list[Any], scratch: list[Any]) -> list[Any]:
        """Outputs of all lanes."""
        starts = [op.local_starts() for op in self.operands]
        if len(self.steps.lanes) == 1:
            return self._turns(self.steps.lanes[0], ins, outs, scratch, [s if s is None else s[0] for s in starts])
        batched = [s is not None and (s[:1] != s).any() for s in starts]
        shared = [None if b or s is None else s[0] for s, b in zip(starts, batched)]

        def lane(ids: Any, ins: list[Any], outs: list[Any], own: list[Any]) -> list[Any]:
            merged = [b if a is None else a for a, b in zip(shared, own)]
            return self._turns(ids, ins, outs, scratch, merged)

        own = [jnp.asarray(s) if b else None for s, b in zip(starts, batched)]
        axes = [0 if op.lane_axes else None for op in self.operands]
        together = jax.vmap(lane, in_axes=(0, axes[: len(ins)], axes[len(ins) :], 0))
        bytes_per_lane = sum(a.nbytes // len(a) for a, x in zip([*ins, *outs], axes) if x == 0)
        group = max(1, LANE_BYTES // max(1, bytes_per_lane))
        if group >= len(self.steps.lanes):
            return together(self.steps.lanes, ins, outs, own)
        return self._grouped(lane, ins, outs, own, axes, group)

    def _grouped(
        self, lane: Any, ins: list[Any], outs: list[Any], own: list[Any], axes: list[int | None], group: int
    ) -> list[Any]:
        """Outputs of all lanes, a group after another."""
        arrays = [*ins, *outs]
        cut = [a if x == 0 else None for a, x in zip(arrays, axes)]

        def one(scanned: Any) -> list[Any]:
            ids, parts, starts = scanned
            whole = [a if p is None else p for a, p in zip(arrays, parts)]
            return lane(ids, whole[: len(ins)], whole[len(ins) :], starts)

        return lax.map(one, (jnp.asarray(self.steps.lanes, jnp.int32), cut, own), batch_size=group)

    def _turns(self, ids: Any, ins: list[Any], outs: list[Any], scratch: list[Any], starts: list[Any]) -> list[Any]:
        """Outputs of one lane; `starts` are `[T, axes]`, as NumPy where they are known."""
        turns = self.steps.turns
        if len(turns) == 1:
            first = [s if s is None else s[0] for s in starts]
            return self._step(_ids(ids, turns[0]), ins, outs, scratch, first)[0]
        still = [isinstance(s, np.ndarray) and (s == s[0]).all() for s in starts]
        moving = [None if q or s is None else jnp.asarray(s) for s, q in zip(starts, still)]

        def turn(carried: Any, scanned: Any) -> tuple[Any, None]:
            turn_ids, rows = scanned
            merged = [s[0] if q else r for s, q, r in zip(starts, still, rows)]
            return self._step(_ids(ids, turn_ids), ins, carried[0], carried[1], merged), None

        scanned = (jnp.asarray(turns, jnp.int32), moving)
        while True:  # kinds of outputs and scratch after any number of steps
            before = (*self.out_kinds, *self.scratch_kinds)
            jax.eval_shape(turn, (outs, scratch), jax.tree.map(lambda a: a[0], scanned))
            if (*self.out_kinds, *self.scratch_kinds) == before:
                break
        return lax.scan(turn, (outs, scratch), scanned)[0][0]

    def _step(
        self, ids: list[Value], ins: list[Any], outs: list[Any], scratch: list[Any], starts: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Output parts and scratch after one run of the kernel's body."""
        call = self.call
        evaluator = Evaluator(self.arithmetic, call.grid, ids)
        prefetched = [_whole(a, k) for a, k in zip(self.scalars, self.kinds)]
        rows = [s if s is not None else self._dynamic_start(op, evaluator) for s, op in zip(starts, self.operands)]
        refs = []
        kinds = [*self.kinds[call.num_prefetch :], *self.out_kinds]
        for op, array, row, kind in zip(self.operands, [*ins, *outs], rows, kinds):
            block = _cut(array, row, op.block).reshape(op.mapping.ref_shape)
            if op.mapping.role == "in":
                block = self.arithmetic.loaded(block, op.mapping.dtype, kind)
            refs.append(Ref(block, op.mapping.ref_shape, op.mapping.dtype, kind))
        tiles = [Ref(a, s.shape, s.dtype, k) for a, s, k in zip(scratch, call.scratch, self.scratch_kinds)]
        evaluator.run(call.jaxpr, [], [*prefetched, *refs, *tiles])
        written = refs[len(ins) :]
        self.out_kinds = [k | r.kind for k, r in zip(self.out_kinds, written)]
        self.scratch_kinds = [k | t.kind for k, t in zip(self.scratch_kinds, tiles)]
        results = [
            _pasted(array, ref.trimmed().reshape(op.block), row)
            for array, ref, op, row in zip(outs, written, self.operands[len(ins) :], rows[len(ins) :])
        ]
        return results, [t.trimmed() for t in tiles]

    def _dynamic_start(self, operand: Operand, evaluator: Evaluator) -> Any:
        """Start of a block that depends on prefetched scalars."""
        index = operand.mapping.index_map
        scalars = [_whole(a, k) for a, k in zip(self.scalars, self.kinds)]
        found = evaluator.run(index.jaxpr, index.consts, [*evaluator.ids, *scalars])
        row = jnp.stack([jnp.asarray(v.x, jnp.int32) for v in found if isinstance(v, Value)])
        return row * np.asarray(operand.block, np.int32) if operand.mapping.unit == "block" else row


def _ids(lane: Any, turn: Any) -> list[Value]:
    total = lane + turn
    if isinstance(total, np.ndarray):
        return [Value(np.int32(i), Kind.CONSTANT, int(i)) for i in total]
    return [Value(total[i].astype(jnp.int32)) for i in range(total.shape[0])]


def _whole(array: Any, kind: Kind) -> Ref:
    return Ref(jnp.asarray(array), jnp.shape(array), jnp.result_type(array), kind)


def _cut(array: Any, start: Any, block: tuple[int, ...]) -> Any:
    if array.shape == block:
        return array
    if isinstance(start, np.ndarray):
        return array[tuple(slice(int(s), int(s) + n) for s, n in zip(start, block))]
    return lax.dynamic_slice(array, [start[i] for i in range(len(block))], block)


def _pasted(array: Any, block: Any, start: Any) -> Any:
    if array.shape == block.shape:
        return block
    return lax.dynamic_update_slice(array, block, [start[i] for i in range(block.ndim)])
