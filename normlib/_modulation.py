"""What the adaptive norms share: affine and modulation folded into one scale and one shift, in float32."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from normlib import _arguments as check
from normlib._forward import effective, wide_or_none
from normlib.precision import statistics_dtype


def factor(mod_scale, offset: float, x: Array) -> Array | None:
    """scale_offset + mod_scale in the wide dtype; None for 1."""
    offset = check.number(offset, "scale_offset")
    if mod_scale is None:
        return None if offset == 1 else jnp.full((1,) * x.ndim, offset, statistics_dtype(x))
    return effective(mod_scale, offset)


def combined(scale, bias, mod_scale, mod_shift, offset: float, x: Array):
    """(scale, bias, scale_offset) for the engine: (norm * scale + bias) * (offset + mod_scale) + mod_shift."""
    if scale is None and bias is None and mod_scale is not None:
        return mod_scale, mod_shift, offset  # as they are: the backward keeps them in their own dtype
    by = factor(mod_scale, offset, x)
    scale, bias, shift = (wide_or_none(t) for t in (scale, bias, mod_shift))
    if by is not None:
        scale = by if scale is None else scale * by
        bias = None if bias is None else bias * by
    return scale, shift if bias is None else bias if shift is None else bias + shift, 0.0


def looked_up(table, name: str, labels, x: Array) -> Array | None:
    """Rows of a class table, or the array as it is without labels."""
    if table is None or labels is None:
        return table
    table, labels = check.array(table, name), check.array(labels, "labels")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"`labels` must be integers; got {labels.dtype}.")
    if labels.shape != x.shape[:1] or table.ndim != 2:
        raise ValueError(
            f"`labels` must have shape {x.shape[:1]} and `{name}` be a table [classes, C]; got {labels.shape} and "
            f"{table.shape}."
        )
    return jnp.take(table, labels, axis=0, mode="fill", fill_value=jnp.nan)
