"""Evaluate a kernel's jaxpr over Refs, with rounded arithmetic.

Refs are Python objects that loads and stores replace in place; loops and branches get copies whose arrays travel as
their carried state. What a loop's body does to a Ref (kind, slack, whether it writes) must be known before the loop
is traced, so the body is first evaluated on shapes alone until nothing new is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sim_npu import pallas_adapter as adapter
from sim_npu.arithmetic import SUPPORTED, Arithmetic
from sim_npu.known import Known, found_by, settle
from sim_npu.precision import Kind
from sim_npu.sums import SumUses, sum_uses
from sim_npu.values import Ref, Span, Value, container, is_float, unwritten

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
        self._caller = adapter.UNKNOWN_LINE  # of the call being evaluated: equations of library functions have no line
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
            outer, self._caller = self._caller, self._line(eqn)
            results = self.run(inner.jaxpr, inner.consts, items, [uses.feeds_sum(v) for v in eqn.outvars])
            self._caller = outer
            return results
        if name not in SUPPORTED:
            raise adapter.UnsupportedKernel(
                f"primitive `{name}` at {self._line(eqn)} has no rounding rule. "
                "Write it with arithmetic, comparisons, reductions, casts, loads and stores."
            )
        values = [v for v in items if isinstance(v, Value)]
        if self.arithmetic.policy.scale_before_sum and uses.is_divided(eqn):
            return list(values[:1])  # the division that the sum already did
        scale = uses.divisor(eqn) if self.arithmetic.policy.scale_before_sum else None
        feeds = uses.feeds_sum(eqn.outvars[0])
        return list(self.arithmetic(eqn, values, feeds_sum=feeds, scale=None if scale is None else 1.0 / scale))

    def _line(self, eqn: Any) -> str:
        line = adapter.source_line(eqn)
        return self._caller if line == adapter.UNKNOWN_LINE else line

    # Memory

    def _spans(self, dims: Sequence[Any]) -> tuple[Span, ...]:
        spans = []
        for d in dims:
            start, size, stride = d if isinstance(d, tuple) else (d, None, 1)
            spans.append((self._index(start), size, stride))
        return tuple(spans)

    def _index(self, start: Any) -> Value:
        return _literal(start, np.dtype(np.int32)) if isinstance(start, int | np.integer) else self._atom(start)

    def _atom(self, atom: Any) -> Value:
        return _value(_read(self._env, atom))

    def _array(self, atom: Any) -> Any:
        return self._atom(atom).x

    def _get(self, eqn: Any, items: list[Item]) -> list[Item]:
        ref = _ref(items[0])
        return [Value(ref.load(self._spans(adapter.ref_index(eqn).dims)), ref.kind)]

    def _swap(self, eqn: Any, items: list[Item]) -> list[Item]:
        ref, value = _ref(items[0]), _value(items[1])
        spans = self._spans(adapter.ref_index(eqn).dims)
        old = Value(ref.load(spans), ref.kind)
        ref.store(spans, value)
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
        index, (_, _, other) = adapter.masked_index(eqn), adapter.masked_operands(eqn)
        ref = _ref(items[0])
        loaded, kind = ref.load(self._spans(index.dims)), ref.kind
        if index.mask is None:
            return [Value(loaded, kind)]
        if other is None:
            return [Value(jnp.where(self._array(index.mask), loaded, unwritten(loaded.shape, ref.dtype)), kind)]
        fill = self._atom(other)
        entering = self.arithmetic.entering(fill, self.arithmetic.format_for(ref.dtype, kind | fill.kind))
        return [Value(jnp.where(self._array(index.mask), loaded, entering), kind | fill.kind)]

    def _masked_swap(self, eqn: Any, items: list[Item]) -> list[Item]:
        index = adapter.masked_index(eqn)
        ref, value, spans = _ref(items[0]), self._atom(index.value), self._spans(index.dims)
        old = Value(ref.load(spans), ref.kind)
        if index.mask is not None:
            value = Value(jnp.where(self._array(index.mask), value.x, old.x), value.kind | old.kind)
        ref.store(spans, value)
        return [old]

    def _atomic(self, eqn: Any, items: list[Item]) -> list[Item]:
        index = adapter.masked_index(eqn)
        mask = None if index.mask is None else self._array(index.mask)
        return [self._accumulate(_ref(items[0]), self._spans(index.dims), self._atom(index.value), mask)]

    def _run_scoped(self, eqn: Any, items: list[Item]) -> list[Item]:
        inner = eqn.params["jaxpr"]
        tiles = []
        for var in inner.invars:
            aval = var.aval
            if not isinstance(getattr(aval, "dtype", None), np.dtype):
                raise adapter.UnsupportedKernel(f"`run_scoped` at {adapter.source_line(eqn)}: {aval} is not an array.")
            tiles.append(Ref(unwritten(aval.shape, aval.dtype), aval.shape, aval.dtype, Kind.CONSTANT))
        return self.run(inner, items, tiles)

    # Control flow

    def _scan(self, eqn: Any, items: list[Item]) -> list[Item]:
        parts = adapter.scan_parts(eqn)
        first, last = parts.num_consts, parts.num_consts + parts.num_carry
        consts, init, xs = items[:first], [_value(v) for v in items[first:last]], [_value(v) for v in items[last:]]
        avals = [v.aval for v in parts.body.jaxpr.outvars]
        refs = _refs(items)

        def step(known: Known, carried: Any, scanned: Any) -> tuple[Any, Any, Known, list[Kind]]:
            twins, carry = known.inside(refs, carried)
            values = [*_replaced(consts, twins), *carry, *(Value(x, v.kind) for x, v in zip(scanned, xs))]
            out = [_value(v) for v in self.run(parts.body.jaxpr, parts.body.consts, values)]
            after, ys = out[: len(init)], out[len(init) :]
            arrays = [_held(v, a) for v, a in zip(out, avals)]
            found = Known.of(after, list(twins.values()))
            return (arrays[: len(init)], known.changed(twins)), arrays[len(init) :], found, [y.kind for y in ys]

        row = [jnp.zeros(jnp.shape(v.x)[1:], jnp.result_type(v.x)) for v in xs]
        known = settle(Known.before(init, refs), refs, lambda k: step(k, k.outside(init, refs), row))
        kinds: list[Kind] = []

        def body(carried: Any, scanned: Any) -> tuple[Any, Any]:
            carried, ys, _, kinds[:] = step(known, carried, scanned)
            return carried, ys

        final, stacked = lax.scan(
            body, known.outside(init, refs), [v.x for v in xs], length=parts.length, reverse=parts.reverse
        )
        return [*known.finish(refs, final), *(Value(y, k) for y, k in zip(stacked, kinds))]

    def _while(self, eqn: Any, items: list[Item]) -> list[Item]:
        condition, first, body, second = adapter.while_parts(eqn)
        asked, held, init = items[:first], items[first : first + second], [_value(v) for v in items[first + second :]]
        refs = _refs(items)

        def step(known: Known, carried: Any) -> tuple[Any, Known]:
            twins, carry = known.inside(refs, carried)
            out = [_value(v) for v in self.run(body.jaxpr, body.consts, [*_replaced(held, twins), *carry])]
            arrays = [_held(v, a.aval) for v, a in zip(out, body.jaxpr.outvars)]
            return (arrays, known.changed(twins)), Known.of(out, list(twins.values()))

        def goes_on(known: Known, carried: Any) -> tuple[Any, Known]:
            twins, carry = known.inside(refs, carried)
            (out,) = self.run(condition.jaxpr, condition.consts, [*_replaced(asked, twins), *carry])
            return _value(out).x, Known.of(carry, list(twins.values()))

        def both(known: Known) -> tuple[Any, Any, Known]:
            carried = known.outside(init, refs)
            again, seen = goes_on(known, carried)
            after, found = step(known, carried)
            return again, after, seen | found

        known = settle(Known.before(init, refs), refs, both)
        final = lax.while_loop(lambda c: goes_on(known, c)[0], lambda c: step(known, c)[0], known.outside(init, refs))
        return list(known.finish(refs, final))

    def _cond(self, eqn: Any, items: list[Item]) -> list[Item]:
        index, operands = _value(items[0]), items[1:]
        branches = adapter.cond_parts(eqn)
        refs = _refs(operands)
        avals = [v.aval for v in eqn.outvars]

        def branch(closed: Any, known: Known, carried: Any) -> tuple[Any, Known]:
            twins, _ = known.inside(refs, carried)
            out = [_value(v) for v in self.run(closed.jaxpr, closed.consts, _replaced(operands, twins))]
            arrays = [_held(v, a) for v, a in zip(out, avals)]
            return (arrays, known.changed(twins)), Known.of(out, list(twins.values()))

        def every(known: Known) -> tuple[Any, Known]:
            carried = known.outside([], refs)
            outs = [branch(b, known, carried) for b in branches]
            found = outs[0][1]
            for _, other in outs[1:]:
                found |= other
            return [o[0] for o in outs], found

        # Kinds of Refs inside a branch are those before it; only slack and writes must be known first.
        known = Known.before([], refs)
        while True:
            found = found_by(every, known)
            merged = known.with_memory(found)
            if merged == known:
                break
            known = merged
            known.widen(refs)
        carried = known.outside([], refs)
        results, arrays = lax.switch(index.x, [lambda c, b=b: branch(b, known, c)[0] for b in branches], carried)
        found.finish_memory(refs, known.placed(refs, arrays))
        return [Value(x, k, m) for x, k, m in zip(results, found.kinds, found.multiples)]


def _refs(items: Sequence[Item]) -> list[Ref]:
    return list({id(v): v for v in items if isinstance(v, Ref)}.values())


def _replaced(items: Sequence[Item], twins: dict[int, Ref]) -> list[Item]:
    return [twins[id(v)] if isinstance(v, Ref) else v for v in items]


def _held(value: Value, aval: Any) -> Any:
    return jnp.broadcast_to(jnp.asarray(value.x, container(aval.dtype)), aval.shape)


def _ref(item: Item) -> Ref:
    assert isinstance(item, Ref)
    return item


def _value(item: Item) -> Value:
    assert isinstance(item, Value)
    return item


def _literal(value: Any, dtype: Any) -> Value:
    x = np.asarray(value, container(dtype))
    whole = x.ndim == 0 and np.issubdtype(x.dtype, np.integer)
    return Value(x, Kind.CONSTANT, abs(int(x)) if whole else 1)


def _read(env: dict[Any, Item], atom: Any) -> Item:
    return _literal(atom.val, atom.aval.dtype) if adapter.is_literal(atom) else env[atom]


def _as_item(const: Any) -> Item:
    if isinstance(const, Value | Ref):
        return const
    return Value(jnp.asarray(const, container(jnp.result_type(const))), Kind.INPUT)
