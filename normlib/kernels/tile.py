"""Tiles: how a kernel reads and writes a part of its blocks, and how a kernel is launched.

A block is [rows, lanes], its outer axis squeezed. Operands that are constant along rows or lanes have a side of 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from normlib._varying import vary, varying
from normlib.kernels.machine import Machine
from normlib.moments import two_sum
from normlib.precision import wide_dtype

SUBLANES = 8  # rows that a part of a tile is a multiple of
SERIAL = 8  # rows that are added one after the other


@dataclass(frozen=True)
class Chunk:
    """Some lanes of a tile.

    Attributes:
      machine: where the kernel runs.
      start, size: the lanes; start may be traced.
      lanes: bool `[1, size]`, which of them are inside the array; None for all.
      rows: bool `[rows, 1]`, which rows are inside the array; None for all.
      count: number of lanes inside the array.
      first, height: the rows of a taller block that this part takes; None for all of its rows.
      real: bool `[rows, 1]`, which rows are inside the array where `rows` does not say it (no masks on loads); None for
        all.
      kept: where `add` leaves its values, `[rows, size]`, instead of their sum in a ref; None for the ref.
    """

    machine: Machine
    start: Any
    size: int
    lanes: Array | None
    rows: Array | None
    count: int
    first: Any = 0
    height: int | None = None
    real: Array | None = None
    kept: list[Array] | None = None

    def read(self, ref: Any, *, clean: bool = False) -> Array:
        """This part of `ref`, in its dtype; with `clean` 0 beyond the array, else anything there."""
        at, inside = self._at(ref)
        value = load(self.machine, ref, at, inside)
        if self.machine.masked:
            return value
        return jnp.where(inside, value, jnp.zeros((), ref.dtype)) if clean and inside is not None else value

    def write(self, ref: Any, value: Array) -> None:
        """Store `value` in this part of `ref`, rounded to its dtype."""
        at, inside = self._at(ref)
        store(self.machine, ref, at, inside, jnp.broadcast_to(value, self._shape(ref)))

    def add(self, ref: Any, value: Array) -> None:
        """Add the sum of `value` over rows to this part of `ref`, `[1, lanes]`."""
        if self.real is not None:
            value = jnp.where(self.real, value, jnp.zeros((), value.dtype))
        if self.kept is not None:
            self.kept.append(value)
            return
        at, _ = self._at(ref)
        ref[at] += jnp.sum(value, 0, keepdims=True)

    def clean(self, value: Array) -> Array:
        """`value`, `[rows, size]`, with 0 beyond the array."""
        inside = self._inside(value.shape)
        return value if inside is None else jnp.where(inside, value, jnp.zeros((), value.dtype))

    def _at(self, ref: Any) -> tuple[Any, Array | None]:
        tall = self.height is not None and ref.shape[0] != 1
        rows = pl.ds(self.first, self.height) if tall else slice(None)
        whole = self._is_column(ref) or (ref.shape[-1] == self.size and isinstance(self.start, int) and not self.start)
        lanes = slice(None) if whole else pl.ds(self.start, self.size)
        return (rows, lanes), self._inside(self._shape(ref))

    def _shape(self, ref: Any) -> tuple[int, int]:
        height = ref.shape[0] if self.height is None or ref.shape[0] == 1 else self.height
        return height, 1 if self._is_column(ref) else self.size

    @staticmethod
    def _is_column(ref: Any) -> bool:
        return ref.shape[-1] == 1

    def _inside(self, shape: tuple[int, ...]) -> Array | None:
        rows = self.rows if shape[0] != 1 else None
        lanes = self.lanes if shape[-1] != 1 else None
        if rows is None or lanes is None:
            found = rows if lanes is None else lanes
            return None if found is None else jnp.broadcast_to(found, shape)
        return rows & lanes


class Band:
    """Some rows of a taller block, as a ref of that many rows: what a program that walks its block has as a tile."""

    def __init__(self, ref: Any, first: Any, height: int):
        self.ref, self.rows, self.shape, self.dtype = ref, pl.ds(first, height), (height, *ref.shape[1:]), ref.dtype

    @property
    def at(self) -> Band:
        """For `band.at[rows, lanes]`, a part of the block's ref."""
        return _Part(self.ref.at, self.rows)  # type: ignore[return-value]

    def __getitem__(self, index: Any) -> Array:
        return self.ref[_banded(index, self.rows)]

    def __setitem__(self, index: Any, value: Array) -> None:
        self.ref[_banded(index, self.rows)] = value


@dataclass(frozen=True)
class _Part:
    at: Any
    rows: Any

    def __getitem__(self, index: Any) -> Any:
        return self.at[_banded(index, self.rows)]


def _banded(index: Any, rows: Any) -> tuple[Any, Any]:
    """`index` of a band, which takes all of its rows, as one of the block."""
    return (rows, slice(None)) if index is Ellipsis else (rows, index[1])


def load(machine: Machine, ref: Any, at: Any, inside: Array | None) -> Array:
    """`ref[at]`, of its shape; where the machine masks, 0 for what is not `inside` the array."""
    if machine.masked and inside is not None:
        return pltriton.load(ref.at[at], mask=inside, other=jnp.zeros((), ref.dtype))
    return ref[at]


def store(machine: Machine, ref: Any, at: Any, inside: Array | None, value: Array) -> None:
    """`ref[at] = value`, rounded to its dtype; where the machine masks, only what is `inside` the array."""
    if machine.masked and inside is not None:
        pltriton.store(ref.at[at], value.astype(ref.dtype), mask=inside)
    else:
        ref[at] = value.astype(ref.dtype)


@dataclass(frozen=True)
class _Guarded:
    """A ref of which rows beyond the array are not read: they are 0."""

    ref: Any
    machine: Machine
    rows: Array

    def __getitem__(self, index: Any) -> Array:
        assert index is Ellipsis
        return Chunk(self.machine, 0, self.ref.shape[1], None, self.rows, 0).read(self.ref, clean=True)


def guarded(refs: Sequence[Any], machine: Machine, rows: Array | None) -> Sequence[Any]:
    """`refs` to be read as a whole, `ref[...]`; where the machine masks, only the `rows` inside the array."""
    return refs if rows is None or not machine.masked else [_Guarded(ref, machine, rows) for ref in refs]


def inside(first: Any, size: int, limit: int, axis: int) -> Array:
    """bool `[size, 1]` or `[1, size]` (axis 0 or 1): which of `first + i` lie below `limit`."""
    shape = (size, 1) if axis == 0 else (1, size)
    return first + lax.broadcasted_iota(jnp.int32, shape, axis) < limit


def fold(
    machine: Machine, length: int, chunk: int, rows: Array | None, step: Callable[[Chunk, Any], Any],
    first: Callable[[Chunk], Any], real: Array | None = None,
) -> Any:  # fmt: skip
    """Run over the `length` lanes of a tile in chunks: `first(chunk)`, then `carry = step(chunk, carry)`."""
    full, tail = divmod(length, chunk)

    def part(i: Any, size: int) -> Chunk:
        lanes = None if size == chunk else inside(0, chunk, size, 1)
        return Chunk(machine, i * chunk, chunk, lanes, rows, size, real=real)

    carry = first(part(0, min(length, chunk)))
    if full > 1:
        carry = lax.fori_loop(1, full, lambda i, c: step(part(i, chunk), c), carry)
    return step(part(full, tail), carry) if tail and full else carry


@dataclass(frozen=True)
class Operand:
    """An array of a kernel with its block and where the block lies at a grid step."""

    array: Any  # an array, or a jax.ShapeDtypeStruct of an output
    block: tuple[int | None, ...]
    index: Callable[..., tuple[Any, ...]]

    @property
    def spec(self) -> pl.BlockSpec:
        """For Pallas."""
        return pl.BlockSpec(self.block, self.index)


def launch(
    kernel: Callable[..., None], name: str, grid: tuple[int, ...], inputs: Sequence[Operand],
    outputs: Sequence[Operand], machine: Machine, *, semantics: tuple[str, ...], entries: int, scratch: Sequence = (),
    columns: bool = False,
) -> list[Array]:  # fmt: skip
    """Call `kernel(*input_refs, *output_refs, *scratch_refs)`; outputs vary over the mesh axes that any input does."""
    names = sorted(set().union(*(varying(o.array) for o in inputs)))
    arrays = [vary(o.array, names) for o in inputs]
    vary_over = jax.sharding.ManualAxisType(varying=frozenset(names))  # must be said inside a typed shard_map
    found = pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=[o.spec for o in inputs],
        out_specs=[o.spec for o in outputs],
        out_shape=[jax.ShapeDtypeStruct(o.array.shape, o.array.dtype, manual_axis_type=vary_over) for o in outputs],
        scratch_shapes=list(scratch),
        compiler_params=machine.compiler_params(semantics, entries, columns=columns),
        interpret=machine.interpret,
    )(*(lax.optimization_barrier(arrays) if machine.interpret else arrays))
    # a grid of one step is inlined: what is around it would change how its products and sums are contracted
    return lax.optimization_barrier(found) if machine.interpret else found


def output(shape: tuple[int, ...], dtype: Any, block: tuple[int | None, ...], index: Callable) -> Operand:
    """An output of a kernel."""
    return Operand(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), block, index)


def widened(t: Array) -> Array:
    """`t` in the dtype that kernels compute in."""
    return t.astype(wide_dtype(t.dtype))


def rows_per_tile(rows: int, wanted: int, machine: Machine) -> int:
    """`wanted` rows (at least 1, at most `rows`), rounded to what the machine's tiles allow."""
    wanted = max(1, min(wanted, rows))
    if machine.power_of_two:
        return 1 << (wanted.bit_length() - 1)
    multiple = machine.row_multiple
    if rows <= multiple:
        return rows
    return max(multiple, wanted // multiple * multiple)


def rows_that_fit(operands: Sequence[Array], lanes: int, machine: Machine, *, size: int, extra: int) -> int:
    """Rows of a tile of `lanes` lanes that fit with both buffers of every operand.

    Args:
      operands: as [1|A, 1|M, 1|L].
      lanes: of the tile.
      machine: where it runs.
      size: entries of a full operand.
      extra: bytes per entry of outputs and temporaries.
    """
    if machine.masked:
        return max(1, machine.entries // lanes)
    width = pl.cdiv(lanes, machine.lane_multiple) * machine.lane_multiple
    entry = extra + sum(2 * t.dtype.itemsize for t in operands if t.size == size)
    fixed = width * sum(2 * t.dtype.itemsize for t in operands if t.shape[2] != 1 and t.size != size)
    columns = sum(1 for t in operands if t.shape[2] == 1 and t.shape[1] != 1)
    row = width * entry + (machine.row_bytes // 10 * columns)
    return max(1, (machine.tile_bytes - fixed) // row)


def lanes_per_tile(lanes: int, wanted: int, machine: Machine) -> int:
    """`wanted` lanes, rounded to what the machine's tiles allow: all of them, or a multiple of its lanes."""
    if machine.power_of_two:
        return min(pl.next_power_of_2(lanes), 1 << (max(wanted, 1).bit_length() - 1))
    if lanes <= wanted:
        return lanes
    return max(machine.lane_multiple, wanted // machine.lane_multiple * machine.lane_multiple)


def weighted(tiles: Sequence[Array], weights: Sequence[float]) -> Array:
    """The weighted sum of tiles, from left to right."""
    found = [t if w == 1 else t * w for t, w in zip(tiles, weights, strict=True)]
    return functools.reduce(lambda a, b: a + b, found)


def sum_rows(t: Array, machine: Machine, serial: int = SERIAL) -> Array:
    """The sum over axis 0, kept as 1, in stages: of n rows added one after the other it is off by sqrt(n) / 6 ulp.

    At most `serial` rows are added so. Stages are sums and not additions of entries: where values are 16-bit, only sums
    are wider. Triton sums in a tree by itself, and has no parts of a value.
    """
    n = t.shape[0]
    if machine.masked or n <= max(serial, SERIAL):
        return jnp.sum(t, 0, keepdims=True)
    whole = n // SUBLANES * SUBLANES
    head = t if whole == n else t[:whole]
    total = sum_rows(jnp.sum(head.reshape(n // SUBLANES, SUBLANES, *t.shape[1:]), 1), machine, serial)
    return total if whole == n else total + jnp.sum(t[whole:], 0, keepdims=True)


def at_least_zero(t: Array) -> Array:
    """`t`, or 0 where it is negative; NaN stays: Triton's maximum loses it, and with it an overflow (seen on H200)."""
    return jnp.where(t < 0, jnp.zeros((), t.dtype), t)


def activated(activation: Callable[[Array], Array] | None, z: Array, machine: Machine) -> Array:
    """`activation(z)`, or z without one; NaN stays, where Triton's maximum (of a ReLU) would lose it."""
    if activation is None:
        return z
    return jnp.where(z == z, activation(z), z) if machine.masked else activation(z)


def quotient(t: Array, by: Array | float, machine: Machine) -> Array:
    """t / by, of a tile and a number or `[1, 1]`, with the same bits wherever it is used.

    XLA turns a division by what is broadcast into a product with the reciprocal, in one of two fusions that compute it,
    say, and compilers contract products with sums: a mean that is subtracted would not be the one that is kept (seen
    on CPU: 6e-5 of a mean of 1e3, in 0.5 % of the rows). So the divisor depends on t where that can happen.
    """
    if not (machine.interpret or machine.masked):
        return t * (1.0 / by) if isinstance(by, float) else t / by
    return t / (jnp.where(t - t == 0, t, jnp.zeros((), t.dtype)) * 0.0 + by)


def chan(mine: tuple[Array, ...], other: tuple[Array, ...], machine: Machine) -> tuple[Array, ...]:
    """(count, mean, low, m2) of two sets together, float32 tiles; the mean stays in two words."""
    count, mean, low, m2 = mine
    n, other_mean, other_low, other_m2 = other
    total = count + n
    safe = jnp.maximum(total, 1.0)
    apart = (other_mean - mean) + (other_low - low)
    mean, low = two_sum(mean, low + quotient(apart * n, safe, machine))
    return total, mean, low, m2 + other_m2 + apart * apart * (count * (n / safe))
