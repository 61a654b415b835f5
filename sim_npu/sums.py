"""Which values of a jaxpr only feed sums, and which sums are at once divided by a constant.

The shipped A2 kernels keep such values in float32 beside fp16 rows, and scale by 1/D before they sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim_npu import pallas_adapter as adapter
from sim_npu.arithmetic import CASTING, COMPUTING, SELECTING

_SUMS = {"reduce_sum", "cumsum"}
_PASSING = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "copy"}
_THROUGH = SELECTING | COMPUTING | CASTING | _PASSING


class SumUses:
    """Result of `sum_uses`."""

    def __init__(self, feeding: set[Any], divisors: dict[int, float], divisions: set[int]) -> None:
        self._feeding = feeding
        self._divisors = divisors
        self._divisions = divisions

    def feeds_sum(self, var: Any) -> bool:
        """Whether every use of `var` ends in a sum."""
        return var in self._feeding

    def divisor(self, eqn: Any) -> float | None:
        """What this sum is divided by at once, else None."""
        return self._divisors.get(id(eqn))

    def is_divided(self, eqn: Any) -> bool:
        """Whether this equation is that division."""
        return id(eqn) in self._divisions


def sum_uses(jaxpr: Any, feeds: Sequence[bool]) -> SumUses:
    """Uses within `jaxpr`, whose results only feed sums where `feeds` says so."""
    users: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not adapter.is_literal(v):
                users.setdefault(v, []).append(eqn)
    returned = {v for v in jaxpr.outvars if not adapter.is_literal(v)}
    divisors: dict[int, float] = {}
    divisions: set[int] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reduce_sum" and (found := _division(eqn, users, returned)):
            divisors[id(eqn)] = found[1]
            divisions.add(id(found[0]))
    return SumUses(_feeding(jaxpr, feeds), divisors, divisions)


def _feeding(jaxpr: Any, feeds: Sequence[bool]) -> set[Any]:
    """Variables all of whose uses end in a sum."""
    verdict: dict[Any, bool] = {}

    def used(var: Any, good: bool) -> None:
        if not adapter.is_literal(var):
            verdict[var] = verdict.get(var, True) and good

    for var, good in zip(jaxpr.outvars, feeds):
        used(var, good)
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        results = [verdict.get(v, True) for v in eqn.outvars]
        inner = adapter.inner_jaxpr(eqn)
        if name in _SUMS:
            goods = [True] * len(eqn.invars)
        elif name in _THROUGH:
            goods = [all(results)] * len(eqn.invars)
        elif inner is not None:
            within = _feeding(inner.jaxpr, results)
            goods = [v in within for v in inner.jaxpr.invars]
        else:
            goods = [False] * len(eqn.invars)
        for var, good in zip(eqn.invars, goods):
            used(var, good)
    return {v for v, good in verdict.items() if good}


def _division(eqn: Any, users: dict[Any, list[Any]], returned: set[Any]) -> tuple[Any, float] | None:
    """The division by a constant that is the only use of this sum, and the constant."""
    var = eqn.outvars[0]
    while var not in returned and len(users.get(var, ())) == 1:
        (user,) = users[var]
        name = user.primitive.name
        if name in _PASSING:
            var = user.outvars[0]
            continue
        if name in ("div", "mul") and user.invars[0] is var and adapter.is_literal(user.invars[1]):
            constant = float(user.invars[1].val)
            if constant > 0:
                return user, constant if name == "div" else 1.0 / constant
        return None
    return None
