"""The best tiling of a kernel, found on the simulator and remembered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array

import sim_npu
from normlib.kernels.tiling import Tiling
from sim_npu.chips import CHIPS
from sim_npu.footprint import CapacityError

_table: dict[str, Tiling] = {}


@dataclass(frozen=True)
class Tuner:
    """Chooses the tiling that takes least time on `chip`; every choice is made once in a process.

    Attributes:
      chip: name or `sim_npu.ChipSpec`.
    """

    chip: Any

    def __call__(
        self, name: str, operands: Sequence[Array], tilings: Sequence[Tiling], build: Callable[..., Any]
    ) -> Tiling:
        """The fastest of `tilings` for `build(tiling, *operands)`: what was chosen before, if it is one of them."""
        shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in operands]
        spec = sim_npu.get_chip(self.chip)
        operands_text = (f"{t.dtype.name}{list(t.shape)}".replace(" ", "") for t in shapes)
        key = " ".join([_called(spec), name, *operands_text])
        distinct = list(dict.fromkeys(replace(t, others=()) for t in tilings))
        if _table.get(key) not in distinct:  # a loaded table may be of another version, or for other results
            _table[key] = min(distinct, key=lambda t: self._us(build, t, shapes))
        return _table[key]

    def _us(self, build: Callable[..., Any], tiling: Tiling, shapes: Sequence[jax.ShapeDtypeStruct]) -> float:
        def call(*arrays: Array) -> Any:
            return build(tiling, *arrays)

        try:
            return sim_npu.simulate(call, *shapes, chip=self.chip, explain_capacity=False).total_us
        except CapacityError:
            return float("inf")


def _called(spec: sim_npu.ChipSpec) -> str:
    """Its name; of a chip that is not the preset of that name, with a mark of its numbers: what fits differs."""
    if CHIPS.get(spec.name) == spec:
        return spec.name
    return f"{spec.name}-{hashlib.sha256(repr(spec).encode()).hexdigest()[:8]}"


def tuned() -> dict[str, Tiling]:
    """What was chosen so far: "chip kernel operands" -> tiling."""
    return dict(_table)


def save(path: str | Path) -> None:
    """Write the choices as JSON: {"chip kernel operands": {"rows", "chunk", "streamed"}}, and "in_parts" where true."""
    rows = {
        k: {"rows": t.rows, "chunk": t.chunk, "streamed": t.streamed} | ({"in_parts": True} if t.in_parts else {})
        for k, t in sorted(_table.items())
    }
    Path(path).write_text(json.dumps(rows, indent=1) + "\n")


def load(path: str | Path) -> None:
    """Take over choices that `save` wrote. One that does not fit the norm it is for is chosen anew there.

    Raises:
      ValueError: if the file is not such a table; nothing is taken over then.
    """
    try:
        rows = json.loads(Path(path).read_text())
        read = {k: _tiling(**t) for k, t in rows.items()}
    except (TypeError, AttributeError, ValueError) as cause:
        raise ValueError(f"`path` {path} is no table of tilings as `save` writes it: {cause!r}.") from cause
    _table.update(read)


def _tiling(rows: Any, chunk: Any, streamed: Any, in_parts: Any = False) -> Tiling:
    """A tiling of a table; a ValueError for sizes that are none."""
    flags = type(streamed) is bool and type(in_parts) is bool
    if type(rows) is not int or type(chunk) is not int or min(rows, chunk) < 1 or not flags:
        raise ValueError(f"rows {rows!r}, chunk {chunk!r}, streamed {streamed!r}, in_parts {in_parts!r}")
    return Tiling(rows, chunk, streamed, in_parts=in_parts)
