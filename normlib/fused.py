"""Norms of a sum, as residual networks have them: y and the sum from one operator, rounded once each.

Outputs are named, y first, the residual sum after it. The in-place operators of other libraries (y over x1, the sum
over x2) are these functions under donation:

    step = jax.jit(normlib.add_rms_norm, donate_argnums=(0, 1))

XLA then writes y and the residual into the donated buffers; the compiled module's `input_output_alias` table says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib import quantize
from normlib._coded import coded
from normlib._composed import composed
from normlib._row import RowNormOutput
from normlib.moments import Moments
from normlib.precision import output_dtype, rounded
from normlib.quantize import DualQuantized, Quantized
from normlib.scope import Scope

MOST_SUMMED = 5


class AddNormOutput(NamedTuple):
    """What the norms of a sum return.

    Attributes:
      y: the normalised sum, in the shape and common dtype of the summed arrays; codes and scales with `quant`.
      residual: the sum itself, in the same dtype: the residual stream of a pre-norm model.
      moments: of every row, without the normalised axes; `moments.rstd(eps)` is the reciprocal standard deviation.
    """

    y: Array | Quantized | DualQuantized
    residual: Array
    moments: Moments


class AddNormCastOutput(NamedTuple):
    """What `add_rms_norm_cast` returns: as `AddNormOutput`, and `y_wide`, y widened to float32 after its rounding."""

    y: Array
    y_wide: Array
    residual: Array
    moments: Moments


def add_layer_norm(
    x1: Num[Array, ...],
    x2: Num[Array, ...],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    sum_bias: Float[Array, ...] | None = None,
    axis: check.Axes = -1,
    eps: float = 1e-5,
    where: Bool[Array, ...] | None = None,
    scale_offset: float = 0.0,
    residual_round_first: bool = False,
    axis_name=None,
    axis_index_groups=None,
    method: str = "auto",
    rule: str = "reverse",
    rescale: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
    quant=None,
    norm_round_first: bool = False,
    out_dtype: DTypeLike | None = None,
) -> AddNormOutput:
    """Layer normalization of a sum; returns the sum too.

        s = x1 + x2 + sum_bias;   y = (s - mean) / sqrt(var + eps) * (scale + scale_offset) + bias;   residual = s

    Args:
      x1: `[..., D]`, or any shape with `axis` naming the normalised axes; summed in float32 (float64 for float64).
      x2: of x1's shape; the dtypes may differ, y and residual have the common one.
      scale: the shape of x1 along `axis` (`[D]`), or of its rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      sum_bias: likewise, added to the sum before it is measured, or None.
      axis: normalised axis or axes.
      eps: added to the variance inside the root, in units of x squared; with 0 a set of equal entries is NaN.
      where: bool, broadcastable to x1: which entries are measured.
      scale_offset: added to `scale` in float32.
      residual_round_first: round s to its dtype before it is measured, as an unfused sum would be. False: statistics
        and y come from the float32 sum.
      axis_name: mesh axis or axes over which the normalised axis is split.
      axis_index_groups: groups of indices along `axis_name`; only devices of one group share.
      method: how devices pool; see `normlib.scope.Scope`.
      rule: "reverse", "both" or "autodiff"; see `normlib.engine.normalize`.
      rescale: protect float32 from overflow of squares above 1e19, at the price of another pass.
      batch_invariant: y of a row does not change by a bit with the number of rows beside it.
      backend: which pass runs it; None for the one of `normlib.use_backend`.
      quant: quantise y: a `normlib.Static`, `Dual`, `Dynamic`, `Asymmetric`, `MX` or `StraightThrough`, as
        `normlib.layer_norm` does; the residual stays as it is.
      norm_round_first: round y to its dtype before quantising; False quantises the float32 value.
      out_dtype: dtype of y, rounded once from float32; that of the sum where None.

    Returns:
      `AddNormOutput(y, residual, moments)`, y and residual rounded once each. With `quant` y is `Quantized` or
      `DualQuantized`: codes with their scale.

    Raises:
      ValueError: for shapes, axes or groups that do not fit, or eps < 0.
      TypeError: for a mask that is not boolean, or a `quant` that is none of the kinds.
      NameError: if `axis_name` is not bound here.

    Gradients: ds = J^T dy + d(residual), added in float32 and rounded once; dx1 = dx2 = ds, d(sum_bias) = sum of ds.
    The backward keeps x1 and x2 (16-bit, not rounded first) or s, and the statistics.

    Source: Ba, Kiros and Hinton 2016 for the norm; ops-nn's AddLayerNorm for the operator.

    >>> out = add_layer_norm(jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 1.0]]))
    >>> out.y.round(2).tolist(), out.residual.tolist()
    ([[-1.0, 1.0]], [[1.0, 3.0]])
    """
    return _add_norm(
        {"x1": x1, "x2": x2}, scale, bias, sum_bias=sum_bias, axis=axis, eps=eps, where=where,
        scale_offset=scale_offset, round_first=residual_round_first, axis_name=axis_name,
        axis_index_groups=axis_index_groups, method=method, rule=rule, rescale=rescale,
        batch_invariant=batch_invariant, backend=backend,
        quant=quant, norm_round_first=norm_round_first, out_dtype=out_dtype,
    )  # fmt: skip


def add_rms_norm(
    x1: Num[Array, ...],
    x2: Num[Array, ...],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    sum_bias: Float[Array, ...] | None = None,
    axis: check.Axes = -1,
    eps: float = 1e-6,
    where: Bool[Array, ...] | None = None,
    scale_offset: float = 0.0,
    residual_round_first: bool = False,
    axis_name=None,
    axis_index_groups=None,
    rule: str = "reverse",
    rescale: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
    quant=None,
    norm_round_first: bool = False,
    out_dtype: DTypeLike | None = None,
) -> AddNormOutput:
    """Root mean square normalization of a sum; returns the sum too.

        s = x1 + x2 + sum_bias;   y = s / sqrt(mean(s**2) + eps) * (scale + scale_offset) + bias;   residual = s

    Args, returns, raises, gradients: as `add_layer_norm`, with x1 and x2 `[..., D]`, scale, bias and sum_bias `[D]`;
    `moments.var` is the mean square.

    Source: Zhang and Sennrich 2019 for the norm; ops-nn's AddRmsNorm for the operator.

    >>> out = add_rms_norm(jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 0.0]]))
    >>> out.y.round(2).tolist(), out.residual.tolist()
    ([[1.0, 1.0]], [[2.0, 2.0]])
    """
    return _add_norm(
        {"x1": x1, "x2": x2}, scale, bias, sum_bias=sum_bias, axis=axis, eps=eps, centered=False, where=where,
        scale_offset=scale_offset, round_first=residual_round_first, axis_name=axis_name,
        axis_index_groups=axis_index_groups, rule=rule, rescale=rescale, batch_invariant=batch_invariant,
        backend=backend,
        quant=quant, norm_round_first=norm_round_first, out_dtype=out_dtype,
    )  # fmt: skip


def add_rms_norm_cast(
    x1: Num[Array, ...],
    x2: Num[Array, ...],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    **options,
) -> AddNormCastOutput:
    """`add_rms_norm` with y in two dtypes: its own, and widened to float32 for a consumer that computes there.

    Args, raises: as `add_rms_norm`; `options` are its keyword arguments.

    Returns:
      `AddNormCastOutput(y, y_wide, residual, moments)`, all but the moments in x1's shape, with y_wide equal to y.
      Cotangents of both are added.

    Source: ops-nn's AddRmsNormCast.

    >>> add_rms_norm_cast(jnp.ones((1, 2), jnp.bfloat16), jnp.ones((1, 2), jnp.bfloat16)).y_wide.dtype
    dtype('float32')
    """
    if options.get("quant") is not None:
        raise ValueError("`quant` has no widened copy; call `add_rms_norm` with it and widen the dequantised codes.")
    out = add_rms_norm(x1, x2, scale, bias, **options)
    assert isinstance(out.y, jax.Array)
    wide = jnp.promote_types(out.y.dtype, jnp.float32)
    copy = rounded(out.y.astype(wide), out.y.dtype).astype(wide)  # of the rounded y, whatever XLA makes of the casts
    return AddNormCastOutput(out.y, copy, out.residual, out.moments)


def multi_add_rms_norm(
    x1: Sequence[Num[Array, ...]],
    x2: Num[Array, ...],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    axis: check.Axes = -1,
    eps: float = 1e-6,
    where: Bool[Array, ...] | None = None,
    scale_offset: float = 0.0,
    residual_round_first: bool = False,
    rule: str = "reverse",
    rescale: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
    quant=None,
    norm_round_first: bool = False,
) -> AddNormOutput:
    """Root mean square normalization of the sum of several arrays, as the outputs of experts or of tensor slices.

        s = sum_i x1[i] + x2;   y = s / sqrt(mean(s**2) + eps) * (scale + scale_offset) + bias;   residual = s

    Args:
      x1: 1 to 5 arrays of x2's shape, summed from left to right in float32, x2 last.
      x2: `[..., D]`, or any shape with `axis` naming the normalised axes.

    The other arguments, returns, raises and gradients are those of `add_rms_norm`.

    Source: ops-nn's MultiAddRmsNormDynamicQuant.

    >>> multi_add_rms_norm([jnp.ones((1, 2))] * 3, jnp.ones((1, 2))).residual.tolist()
    [[4.0, 4.0]]
    """
    if not isinstance(x1, Sequence) or not 1 <= len(x1) <= MOST_SUMMED:
        seen = f"{len(x1)}" if isinstance(x1, Sequence) else type(x1).__name__
        raise ValueError(f"`x1` must be a list of 1 to {MOST_SUMMED} arrays; got {seen}. Stack larger sums first.")
    terms = {f"x1[{i}]": t for i, t in enumerate(x1)} | {"x2": x2}
    return _add_norm(
        terms, scale, bias, axis=axis, eps=eps, centered=False, where=where, scale_offset=scale_offset,
        round_first=residual_round_first, rule=rule, rescale=rescale, batch_invariant=batch_invariant, backend=backend,
        quant=quant, norm_round_first=norm_round_first,
    )  # fmt: skip


def deep_norm(
    x: Num[Array, ...],
    gx: Num[Array, ...],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    alpha: float = 0.3,
    axis: check.Axes = -1,
    eps: float = 1e-6,
    where: Bool[Array, ...] | None = None,
    rule: str = "reverse",
    rescale: bool = False,
    batch_invariant: bool = False,
    return_moments: bool = False,
    backend: str | None = None,
) -> Array | RowNormOutput:
    """Post-norm for very deep residual networks: layer normalization of alpha * x + gx.

        s = alpha * x + gx;   y = (s - mean) / sqrt(var + eps) * scale + bias

    Args:
      x: `[..., D]`, the residual stream; or any shape with `axis` naming the normalised axes.
      gx: of x's shape, the branch's output G(x).
      scale: the shape of x along `axis` (`[D]`), or of x's rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      alpha: weight of the stream; the paper's is (2 N)**0.25 for an encoder of N layers, the default ops-nn's.
      axis, eps, where, rule, rescale, batch_invariant, backend: as `add_layer_norm`.
      return_moments: return `RowNormOutput(y, moments)` instead of y.

    Returns:
      y in the common dtype of x and gx, rounded once. Gradients: dx = alpha * ds, dgx = ds.

    Raises:
      ValueError: for shapes or axes that do not fit, or eps < 0.
      TypeError: if alpha is not a number.

    Source: Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000 Layers".

    >>> deep_norm(jnp.array([[10.0, 20.0]]), jnp.zeros((1, 2))).round(2).tolist()
    [[-1.0, 1.0]]
    """
    out = _add_norm(
        {"x": x, "gx": gx}, scale, bias, weights=(check.number(alpha, "alpha"), 1.0), axis=axis, eps=eps, where=where,
        rule=rule, rescale=rescale, batch_invariant=batch_invariant, backend=backend,
        residual=False,
    )  # fmt: skip
    return RowNormOutput(out.y, out.moments) if return_moments else out.y  # type: ignore[return-value]


def _add_norm(
    terms, scale, bias, *, sum_bias=None, weights=None, axis, eps, centered=True, where, scale_offset=0.0,
    round_first=False, axis_name=None, axis_index_groups=None, method="auto", rule, rescale, batch_invariant, backend,
    quant=None, norm_round_first=False, out_dtype=None, residual=True,
) -> AddNormOutput:  # fmt: skip
    (first, given), *others = terms.items()
    x = check.array(given, first)
    arrays = [x, *(check.same_shape(t, name, x, first) for name, t in others)]
    axes = check.axes(axis, x.ndim)
    scale, bias, sum_bias = (
        check.parameter(p, n, x, axes) for p, n in ((scale, "scale"), (bias, "bias"), (sum_bias, "sum_bias"))
    )
    scope = Scope(names=check.names(axis_name), groups=check.groups(axis_index_groups), method=method)
    where = check.mask(where, x)
    dtype = check.result_dtype(out_dtype, jnp.result_type(*arrays))
    if quant is not None and residual:
        quantize.out_dtype(quant, dtype)
        common = output_dtype(jnp.result_type(*arrays))
        found = coded(
            arrays if sum_bias is None else [*arrays, sum_bias], scale, bias, quant, axes=axes, eps=check.epsilon(eps),
            centered=centered, where=where, scale_offset=scale_offset, scope=scope, backend=backend, rescale=rescale,
            norm_round_first=norm_round_first, weights=weights, residual_dtype=common, round_first=round_first,
        )  # fmt: skip
        if found is not None:
            y, total, moments = found
            assert total is not None
            return AddNormOutput(y, total, jax.tree.map(lambda t: jnp.squeeze(t, axes), moments))
    out = composed(
        arrays, scale, bias, weights=weights, added=sum_bias, axes=axes, eps=check.epsilon(eps), centered=centered,
        where=where, scale_offset=scale_offset, scope=scope, round_first=round_first, residual=residual, rule=rule,
        rescale=rescale, batch_invariant=batch_invariant, backend=backend, out_dtype=quantize.out_dtype(quant, dtype),
    )  # fmt: skip
    y = quantize.finish(out.y, quant, dtype, axes=axes, where=where, scope=scope, norm_round_first=norm_round_first)
    moments = jax.tree.map(lambda t: jnp.squeeze(t, axes), out.moments)
    return AddNormOutput(y, out.residual, moments)  # type: ignore[arg-type]  # None for deep_norm, which drops it
