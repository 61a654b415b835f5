"""Fused operators: a sum before the norm, an activation or a convolution around it, with one rounding at the end.

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
from jax import lax
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib._composed import Composed, Relu, Swish, composed
from normlib._per_sample import checked_mask, grouped
from normlib._row import RowNormOutput
from normlib.moments import Moments
from normlib.precision import output_dtype
from normlib.scope import Scope, axis_size

MOST_SUMMED = 5


class AddNormOutput(NamedTuple):
    """What the norms of a sum return.

    Attributes:
      y: the normalised sum, in the shape and common dtype of the summed arrays.
      residual: the sum itself, in the same dtype: the residual stream of a pre-norm model.
      moments: of every row, without the normalised axes; `moments.rstd(eps)` is the reciprocal standard deviation.
    """

    y: Array
    residual: Array
    moments: Moments


class AddNormCastOutput(NamedTuple):
    """What `add_rms_norm_cast` returns: as `AddNormOutput`, and `y_wide`, y widened to float32 after its rounding."""

    y: Array
    y_wide: Array
    residual: Array
    moments: Moments


class ConvBatchNormOutput(NamedTuple):
    """What `conv_batch_norm_relu` returns.

    Attributes:
      y: `[N, ..., C]` in x's dtype.
      moments: of the convolution's output over the whole scope, `[C]`, for `normlib.update_running`.
    """

    y: Array
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
      eps: added to the variance inside the root, in units of x squared.
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

    Returns:
      `AddNormOutput(y, residual, moments)`, y and residual rounded once each.

    Raises:
      ValueError: for shapes, axes or groups that do not fit, or eps < 0.
      TypeError: for a mask that is not boolean.
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
) -> AddNormOutput:
    """Root mean square normalization of a sum; returns the sum too.

        s = x1 + x2 + sum_bias;   y = s / sqrt(mean(s**2) + eps) * (scale + scale_offset) + bias;   residual = s

    Args, returns, raises, gradients: as `add_layer_norm`; `moments.var` is the mean square.

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
      `AddNormCastOutput(y, y_wide, residual, moments)` with y_wide equal to y. Cotangents of both are added.

    Source: ops-nn's AddRmsNormCast.

    >>> add_rms_norm_cast(jnp.ones((1, 2), jnp.bfloat16), jnp.ones((1, 2), jnp.bfloat16)).y_wide.dtype
    dtype('float32')
    """
    out = add_rms_norm(x1, x2, scale, bias, **options)
    wide = jnp.promote_types(out.y.dtype, jnp.float32)
    return AddNormCastOutput(out.y, out.y.astype(wide), out.residual, out.moments)


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
) -> AddNormOutput:
    """Root mean square normalization of the sum of several arrays, as the outputs of experts or of tensor slices.

        s = sum_i x1[i] + x2;   y = s / sqrt(mean(s**2) + eps) * (scale + scale_offset) + bias;   residual = s

    Args:
      x1: 1 to 5 arrays of x2's shape, summed from left to right in float32, x2 last.
      x2: `[..., D]`, or any shape with `axis` naming the normalised axes.

    The other arguments, returns, raises and gradients are those of `add_rms_norm`.

    Source: ops-nn's MultiAddRmsNormDynamicQuant, without the quantisation.

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
    )  # fmt: skip
    return RowNormOutput(out.y, out.moments) if return_moments else out.y


def group_norm_silu(
    x: Num[Array, ...],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    num_groups: int,
    beta: float = 1.0,
    axis: int = -1,
    reduction_axes: check.Axes | None = None,
    eps: float = 1e-5,
    where: Bool[Array, ...] | None = None,
    scale_offset: float = 0.0,
    axis_name=None,
    axis_index_groups=None,
    method: str = "auto",
    on_single: str = "raise",
    rule: str = "reverse",
    rescale: bool = False,
    backend: str | None = None,
) -> Array:
    """Group normalization followed by SiLU (Swish), rounded once.

        z = group_norm(x) * (scale + scale_offset) + bias;   y = z * sigmoid(beta * z)

    Args:
      x: `[N, ..., C]`, or any shape with `axis` naming the channels; computed in float32 (float64 for float64 x).
      scale: `[C]`, or of x's rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      num_groups: G; channels c with equal c // (C / G) form a group.
      beta: slope inside the sigmoid (ops-nn's swish_scale).

    The other arguments are those of `normlib.group_norm`.

    Returns:
      y in x's shape and dtype (float32 for integers). The backward keeps x and the statistics, not z.

    Raises:
      ValueError: if C is not a multiple of `num_groups`, for shapes or axes that do not fit, or eps < 0.
      TypeError: for a mask that is not boolean, or a beta that is not a number.
      NameError: if `axis_name` is not bound here.

    Source: Wu and He 2018; Ramachandran, Zoph and Le 2017 for Swish.

    >>> group_norm_silu(jnp.array([[1.0, 3.0]]), num_groups=1).round(3).tolist()
    [[-0.2689999938011169, 0.7310000061988831]]
    """
    x = check.array(x)
    sets = grouped(
        x, num_groups, axis, reduction_axes, axis_name=axis_name, axis_index_groups=axis_index_groups, method=method
    )  # fmt: skip
    where = checked_mask(where, x, sets, on_single, "group_norm_silu")
    scale, bias = (check.parameter(p, n, x, sets.channels) for p, n in ((scale, "scale"), (bias, "bias")))
    return composed(
        [x], scale, bias, axes=sets.reduced, eps=check.epsilon(eps), where=where, scale_offset=scale_offset,
        scope=sets.scope, activation=Swish(check.number(beta, "beta")), rule=rule, rescale=rescale, backend=backend,
    ).y  # fmt: skip


def conv_batch_norm_relu(
    x: Float[Array, "n *spatial c_in"],
    kernel: Float[Array, "*window c_in_per_group c_out"],
    scale: Float[Array, " c_out"] | None = None,
    bias: Float[Array, " c_out"] | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    eps: float = 1e-5,
    where: Bool[Array, ...] | None = None,
    axis_name=None,
    axis_index_groups=None,
    shift: Float[Array, " c_out"] | None = None,
    method: str = "auto",
    on_single: str = "raise",
    rule: str = "reverse",
    rescale: bool = False,
    backend: str | None = None,
) -> ConvBatchNormOutput:
    """Convolution, batch normalization by the batch's own statistics, and ReLU: the training form of the block.

        z = conv(x, kernel);   y = max((z - mean) / sqrt(var + eps) * scale + bias, 0)

    Args:
      x: `[N, spatial..., C_in]`, channels last, one to three spatial axes.
      kernel: `[window..., C_in / feature_group_count, C_out]`, cast to x's dtype.
      scale: `[C_out]` or None for ones.
      bias: `[C_out]` or None for zeros. A bias of the convolution would be removed by the mean: there is none.
      strides: of the window, one number for all spatial axes or one each.
      padding: "SAME", "VALID", or (low, high) for each spatial axis.
      kernel_dilation: distance of the window's taps, one number or one each.
      feature_group_count: groups of the convolution.
      eps: added to the variance inside the root, in units of z squared.
      where: bool, broadcastable to z: which positions are measured.
      axis_name, axis_index_groups, shift, method, on_single, rule, rescale, backend: as `normlib.batch_norm`.

    Returns:
      `ConvBatchNormOutput(y, moments)`. z is rounded to x's dtype by the convolution, y once. The backward keeps x,
      kernel, z and the statistics: ReLU's mask is formed again from z.

    Raises:
      ValueError: for ranks or shapes that do not fit, one entry per channel, or eps < 0.

    Source: Ioffe and Szegedy 2015, section 3.2. For inference fold the statistics into the kernel instead.

    >>> out = conv_batch_norm_relu(jnp.arange(8.0).reshape(1, 8, 1), jnp.ones((1, 1, 2)))
    >>> out.y.shape, out.moments.mean.tolist(), float(out.y.min())
    ((1, 8, 2), [3.5, 3.5], 0.0)
    """
    x = check.array(x)
    z = _convolution(x, check.array(kernel, "kernel"), strides, padding, kernel_dilation, feature_group_count)
    channel = z.ndim - 1
    names, groups = check.names(axis_name), check.groups(axis_index_groups)
    scope = Scope(names=names, groups=groups, method=method)
    parameters = ((scale, "scale"), (bias, "bias"), (shift, "shift"))
    scale, bias, shift = (check.parameter(p, n, z, (channel,)) for p, n in parameters)
    where = check.mask(where, z)
    if where is None:
        sharing = len(groups[0]) if groups else axis_size(names)
        count = z.size // max(z.shape[-1], 1) * sharing
        check.more_than_one(count, on_single, f"conv_batch_norm_relu with a convolution's output of shape {z.shape}")
    out = composed(
        [z], scale, bias, axes=tuple(range(channel)), eps=check.epsilon(eps), where=where, scope=scope, shift=shift,
        activation=Relu(), rule=rule, rescale=rescale, backend=backend,
    )  # fmt: skip
    return ConvBatchNormOutput(out.y, jax.tree.map(lambda t: t.reshape(z.shape[-1]), out.total))


def _add_norm(
    terms, scale, bias, *, sum_bias=None, weights=None, axis, eps, centered=True, where, scale_offset=0.0,
    round_first=False, axis_name=None, axis_index_groups=None, method="auto", rule, rescale, batch_invariant, backend,
) -> AddNormOutput:  # fmt: skip
    (first, given), *others = terms.items()
    x = check.array(given, first)
    arrays = [x, *(check.same_shape(t, name, x, first) for name, t in others)]
    axes = check.axes(axis, x.ndim)
    scale, bias, sum_bias = (
        check.parameter(p, n, x, axes) for p, n in ((scale, "scale"), (bias, "bias"), (sum_bias, "sum_bias"))
    )
    scope = Scope(names=check.names(axis_name), groups=check.groups(axis_index_groups), method=method)
    out: Composed = composed(
        arrays, scale, bias, weights=weights, added=sum_bias, axes=axes, eps=check.epsilon(eps), centered=centered,
        where=check.mask(where, x), scale_offset=scale_offset, scope=scope, round_first=round_first, rule=rule,
        rescale=rescale, batch_invariant=batch_invariant, backend=backend,
    )  # fmt: skip
    return AddNormOutput(out.y, out.residual, jax.tree.map(lambda t: jnp.squeeze(t, axes), out.moments))


def _convolution(x, kernel, strides, padding, dilation, groups):
    spatial = x.ndim - 2
    if not 1 <= spatial <= 3 or kernel.ndim != x.ndim:
        raise ValueError(
            "`x` must have shape [N, spatial..., C] with one to three spatial axes and `kernel` the same rank; got "
            f"{x.shape} and {kernel.shape}."
        )
    if groups < 1 or kernel.shape[-2] * groups != x.shape[-1] or kernel.shape[-1] % groups:
        raise ValueError(
            f"`kernel` of shape {kernel.shape} does not fit x's {x.shape[-1]} channels in {groups} groups: expected "
            f"{x.shape[-1]} / {groups} input channels and a multiple of {groups} output channels."
        )
    each = [(v,) * spatial if isinstance(v, int) else tuple(v) for v in (strides, dilation)]
    axes = "DHW"[3 - spatial :]
    x = x.astype(output_dtype(x.dtype))
    return lax.conv_general_dilated(
        x, kernel.astype(x.dtype), each[0], padding, rhs_dilation=each[1], feature_group_count=groups,
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
    )  # fmt: skip
