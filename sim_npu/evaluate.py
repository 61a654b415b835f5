"""Evaluate a kernel's jaxpr over Refs, with rounded arithmetic.

Refs are Python objects that loads and stores replace in place; loops and branches get copies whose arrays travel as
their carried state. What a loop's body does to a Ref (kind, slack, whether it writes) must be known before the loop
is traced, so the body is first evaluated on shapes alone until nothing new is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sim_npu import pallas_adapter as adapter
from sim_npu.arithmetic import SUPPORTED, Arithmetic
from sim_npu.precision import Kind
from sim_npu.sums import SumUses, sum_uses
from sim_npu.values import Ref, RefState, Span, Value, container, is_float, joined_multiple, unwritten

Item = Value | Ref


class Evaluator:
    """One kernel call under one policy.

    Attributes:
      arithmetic: rounding rules.
      grid: steps per axis.
      ids: the grid indices of this step, one Value per axis.
    """

    def __init__(self, arithmetic: Arithmetic, grid: tuple[int, ...], ids: Sequence[Value]) -> None:
        self.arithmetic = arithmetic
        self.grid = grid
        self.ids = tuple(ids)
        self.rules: dict[str, Callable[[Any, list[Item]], list[Item]]] = {
            "get": self._get,
            "swap": self._swap,
            "addupdate": self._addupdate,
            "masked_load": self._masked_load,
            "masked_swap": self._masked_swap,
            "atomic_rmw": self._atomic,
            "program_id": lambda eqn, _: [self.ids[eqn.params["axis"]]],
            "num_programs": lambda eqn, _: [_literal(self.grid[eqn.params["axis"]], np.dtype(np.int32))],
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "run_scoped": self._run_scoped,
            "debug_barrier_p": lambda *_: [],
        }

    def run(self, jaxpr: Any, consts: Sequence[Any], items: Sequence[Item], feeds: Sequence[bool] = ()) -> list[Item]:
        """Results of `jaxpr` on `items`. `feeds` says which results only feed sums outside.

        Raises:
          UnsupportedKernel: at a primitive without a rule, with its name and source line.
        """
        env: dict[Any, Item] = {}
        env.update(zip(jaxpr.constvars, map(_as_item, consts)))
        env.update(zip(jaxpr.invars, items))
        uses = sum_uses(jaxpr, tuple(feeds) or (False,) * len(jaxpr.outvars))
        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [_read(env, v) for v in eqn.invars], uses, env)
            env.update(zip(eqn.outvars, results))
        return [_read(env, v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, items: list[Item], uses: SumUses, env: dict[Any, Item]) -> list[Item]:
        name = eqn.primitive.name
        if name in ("get", "swap", "addupdate", "masked_load", "masked_swap", "atomic_rmw"):
            self._env = env
        if name in self.rules:
            return self.rules[name](eqn, items)
        if (inner := adapter.inner_jaxpr(eqn)) is not None:
            return self.run(inner.jaxpr, inner.consts, items, [uses.feeds_sum(v) for v in eqn.outvars])
        if name not in SUPPORTED:
            raise adapter.UnsupportedKernel(
                f"primitive `{name}` at {adapter.source_line(eqn)} has no rounding rule. "
                "Write it with arithmetic, comparisons, reductions, casts, loads and stores."
            )
        values = [v for v in items if isinstance(v, Value)]
        if self.arithmetic.policy.scale_before_sum and uses.is_divided(eqn):
            return list(values[:1])  # the division that the sum already did
        scale = uses.divisor(eqn) if self.arithmetic.policy.scale_before_sum else None
        feeds = uses.feeds_sum(eqn.outvars[0])
        return list(self.arithmetic(eqn, values, feeds_sum=feeds, scale=None if scale is None else 1.0 / scale))

    # Memory

    def _spans(self, dims: Sequence[Any]) -> tuple[Span, ...]:
        spans = []
        for d in dims:
            start, size, stride = d if isinstance(d, tuple) else (d, None, 1)
            spans.append((self._index(start), size, stride))
        return tuple(spans)

    def _index(self, start: Any) -> Value:
        if isinstance(start, int | np.integer):
            return _literal(int(start), np.dtype(np.int32))
        item = _read(self._env, start)
        assert isinstance(item, Value)
        return item

    def _get(self, eqn: Any, items: list[Item]) -> list[Item]:
        ref = _ref(items[0])
        return [Value(ref.load(self._spans(adapter.ref_index(eqn).dims)), ref.kind)]

    def _swap(self, eqn: Any, items: list[Item]) -> list[Item]:
        ref, value = _ref(items[0]), _value(items[1])
        spans = self._spans(adapter.ref_index(eqn).dims)
        old = Value(ref.load(spans), ref.kind)
        ref.store(spans, self._fitted(value, ref))
        return [old]

    def _addupdate(self, eqn: Any, items: list[Item]) -> list[Item]:
        ref, value = _ref(items[0]), _value(items[1])
        self._accumulate(ref, self._spans(adapter.ref_index(eqn).dims), value, None)
        return []

    def _accumulate(self, ref: Ref, spans: tuple[Span, ...], value: Value, mask: Any) -> Value:
        """Add `value` to a part of `ref`; the part as it was."""
        old = Value(ref.load(spans), ref.kind)
        kind = ref.kind | value.kind
        added = value.x if mask is None else jnp.where(mask, value.x, jnp.zeros_like(value.x))
        if is_float(ref.dtype):
            total = self.arithmetic.add(old.x, added, self.arithmetic.format_for(ref.dtype, kind))
        else:
            total = old.x + added
        ref.store(spans, Value(total, kind))
        return old

    def _masked_load(self, eqn: Any, items: list[Item]) -> list[Item]:
        index, other = adapter.masked_index(eqn)
        ref = _ref(items[0])
        loaded, kind = ref.load(self._spans(index.dims)), ref.kind
        if index.mask is not None:
            mask = _value(_read(self._env, index.mask)).x
            if other is None:
                filler = Value(unwritten(loaded.shape, ref.dtype))
            else:
                filler = _value(_read(self._env, other))
            fill = filler.x
            if is_float(ref.dtype):
                fill = self.arithmetic.rounded(
                    jnp.asarray(fill, jnp.float32), self.arithmetic.format_for(ref.dtype, kind)
                )
            loaded = jnp.where(mask, loaded, fill)
            kind |= filler.kind
        return [Value(loaded, kind)]

    def _masked_swap(self, eqn: Any, items: list[Item]) -> list[Item]:
        index, _ = adapter.masked_index(eqn)
        ref, value = _ref(items[0]), self._fitted(_value(items[1 if index.value is None else _place(eqn, index)]), ref_of(items))
        spans = self._spans(index.dims)
        old = ref.load(spans)
        kept = value.x if index.mask is None else jnp.where(_value(_read(self._env, index.mask)).x, value.x, old)
        kind = ref.kind
        ref.store(spans, Value(kept, value.kind if index.mask is None else value.kind | kind))
        return [Value(old, kind)]

    def _atomic(self, eqn: Any, items: list[Item]) -> list[Item]:
        ...
