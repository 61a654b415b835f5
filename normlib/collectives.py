"""Which collectives a compiled step runs, and what for: statistics of norms, gradients of parameters, scalars.

Count manual modes (`shard_map`, `pmap`) in the StableHLO, `step.lower(...).as_text()`: there every collective that the
program wrote is still apart, while XLA's combiner later merges independent ones. Count a `jit` over a globally sharded
batch in the partitioned HLO, `step.lower(...).compile().as_text()`: its collectives do not exist before.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

_KINDS = (
    "all_reduce",
    "all_gather",
    "all_to_all",
    "reduce_scatter",
    "collective_permute",
    "collective_broadcast",
)


class Collective(NamedTuple):
    """One collective, as often as the program runs it.

    Attributes:
      kind: StableHLO's name, such as `all_reduce`.
      shapes: one per operand, per device.
      conditional: inside a branch of a `case` or `if`, so not run in every step.
      looped: inside a `while`: listed once, run once per round.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    conditional: bool = False
    looped: bool = False


@dataclass(frozen=True)
class CollectiveCount:
    """Collectives of one step, by purpose.

    Attributes:
      statistics: of norm layers, forward and backward, run in every step.
      conditional: inside a branch, whatever their purpose: run in some steps only.
      gradients: operands shaped like parameters.
      scalars: every operand has one element: losses, metrics, counters.
    """

    statistics: int = 0
    conditional: int = 0
    gradients: int = 0
    scalars: int = 0


@dataclass
class _Function:
    """A StableHLO function or an HLO computation: its own collectives, and its calls of others."""

    collectives: list[Collective] = field(default_factory=list)
    calls: list[tuple[str, bool, bool]] = field(default_factory=list)  # name, conditional, looped


def count_collectives(text: str, *, parameters: Any = ()) -> CollectiveCount:
    """Collectives of a lowered or compiled program, with those of statistics apart from those of gradients.

    A collective belongs to the gradients if each of its operands can be given to a parameter of the same shape (up to
    the order of dimensions and dimensions of size 1, which the compiler changes), each parameter being given once: a
    gradient is reduced once. What is neither that nor scalar nor conditional is of statistics.

    Args:
      text: StableHLO or HLO text.
      parameters: a tree of arrays, or of `jax.ShapeDtypeStruct`: the parameters that the step differentiates.

    Returns:
      The numbers, a function called twice being counted twice and a loop's body once.

    Raises:
      ValueError: `text` is neither StableHLO nor HLO.

    >>> import jax, jax.numpy as jnp
    >>> total = jax.pmap(lambda x: jax.lax.psum(x, "data"), axis_name="data")
    >>> count_collectives(total.lower(jnp.ones((1, 3))).as_text())
    CollectiveCount(statistics=1, conditional=0, gradients=0, scalars=0)
    """
    free = Counter(_key(leaf.shape) for leaf in jax.tree.leaves(parameters))
    statistics = conditional = gradients = scalars = 0
    for collective in list_collectives(text):
        wanted = Counter(_key(shape) for shape in collective.shapes if math.prod(shape) != 1)
        if collective.conditional:
            conditional += 1
        elif not wanted:
            scalars += 1
        elif wanted <= free:
            gradients += 1
            free -= wanted
        else:
            statistics += 1
    return CollectiveCount(statistics, conditional, gradients, scalars)


def list_collectives(text: str) -> tuple[Collective, ...]:
    """Every collective that a program runs, in the order of the text, calls followed.

    Args:
      text: StableHLO (`lowered.as_text()`) or HLO (`compiled.as_text()`).

    Raises:
      ValueError: `text` is neither.
    """
    if text.lstrip().startswith("HloModule"):
        functions, entry = _parse_hlo(text)
    elif "stablehlo" in text or "func.func" in text:
        functions, entry = _parse_stablehlo(text), "main"
    else:
        raise ValueError(
            f"`text` must be StableHLO (lowered.as_text()) or HLO (compiled.as_text()); got {text[:40]!r}."
        )
    if entry not in functions:
        raise ValueError(f"`text` has no entry function {entry!r}; expected the text of a whole program.")
    return tuple(_follow(functions, entry, False, False))


def _follow(functions: dict[str, _Function], name: str, conditional: bool, looped: bool) -> Iterator[Collective]:
    function = functions.get(name, _Function())
    for collective in function.collectives:
        yield collective._replace(conditional=collective.conditional or conditional, looped=collective.looped or looped)
    for callee, in_branch, in_loop in function.calls:
        yield from _follow(functions, callee, conditional or in_branch, looped or in_loop)


def _key(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size != 1))


def _shapes(types: str, pattern: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(size) for size in re.findall(r"\d+", dims)) for dims in re.findall(pattern, types))


# --- StableHLO: regions are nested in the text; a collective with a region has its types behind it ---

_TENSOR = r"tensor<((?:\d+x)*)[a-z]"
_SYMBOL = r'@("[^"]+"|[\w$.\-]+)'


def _parse_stablehlo(text: str) -> dict[str, _Function]:
    functions: dict[str, _Function] = {}
    current = _Function()
    regions: list[str] = []  # what opened each region that is still open

    def add(kind: str, line: str):
        operands = line.rpartition(" : ")[2].partition("->")[0]
        inside = set(regions)
        current.collectives.append(
            Collective(kind, _shapes(operands, _TENSOR), bool(inside & {"case", "if"}), "while" in inside)
        )

    for raw in text.splitlines():
        line = re.sub(r"\s+loc\(.*\)$", "", raw.strip())
        closed = ""
        if line.startswith("}"):
            closed = regions.pop() if regions else ""
            if closed in _KINDS and not line.endswith("{"):
                add(closed, line)
        found = re.search(r"(?:stablehlo|mhlo)\.(\w+)|func\.func", line)
        kind = (found.group(1) or "func") if found and not line.startswith("}") else closed
        kind = "while" if line == "cond {" else kind  # the regions of a while follow its own line
        if kind == "func" and not line.startswith("}"):
            name = re.search(_SYMBOL, line)
            current = functions.setdefault(name.group(1).strip('"') if name else "", _Function())
        if line.endswith("{"):
            regions.append(kind)
        elif kind in _KINDS and not line.startswith("}"):
            add(kind, line)
        for called in re.findall(rf"\bcall {_SYMBOL}|decomposition = {_SYMBOL}", line):
            inside = set(regions)
            current.calls.append(("".join(called).strip('"'), bool(inside & {"case", "if"}), "while" in inside))
    return functions


# --- HLO: one computation after the other, each line an instruction; operands are names of earlier ones ---

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_HLO_SHAPE = r"\b[a-z]\w*\[([\d,]*)\]"


def _parse_hlo(text: str) -> tuple[dict[str, _Function], str]:
    functions: dict[str, _Function] = {}
    current, entry, types = _Function(), "", dict[str, str]()
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            current, types = functions.setdefault(head.group(2), _Function()), {}
            entry = head.group(2) if head.group(1) else entry
            continue
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        name, result, opcode, rest = found.groups()
        types[name] = result
        kind = opcode.removesuffix("-start").replace("-", "_")
        if kind in _KINDS:
            operands = [types.get(operand, operand) for operand in re.findall(r"%?([\w.\-]+)", rest.partition(")")[0])]
            current.collectives.append(Collective(kind, _shapes(" ".join(operands), _HLO_SHAPE)))
        elif not opcode.endswith(("-done", "-update")):
            for key, names in re.findall(r"(\w+)=(\{%[^}]*\}|%[\w.\-]+)", rest):
                if key in ("calls", "to_apply", "body", "condition", "branch_computations") or key.endswith(
                    "_computation"
                ):
                    conditional = opcode == "conditional"
                    for callee in re.findall(r"%([\w.\-]+)", names):
                        current.calls.append((callee, conditional, opcode == "while"))
    return functions, entry
