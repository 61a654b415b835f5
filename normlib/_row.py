"""What layer_norm and rms_norm share: one row, one set of statistics."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from normlib import _arguments as check
from normlib.engine import normalize
from normlib.moments import Moments
from normlib.scope import Scope


class RowNormOutput(NamedTuple):
    """What a row norm returns with `return_moments=True`.

    Attributes:
      y: x's shape and dtype.
      moments: count, mean, low and m2 of every row, of x's shape without the normalised axes; `moments.rstd(eps)` is
        the reciprocal standard deviation.
    """

    y: Array
    moments: Moments


def row_norm(
    x, scale, bias, *, axis, eps, centered, where, scale_offset, axis_name, axis_index_groups, method, rule, rescale,
    batch_invariant, backend, out_dtype,
) -> RowNormOutput:  # fmt: skip
    """Normalise over `axis`; shapes and errors as `normlib.layer.layer_norm`."""
    x = check.array(x)
    axes = check.axes(axis, x.ndim)
    scope = Scope(names=check.names(axis_name), groups=check.groups(axis_index_groups), method=method)
    out = normalize(
        x, check.parameter(scale, "scale", x, axes), check.parameter(bias, "bias", x, axes), axes=axes,
        eps=check.epsilon(eps), centered=centered, where=check.mask(where, x), scale_offset=scale_offset, scope=scope,
        rule=rule, rescale=rescale, batch_invariant=batch_invariant, backend=backend, out_dtype=out_dtype,
    )  # fmt: skip
    return RowNormOutput(out.y, jax.tree.map(lambda t: jnp.squeeze(t, axes), out.moments))
