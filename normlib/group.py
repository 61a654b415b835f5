"""Group and instance normalization."""

from __future__ import annotations

import math

from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib.engine import normalize
from normlib.scope import Scope, axis_size


def group_norm(
    x: Num[Array, ...],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    num_groups: int,
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
    out_dtype: DTypeLike | None = None,
) -> Array:
    """Normalise every group of neighbouring channels of every sample by its mean and variance.

        y = (x - mean) / sqrt(var + eps) * (scale + scale_offset) + bias

    Args:
      x: `[N, ..., C]`, or any shape with `axis` naming the channels; computed in float32 (float64 for float64 x).
      scale: `[C]`, or of x's rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      num_groups: G; channels c with equal c // (C / G) form a group.
      axis: channel axis; channels first and last give equal results.
      reduction_axes: axes reduced; all but axis 0 where None. Must contain `axis`.
      eps: added to the variance inside the root, in units of x squared.
      where: bool, broadcastable to x: which entries are measured. A mask of lower rank stands for x's first axes.
      scale_offset: added to `scale` in float32.
      axis_name: mesh axis or axes over which a sample's reduced axes are split.
      axis_index_groups: groups of indices along `axis_name`; only devices of one group share.
      method: how devices pool; see `normlib.scope.Scope`.
      on_single: "raise" if a group has one entry only, or "zero" to return the bias then.
      rule: "reverse", "both" or "autodiff"; see `normlib.engine.normalize`.
      rescale: protect float32 from overflow of squares above 1e19, at the price of another pass.
      backend: which pass runs it; None for the one of `normlib.use_backend`.
      out_dtype: dtype of y, rounded once from float32; x's where None.

    Returns:
      y in x's shape and dtype (float32 for integers) or `out_dtype`, rounded once.

    Raises:
      ValueError: if C is not a multiple of `num_groups`, for shapes or axes that do not fit, or eps < 0.
      TypeError: for a mask that is not boolean.
      NameError: if `axis_name` is not bound here.

    Source: Wu and He 2018.

    >>> group_norm(jnp.array([[1.0, 3.0, 2.0, 4.0]]), num_groups=2).round(3).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """
    x = check.array(x)
    (channel,) = check.axes(axis, x.ndim)
    reduced = (
        tuple(range(1, x.ndim)) if reduction_axes is None else check.axes(reduction_axes, x.ndim, "reduction_axes")
    )
    if channel not in reduced:
        raise ValueError(
            f"`reduction_axes` {reduced} must contain the channel axis {channel} of x, shape {x.shape}"
            + ("; give them when the channels are axis 0." if reduction_axes is None else ".")
        )
    channels = x.shape[channel]
    if not isinstance(num_groups, int) or num_groups < 1 or channels % num_groups:
        raise ValueError(f"`num_groups` must divide the {channels} channels of x (axis {channel}); got {num_groups}.")
    return _per_sample(
        x, scale, bias, (channel,), tuple(a for a in reduced if a != channel), channels // num_groups,
        {"channels": num_groups, "channel_axis": channel}, eps, where, scale_offset, axis_name, axis_index_groups,
        method, on_single, rule, rescale, backend, out_dtype, "group_norm",
    )  # fmt: skip


def instance_norm(
    x: Num[Array, ...],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    axis: check.Axes = -1,
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
    out_dtype: DTypeLike | None = None,
) -> Array:
    """Normalise every channel of every sample by its mean and variance over the remaining axes.

        y = (x - mean) / sqrt(var + eps) * (scale + scale_offset) + bias

    Args:
      x: `[N, ..., C]`, or any shape with `axis` naming the channels; axis 0 holds samples. Computed in float32
        (float64 for float64 x).
      scale: `[C]` (the shape of x along `axis`), or of x's rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      axis: channel axis or axes; neither they nor axis 0 are reduced.
      eps: added to the variance inside the root, in units of x squared.
      where: bool, broadcastable to x: which entries are measured. A mask of lower rank stands for x's first axes.
      scale_offset: added to `scale` in float32.
      axis_name: mesh axis or axes over which a sample's reduced axes are split.
      axis_index_groups: groups of indices along `axis_name`; only devices of one group share.
      method: how devices pool; see `normlib.scope.Scope`.
      on_single: "raise" if an instance has one entry only, or "zero" to return the bias then.
      rule: "reverse", "both" or "autodiff"; see `normlib.engine.normalize`.
      rescale: protect float32 from overflow of squares above 1e19, at the price of another pass.
      backend: which pass runs it; None for the one of `normlib.use_backend`.
      out_dtype: dtype of y, rounded once from float32; x's where None.

    Returns:
      y in x's shape and dtype (float32 for integers) or `out_dtype`, rounded once.

    Raises:
      ValueError: for shapes or axes that do not fit, one entry per instance, or eps < 0.
      TypeError: for a mask that is not boolean.
      NameError: if `axis_name` is not bound here.

    Source: Ulyanov, Vedaldi and Lempitsky 2016.

    >>> instance_norm(jnp.array([[[1.0], [3.0]]])).round(3).tolist()
    [[[-1.0], [1.0]]]
    """
    x = check.array(x)
    channels = check.axes(axis, x.ndim)
    reduced = tuple(a for a in range(1, x.ndim) if a not in channels)
    return _per_sample(
        x, scale, bias, channels, reduced, 1, {}, eps, where, scale_offset, axis_name, axis_index_groups, method,
        on_single, rule, rescale, backend, out_dtype, "instance_norm",
    )  # fmt: skip


def _per_sample(
    x, scale, bias, channels, reduced, per_group, grouping, eps, where, scale_offset, axis_name, axis_index_groups,
    method, on_single, rule, rescale, backend, out_dtype, operator,
):  # fmt: skip
    names = check.names(axis_name)
    scope = Scope(names=names, groups=check.groups(axis_index_groups), method=method, **grouping)
    where = check.mask(where, x)
    if where is None:
        sharing = len(scope.groups[0]) if scope.groups else axis_size(names)
        entries = math.prod(x.shape[a] for a in reduced) * per_group * sharing
        check.more_than_one(entries, on_single, f"{operator} of x with shape {x.shape}")
    return normalize(
        x, check.parameter(scale, "scale", x, channels), check.parameter(bias, "bias", x, channels), axes=reduced,
        eps=check.epsilon(eps), where=where, scale_offset=scale_offset, scope=scope, rule=rule, rescale=rescale,
        backend=backend, out_dtype=out_dtype,
    ).y  # fmt: skip
