"""Group and instance normalization."""

from __future__ import annotations

from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib._per_sample import checked_mask, grouped, instances
from normlib.engine import normalize


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
      eps: added to the variance inside the root, in units of x squared; with 0 a set of equal entries is NaN.
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
    sets = grouped(
        x, num_groups, axis, reduction_axes, axis_name=axis_name, axis_index_groups=axis_index_groups, method=method
    )  # fmt: skip
    return _normalized(
        x, scale, bias, sets, eps, where, scale_offset, on_single, rule, rescale, backend, out_dtype, "group_norm"
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
      eps: added to the variance inside the root, in units of x squared; with 0 a set of equal entries is NaN.
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
    sets = instances(x, axis, axis_name=axis_name, axis_index_groups=axis_index_groups, method=method)
    return _normalized(
        x, scale, bias, sets, eps, where, scale_offset, on_single, rule, rescale, backend, out_dtype, "instance_norm"
    )  # fmt: skip


def st_group_norm(
    x: Num[Array, "n t h w c"],
    scale: Float[Array, " c"] | None = None,
    bias: Float[Array, " c"] | None = None,
    *,
    num_groups: int,
    mode: str = "joint",
    time_axis: int = 1,
    axis: int = -1,
    eps: float = 1e-5,
    where: Bool[Array, ...] | None = None,
    on_single: str = "raise",
    rule: str = "reverse",
    rescale: bool = False,
    backend: str | None = None,
) -> Array:
    """Group normalization of video: statistics over space and time, or over the space of each frame.

        y = (x - mean) / sqrt(var + eps) * scale + bias

    Args:
      x: `[N, T, H, W, C]`, or any rank with `time_axis` and `axis` naming frames and channels.
      scale: `[C]` or None for ones.
      bias: `[C]` or None for zeros.
      num_groups: G; statistics are over C / G channels.
      mode: "joint": over (C / G, T, H, W), one set per sample, as a 3-D group norm; "per_frame": over (C / G, H, W),
        so that a frame does not depend on others (streaming).
      time_axis: axis of the frames.
      axis, eps, where, on_single, rule, rescale, backend: as `normlib.group_norm`.

    Returns:
      y in x's shape and dtype, rounded once.

    Raises:
      ValueError: for an unknown mode, or shapes, axes or groups that do not fit.

    Source: Wu and He 2018, on video: statistics over time as well.

    >>> x = jnp.array([0.0, 1.0, 4.0, 5.0]).reshape(1, 2, 1, 2, 1)
    >>> st_group_norm(x, num_groups=1, mode="per_frame").ravel().round(2).tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    x = check.array(x)
    check.one_of(mode, ("joint", "per_frame"), "mode")
    (frames,) = check.axes(time_axis, x.ndim, "time_axis")
    (channel,) = check.axes(axis, x.ndim)
    if frames in (0, channel):
        raise ValueError(f"`time_axis` {time_axis} is the axis of the samples or channels of x, shape {x.shape}.")
    over = tuple(a for a in range(1, x.ndim) if mode == "joint" or a != frames)
    sets = grouped(x, num_groups, axis, over)
    return _normalized(x, scale, bias, sets, eps, where, 0.0, on_single, rule, rescale, backend, None, "st_group_norm")


def _normalized(x, scale, bias, sets, eps, where, scale_offset, on_single, rule, rescale, backend, out_dtype, operator):
    where = checked_mask(where, x, sets, on_single, operator)
    scale, bias = (check.parameter(p, n, x, sets.channels) for p, n in ((scale, "scale"), (bias, "bias")))
    return normalize(
        x, scale, bias, axes=sets.reduced, eps=check.epsilon(eps), where=where, scale_offset=scale_offset,
        scope=sets.scope, rule=rule, rescale=rescale, backend=backend, out_dtype=out_dtype,
    ).y  # fmt: skip
