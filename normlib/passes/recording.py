"""What the npu pass tells a profile: which kernels a traced operator launches, and how often they ran."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
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
    """What was traced while it was current.

    Attributes:
      calls: those of kernels.
      elsewhere: arrays that kernels do not compute, as "dtype shape", in the order in which they came.
    """

    calls: list[Call] = field(default_factory=list)
    elsewhere: dict[str, None] = field(default_factory=dict)


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


def left_out(x: Array) -> None:
    """Note for the current recording, if there is one, that a norm of x (any shape) runs without kernels."""
    if _recording.value is not None:
        _recording.value.elsewhere[f"{x.dtype.name} {'x'.join(map(str, x.shape))}"] = None


def record(kernel: Callable[..., Any], arrays: Sequence[Array], chip: Any) -> Sequence[Array]:
    """Note a call for the current recording, if there is one; the arrays (any shapes) that the kernel is to be given.

    These are the same, through a callback that counts: one that took none of them would be lifted out of a loop that
    is differentiated, and be called once for all turns.
    """
    current = _recording.value
    if current is None:
        return arrays
    shapes = tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in arrays)
    call = Call(kernel, shapes, chip)
    current.calls.append(call)

    @jax.custom_batching.custom_vmap
    def counted(*arrays):
        jax.debug.callback(functools.partial(_ran, call), *map(_entry, arrays))
        return arrays

    @counted.def_vmap
    def _(size, batched, *arrays):  # a callback would be called for every member
        return counted(*arrays), tuple(batched)

    return counted(*arrays)


def _entry(t: Array) -> Array:
    """One entry of `t`, any shape: a callback that takes whole arrays may wait for itself on CPU."""
    sharding = jax.typeof(t).sharding
    if any(axes is not None for axes in sharding.spec):
        t = jax.sharding.reshard(t, NamedSharding(sharding.mesh, P()))
    return lax.slice(t, (0,) * t.ndim, (1,) * t.ndim)


def _ran(call: Call, *entries: Array) -> None:
    call.ran()
