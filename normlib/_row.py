"""What layer_norm and rms_norm share: one row, one set of statistics."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from normlib import _arguments as check
from normlib import quantize
from normlib._coded import coded
from normlib.engine import normalize
from normlib.moments import Moments
from normlib.scope import Scope


class RowNormOutput(NamedTuple):
    """What a row norm returns with `return_moments=True`.

    Attributes:
      y: x's shape and dtype; `normlib.quantize.Quantized` or `DualQuantized` with a `quant`.
      moments: count, mean, low and m2 of every row, of x's shape without the normalised axes; `moments.rstd(eps)` is
        the reciprocal standard deviation.
    """

    y: Array | quantize.Quantized | quantize.DualQuantized
    moments: Moments


def row_norm(
    x, scale, bias, *, axis, eps, centered, where, scale_offset, axis_name, axis_index_groups, method, rule, rescale,
    batch_invariant, backend, out_dtype=None, quant=None, norm_round_first=False, first=None,
) -> RowNormOutput:  # fmt: skip
    """Normalise over `axis`; shapes and errors as `normlib.layer.layer_norm`. `first` is one more mask of what is
    measured, behind which entries are real all the same: a dynamic quantiser ranges over them."""
    x = check.array(x)
    axes = check.axes(axis, x.ndim)
    where = check.mask(where, x)
    dtype = check.result_dtype(out_dtype, x.dtype)
    measured = where if first is None else first if where is None else first & where
    scope = Scope(names=check.names(axis_name), groups=check.groups(axis_index_groups), method=method)
    scale, bias = check.parameter(scale, "scale", x, axes), check.parameter(bias, "bias", x, axes)
    if quant is not None:
        quantize.out_dtype(quant, dtype)
        found = coded(
            [x], scale, bias, quant, axes=axes, eps=check.epsilon(eps), centered=centered, where=measured,
            scale_offset=scale_offset, scope=scope, backend=backend, rescale=rescale,
            norm_round_first=norm_round_first,
        )  # fmt: skip
        if found is not None:
            return RowNormOutput(found[0], jax.tree.map(lambda t: jnp.squeeze(t, axes), found[2]))
    out = normalize(
        x, scale, bias, axes=axes, eps=check.epsilon(eps), centered=centered, where=measured,
        scale_offset=scale_offset, scope=scope, rule=rule, rescale=rescale,
        batch_invariant=batch_invariant, backend=backend, out_dtype=quantize.out_dtype(quant, dtype),
    )  # fmt: skip
    y = quantize.finish(out.y, quant, dtype, axes=axes, where=where, scope=scope, norm_round_first=norm_round_first)
    return RowNormOutput(y, jax.tree.map(lambda t: jnp.squeeze(t, axes), out.moments))
