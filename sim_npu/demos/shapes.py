"""Checks of the demonstration kernels' arguments."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def need_axes(name: str, array: Any, axes: str) -> None:
    """An array of real numbers with as many axes as `axes` names.

    >>> need_axes("x", jnp.zeros((2, 3)), "N, D")

    Raises:
      ValueError: for another number of axes, or another kind of dtype.
    """
    if array.ndim != len(axes.split(",")):
        raise ValueError(f"`{name}` must be [{axes}]; got shape {tuple(array.shape)}.")
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise ValueError(f"`{name}` must be of a float or integer dtype; got {array.dtype}.")


def need_shape(name: str, array: Any, shape: tuple[int, ...], why: str) -> None:
    """An array of exactly this shape.

    Raises:
      ValueError: for another shape; `why` says where it comes from.
    """
    if tuple(array.shape) != shape:
        raise ValueError(f"`{name}` must have shape {shape}, {why}; got {tuple(array.shape)}.")
