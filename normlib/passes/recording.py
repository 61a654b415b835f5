"""What the npu pass tells a profile: which kernels a traced operator launches, and how often they ran."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jaxtyping import Array

# User contexts are part of jit's cache key: a function compiled before is traced anew under a new recording.
_recording = jax.make_user_context(None)
_layout = jax.make_user_context(None)


@dataclass(eq=False)
class Call:
    """One call of a kernel function in a traced program.

    Attributes:
      kernel: the function that launches the kernels.
      shapes: of its arguments.
      chip: of the pass that ran it.
      runs: how often it ran.
    """

    kernel: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    chip: Any
    runs: int = 0

    def ran(self) -> None:
        """Count one run."""
        self.runs += 1


@dataclass(eq=False)
class Recording:
    """The calls traced while it was current."""

    calls: list[Call] = field(default_factory=list)


@contextlib.contextmanager
def recording(into: Recording):
    """Calls traced inside are added to `into`, and counted when they run."""
    with _recording(into):
        yield into


@contextlib.contextmanager
def layout():
    """Kernels traced inside stay kernels, to be laid out, not run."""
    with _layout(True):
        yield


def lays_out() -> bool:
    """Whether kernels stay kernels here."""
    return bool(_layout.value)


def record(kernel: Callable[..., Any], arrays: Sequence[Array], chip: Any) -> None:
    """Note a call for the current recording, if there is one."""
    current = _recording.value
    if current is None:
        return
    shapes = tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in arrays)
    call = Call(kernel, shapes, chip)
    current.calls.append(call)
    jax.debug.callback(functools.partial(_ran, call))


def _ran(call: Call) -> None:
    call.ran()
