"""What the emulator computes with: values that know their kind, and Refs that remember what was written."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sim_npu.precision import Kind

# A dynamic index of one axis: (start value, size, stride); size None drops the axis.
Span = tuple["Value", int | None, int]


@dataclasses.dataclass(frozen=True)
class Value:
    """An array in its container (float32 for any float of at most 32 bits) and what is known about it.

    Attributes:
      x: the array.
      kind: what it is made of.
      multiple: for a scalar integer, a number that divides it; 0 for zero itself.
    """

    x: Any
    kind: Kind = Kind.CONSTANT
    multiple: int = 1


def is_float(dtype: Any) -> bool:
    """Whether the dtype is a float."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def container(dtype: Any) -> Any:
    """dtype that values of `dtype` are held in.

    Raises:
      TypeError: for float64, which no AI Core has.
    """
    if not is_float(dtype):
        return dtype
    if jnp.dtype(dtype).itemsize > 4:
        raise TypeError(f"a kernel value has dtype {dtype}, which an AI Core does not have; use float32.")
    return jnp.dtype("float32")


def unwritten(shape: tuple[int, ...], dtype: Any) -> Any:
    """Memory nobody wrote: NaN for floats, so that a kernel which reads it shows; 0 for the rest."""
    held = container(dtype)
    return jnp.full(shape, jnp.nan if is_float(held) else 0, held)


@dataclasses.dataclass(frozen=True)
class RefState:
    """What must be known of a Ref before a loop over it is traced."""

    kind: Kind
    slack: tuple[int, ...]
    written: bool

    def __or__(self, other: RefState) -> RefState:
        slack = tuple(max(a, b) for a, b in zip(self.slack, other.slack))
        return RefState(self.kind | other.kind, slack, self.written or other.written)


class Ref:
    """A piece of memory while a kernel is evaluated: loads and stores replace its array.

    A slice whose start is known only at run time may reach beyond the end (the masked tail of a chunked row). XLA
    would shift such a slice back into bounds, so the array carries `slack` unwritten elements behind each axis, as
    many as the slices seen need.
    """

    def __init__(self, array: Any, shape: tuple[int, ...], dtype: Any, kind: Kind) -> None:
        self.array = array
        self.shape = shape
        self.dtype = dtype
        self.kind = kind
        self.slack = (0,) * len(shape)
        self.written = False

    def state(self) -> RefState:
        return RefState(self.kind, self.slack, self.written)

    def copy(self, array: Any, state: RefState) -> Ref:
        """Another Ref to the same place, for the body of a loop or a branch."""
        twin = Ref(array, self.shape, self.dtype, state.kind)
        twin.slack, twin.written = state.slack, state.written
        return twin

    def widen(self, slack: tuple[int, ...]) -> None:
        """Grow the array to at least this slack."""
        grow = [max(0, want - have) for want, have in zip(slack, self.slack)]
        if any(grow):
            filler = jnp.nan if is_float(self.array.dtype) else 0
            self.array = jnp.pad(self.array, [(0, g) for g in grow], constant_values=filler)
            self.slack = tuple(h + g for h, g in zip(self.slack, grow))

    def trimmed(self) -> Any:
        """The array without slack."""
        return self.array[tuple(slice(0, n) for n in self.shape)] if any(self.slack) else self.array

    def load(self, dims: tuple[Span, ...]) -> Any:
        """The slice at `dims`."""
        starts, extents, strides = self._reach(dims)
        part = lax.dynamic_slice(self.array, starts, extents) if dims else self.array
        if any(s > 1 for s in strides):
            part = part[tuple(slice(None, None, s) for s in strides)]
        return part.reshape([d[1] for d in dims if d[1] is not None])

    def store(self, dims: tuple[Span, ...], value: Value) -> None:
        """Write `value` at `dims`."""
        starts, extents, strides = self._reach(dims)
        whole = extents == list(self.array.shape) and all(s == 1 for s in strides)
        sizes = [1 if d[1] is None else d[1] for d in dims]
        part = jnp.broadcast_to(value.x, [d[1] for d in dims if d[1] is not None]).reshape(sizes)
        part = part.astype(self.array.dtype)
        if any(s > 1 for s in strides):
            old = lax.dynamic_slice(self.array, starts, extents)
            part = old.at[tuple(slice(None, None, s) for s in strides)].set(part)
        self.array = part if whole else lax.dynamic_update_slice(self.array, part, starts)
        self.kind = value.kind if whole else self.kind | value.kind
        self.written = True

    def _reach(self, dims: tuple[Span, ...]) -> tuple[list[Any], list[int], list[int]]:
        extents = [1 if size is None else (size - 1) * stride + 1 for _, size, stride in dims]
        self.widen(tuple(_slack(d[0], e, n) for d, e, n in zip(dims, extents, self.shape)))
        return [d[0].x for d in dims], extents, [d[2] for d in dims]


def _slack(start: Value, extent: int, length: int) -> int:
    """Elements that a slice of `extent` may reach beyond `length`, for a start inside the axis."""
    if isinstance(start.x, int | np.integer | np.ndarray):
        return max(0, int(start.x) + extent - length)
    if extent == 1:
        return 0
    if start.multiple % extent == 0:
        return -length % extent
    return extent - 1


def joined_multiple(*multiples: int) -> int:
    """The divisor known of a number that is one, or the sum, of several."""
    return math.gcd(*multiples)
