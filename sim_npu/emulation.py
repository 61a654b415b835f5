"""`emulate`: run a function with its Pallas kernels under the arithmetic of an AI Core."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sim_npu import pallas_adapter as adapter
from sim_npu.arguments import check_call, refuse_empty
from sim_npu.chips import ChipSpec
from sim_npu.grid import run_kernel
from sim_npu.precision import Kind, Order, PrecisionPolicy, resolve


def emulate(
    fn: Callable[..., Any],
    *args: Any,
    precision: PrecisionPolicy | str | None = None,
    order: Order | None = None,
    chip: ChipSpec | str | None = None,
    statistics: tuple[int, ...] = (),
) -> Any:
    """`fn(*args)`, every Pallas kernel in it evaluated with the rounding of `precision`.

    The kernels are neither compiled nor interpreted by Pallas: their bodies are evaluated as ordinary JAX, in float32
    containers, each vector result rounded exactly. Operations outside the kernels run as they are. Works under jit,
    vmap and scan; compiled once per `fn`, policy and shapes. Memory that a kernel reads before anyone wrote it is NaN.

    What it does not model: the bits of exp, log, tanh and the like (XLA's float32 result is rounded), float32
    subnormals in arithmetic (XLA on CPU flushes them), the order of sums inside a matrix product.

    Args:
      fn: function of arrays, or trees of them, that calls Pallas kernels, also inside jit, vmap, scan, cond, while
        and custom derivatives.
      args: its arguments.
      precision: a `PrecisionPolicy` or a preset's name, see `sim_npu.precision.PRESETS`. By default "fp32", or what
        the kernels of `chip` do.
      order: order of sums, see `sim_npu.reduction`; by default the policy's, or that of `chip`.
      chip: a chip's name or spec.
      statistics: positions of `args` that hold statistics of an earlier kernel: they are kept in the accumulator's
        type, as a statistic of this kernel is.

    Returns:
      What `fn(*args)` returns: same tree, shapes and dtypes.

    Raises:
      ValueError: on an unknown preset, order or chip, an array without elements, a block outside of its array, or
        `statistics` that are no positions of arguments.
      UnsupportedKernel: at a primitive without a rounding rule, with its name and source line.
      TypeError: for arguments that `fn` does not take, or that are no arrays; when differentiated: emulate the
        gradient instead, `emulate(jax.grad(fn), x)`.

    >>> from jax.experimental import pallas as pl
    >>> def halves(x_ref, y_ref):
    ...     y_ref[...] = x_ref[...] * 0.5 + 2048.0
    >>> def fn(x):
    ...     return pl.pallas_call(halves, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    >>> emulate(fn, jnp.array([1.0, 2.0, 3.0]), precision="fp16")
    Array([2048., 2048., 2050.], dtype=float32)
    """
    policy = resolve(precision, order, chip)
    check_call(fn, args, {})
    refuse_empty(args)
    for i, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg):
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int | complex):
                raise TypeError(f"`args[{i}]` must be an array, or a tree of them, since emulation runs; got {leaf!r}.")
    if isinstance(statistics, int | str) or not all(isinstance(i, int) and 0 <= i < len(args) for i in statistics):
        raise ValueError(f"`statistics` must hold positions of the {len(args)} arguments, from 0; got {statistics!r}.")
    compiled = _compiled if isinstance(fn, Hashable) else _compile
    return compiled(fn, policy, tuple(statistics))(*args)


def _compile(fn: Callable[..., Any], policy: PrecisionPolicy, statistics: tuple[int, ...]) -> Callable[..., Any]:
    run = jax.custom_jvp(jax.jit(functools.partial(_emulated, fn, policy, statistics)))

    @run.defjvp
    def _refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            "`emulate` has no derivative, for rounding has none; emulate the gradient: emulate(jax.grad(fn), x)."
        )

    return run


_compiled = functools.lru_cache(maxsize=256)(_compile)


def _emulated(fn: Callable[..., Any], policy: PrecisionPolicy, statistics: tuple[int, ...], *args: Any) -> Any:
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    kinds = [Kind.STATISTIC if i in statistics else Kind.INPUT for i in range(len(args))]
    flat = [(jnp.asarray(a), kind) for arg, kind in zip(args, kinds) for a in jax.tree.leaves(arg)]
    out = _evaluate(closed.jaxpr, [(c, Kind.INPUT) for c in closed.consts], flat, policy)
    return jax.tree.unflatten(jax.tree.structure(shapes), [x for x, _ in out])


# An array outside kernels, in its own dtype, and its kind.
Known = tuple[Any, Kind]


def _evaluate(jaxpr: Any, consts: Sequence[Known], args: Sequence[Known], policy: PrecisionPolicy) -> list[Known]:
    """Results of a jaxpr with its kernels under the policy."""
    env: dict[Any, Known] = {}
    env.update(zip(jaxpr.constvars, consts))
    env.update(zip(jaxpr.invars, args))

    def read(atom: Any) -> Known:
        if adapter.is_literal(atom):
            return jnp.asarray(atom.val, atom.aval.dtype), Kind.CONSTANT
        return env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _equation(eqn, [read(v) for v in eqn.invars], policy)))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, operands: list[Known], policy: PrecisionPolicy) -> list[Known]:
    if adapter.is_kernel_call(eqn):
        call = adapter.kernel_call(eqn)
        arrays, kinds = run_kernel(call, policy, [x for x, _ in operands], [k for _, k in operands])
        return list(zip(arrays, kinds))
    inner = adapter.inner_jaxpr(eqn)
    if inner is not None:
        return _evaluate(inner.jaxpr, _constants(inner), operands, policy)
    if adapter.contains(eqn, "pallas_call"):
        rule = {"scan": _scan, "while": _while, "cond": _cond}.get(eqn.primitive.name)
        if rule is None:
            raise adapter.UnsupportedKernel(
                f"a kernel inside `{eqn.primitive.name}` at {adapter.source_line(eqn)} cannot be reached; "
                "call `emulate` inside it instead."
            )
        return rule(eqn, operands, policy)
    out = eqn.primitive.bind(*(x for x, _ in operands), **eqn.params)
    kind = functools.reduce(lambda a, b: a | b, (k for _, k in operands), Kind.CONSTANT)
    return [(x, kind) for x in (out if eqn.primitive.multiple_results else [out])]


def _constants(closed: Any) -> list[Known]:
    return [(c, Kind.INPUT) for c in closed.consts]


def _settled(init: Sequence[Kind], turn: Callable[[list[Kind]], Sequence[Kind]]) -> list[Kind]:
    """Kinds of a loop's carry that hold in every turn."""
    kinds = list(init)
    while (merged := [a | b for a, b in zip(kinds, _found(turn, kinds))]) != kinds:
        kinds = merged
    return kinds


def _found(turn: Callable[[list[Kind]], Sequence[Kind]], kinds: list[Kind]) -> list[Kind]:
    """Kinds after one turn, traced on shapes alone."""
    found: list[Kind] = []

    def shapes() -> int:
        found.extend(turn(kinds))
        return 0

    jax.eval_shape(shapes)
    return found


def _scan(eqn: Any, operands: list[Known], policy: PrecisionPolicy) -> list[Known]:
    parts = adapter.scan_parts(eqn)
    first, last = parts.num_consts, parts.num_consts + parts.num_carry
    held, init, xs = operands[:first], operands[first:last], operands[last:]
    y_kinds: list[Kind] = []

    def turn(kinds: Sequence[Kind], carry: Sequence[Any], rows: Sequence[Any]) -> list[Known]:
        scanned = [(row, k) for row, (_, k) in zip(rows, xs)]
        items = [*held, *zip(carry, kinds), *scanned]
        return _evaluate(parts.body.jaxpr, _constants(parts.body), items, policy)

    rows = [jnp.zeros(x.shape[1:], x.dtype) for x, _ in xs]
    start = [x for x, _ in init]
    kinds = _settled([k for _, k in init], lambda k: [kind for _, kind in turn(k, start, rows)][: len(init)])

    def body(carry: Any, row: Any) -> tuple[Any, Any]:
        out = turn(kinds, carry, row)
        y_kinds[:] = [k for _, k in out[len(init) :]]
        arrays = [x for x, _ in out]
        return arrays[: len(init)], arrays[len(init) :]

    final, ys = lax.scan(body, start, [x for x, _ in xs], length=parts.length, reverse=parts.reverse)
    return [*zip(final, kinds), *zip(ys, y_kinds)]


def _while(eqn: Any, operands: list[Known], policy: PrecisionPolicy) -> list[Known]:
    condition, first, body, second = adapter.while_parts(eqn)
    asked, held, init = operands[:first], operands[first : first + second], operands[first + second :]

    def turn(kinds: Sequence[Kind], carry: Sequence[Any]) -> list[Known]:
        return _evaluate(body.jaxpr, _constants(body), [*held, *zip(carry, kinds)], policy)

    start = [x for x, _ in init]
    kinds = _settled([k for _, k in init], lambda k: [kind for _, kind in turn(k, start)])

    def goes_on(carry: Any) -> Any:
        return _evaluate(condition.jaxpr, _constants(condition), [*asked, *zip(carry, kinds)], policy)[0][0]

    final = lax.while_loop(goes_on, lambda carry: [x for x, _ in turn(kinds, carry)], start)
    return list(zip(final, kinds))


def _cond(eqn: Any, operands: list[Known], policy: PrecisionPolicy) -> list[Known]:
    (index, _), rest = operands[0], operands[1:]
    joined = [Kind.CONSTANT] * len(eqn.outvars)

    def branch(closed: Any) -> Callable[[Any], list[Any]]:
        def run(arrays: Any) -> list[Any]:
            items = [(x, k) for x, (_, k) in zip(arrays, rest)]
            out = _evaluate(closed.jaxpr, _constants(closed), items, policy)
            joined[:] = [a | k for a, (_, k) in zip(joined, out)]
            return [x for x, _ in out]

        return run

    results = lax.switch(index, [branch(b) for b in adapter.cond_parts(eqn)], [x for x, _ in rest])
    return list(zip(results, joined))
