"""Arrays that are computed where they are read: a pass copies their operands, not a widened value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


@jax.tree_util.register_pytree_node_class
class Deferred:
    """`function(*operands)`, an array of `shape` and `dtype` that stands for x or dy in a pass of the XLA backend.

    A float32 sum of two 16-bit arrays, handed to a pass as an array, is written out (twice the bytes of x) because the
    pass puts a barrier before its operands. Deferred, the barrier is before the two 16-bit arrays and the sum is formed
    inside each loop.
    """

    def __init__(self, function: Callable[..., Array], operands: tuple[Any, ...], shape, dtype):
        self.function, self.operands = function, operands
        self.shape, self.dtype = tuple(shape), jnp.dtype(dtype)

    @property
    def ndim(self) -> int:
        """Rank."""
        return len(self.shape)

    def astype(self, dtype) -> Array:
        """The value, in `dtype`."""
        return self.function(*self.operands).astype(dtype)

    def tree_flatten(self):
        return self.operands, (self.function, self.shape, self.dtype)

    @classmethod
    def tree_unflatten(cls, static, operands):
        function, shape, dtype = static
        return cls(function, tuple(operands), shape, dtype)


def zeros(shape, dtype) -> Deferred:
    """Zeros that no pass reads from memory."""
    return Deferred(lambda: jnp.zeros(shape, dtype), (), shape, dtype)
