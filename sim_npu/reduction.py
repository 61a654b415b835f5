"""Sums in a stated order, each addition rounded.

For a sum that includes the last axis (the lanes), over n elements:

  sequential   ((x0 + x1) + x2) + ...
  lanes64      64 running sums, lane l taking x[l], x[l + 64], ... in turn; then a tree over the lanes
  tree         neighbours in pairs, then pairs of pairs: (x0 + x1) + (x2 + x3), ...
  repeats      a tree inside each 256-byte repeat, then the repeats in sequence: ReduceSum of the A2
  halving      the second half added onto the first until 64 lanes are left, then a tree: RmsNorm of the A2
  native       whatever XLA does; the fastest, and not reproducible between versions

Short or odd lengths are filled with zeros, which change no sum. A sum over other axes adds whole rows of lanes, one
after the other; in "tree" and "halving" rows in pairs and in halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from sim_npu.precision import Order

LANES = 64
REPEAT_BYTES = 256

Add = Callable[[Array, Array], Array]


def ordered_sum(
    x: Float[Array, "*shape"], axes: Sequence[int], *, order: Order, add: Add = jnp.add, itemsize: int = 4
) -> Float[Array, "*kept"]:
    """Sum of `x` over `axes` in the given order.

    Args:
      x: any shape, float32.
      axes: axes to sum over; several count as one, the last of them fastest.
      order: see the module.
      add: the rounded addition.
      itemsize: bytes of an accumulator element, which decides the lanes of a repeat.

    Returns:
      `x`'s shape without `axes`.

    >>> x = jnp.array([2.0**24, 1.0, 1.0, -(2.0**24)])
    >>> [float(ordered_sum(x, [0], order=order)) for order in ("sequential", "tree")]
    [0.0, 1.0]
    """
    axes = sorted(a % x.ndim for a in axes)
    count = math.prod(x.shape[a] for a in axes)
    kept = [n for i, n in enumerate(x.shape) if i not in axes]
    if count == 0:
        return jnp.zeros(kept, x.dtype)
    if order == "native":
        return jnp.sum(x, axis=tuple(axes))
    rows = jnp.moveaxis(x, axes, range(len(axes))).reshape([count, *kept])  # summed elements lead: rows are contiguous
    if x.ndim - 1 not in axes:
        return {"tree": _pairs, "halving": _halves}.get(order, _sequence)(rows, add)
    if order == "sequential":
        return _sequence(rows, add)
    if order == "lanes64":
        lanes = _sequence(_padded(rows, LANES).reshape([-1, LANES, *kept]), add)
        return _pairs(lanes, add)
    if order == "repeats":
        lane_count = REPEAT_BYTES // itemsize
        repeats = _padded(rows, lane_count).reshape([-1, lane_count, *kept])
        return _sequence(_pairs(jnp.moveaxis(repeats, 1, 0), add), add)
    if order == "halving":
        return _pairs(_halves(rows, add, LANES), add)
    return _pairs(rows, add)


def _padded(rows: Array, multiple: int) -> Array:
    missing = -rows.shape[0] % multiple
    return jnp.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1)) if missing else rows


def _sequence(rows: Array, add: Add) -> Array:
    """((r0 + r1) + r2) + ..."""
    if rows.shape[0] == 1:
        return rows[0]
    total, _ = lax.scan(lambda acc, row: (add(acc, row), None), rows[0], rows[1:], unroll=min(8, rows.shape[0] - 1))
    return total


def _pairs(rows: Array, add: Add) -> Array:
    """Neighbours, then neighbours of the results, down to one."""
    rows = _padded(rows, 1 << (rows.shape[0] - 1).bit_length())
    while rows.shape[0] > 1:
        rows = lax.optimization_barrier(add(rows[0::2], rows[1::2]))
    return rows[0]


def _halves(rows: Array, add: Add, left: int = 1) -> Array:
    """The tail beyond a power of two onto the head, then the second half onto the first, until `left` are left."""
    count = rows.shape[0]
    if count <= left:
        return rows if left > 1 else rows[0]
    power = 1 << (count.bit_length() - 1)
    if count > power:
        rows = jnp.concatenate([add(rows[: count - power], rows[power:]), rows[count - power : power]])
    while rows.shape[0] > left:
        half = rows.shape[0] // 2
        rows = lax.optimization_barrier(add(rows[:half], rows[half:]))
    return rows if left > 1 else rows[0]
