"""Norms with an activation behind them: one pass and one rounding for both, and nothing kept between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib import quantize
from normlib._composed import Relu, Swish, composed
from normlib._per_sample import checked_mask, grouped
from normlib.moments import Moments
from normlib.precision import output_dtype
from normlib.quantize import DualQuantized, Quantized
from normlib.scope import Scope, axis_size


class ConvBatchNormOutput(NamedTuple):
    """What `conv_batch_norm_relu` returns.

    Attributes:
      y: `[N, ..., C]` in x's dtype.
      moments: of the convolution's output over the whole scope, `[C]`, for `normlib.update_running`.
    """

    y: Array
    moments: Moments


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
    quant=None,
    norm_round_first: bool = False,
    out_dtype: DTypeLike | None = None,
) -> Array | Quantized | DualQuantized:
    """Group normalization followed by SiLU (Swish), rounded once.

        z = group_norm(x) * (scale + scale_offset) + bias;   y = z * sigmoid(beta * z)

    Args:
      x: `[N, ..., C]`, or any shape with `axis` naming the channels; computed in float32 (float64 for float64 x).
      scale: `[C]`, or of x's rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      num_groups: G; channels c with equal c // (C / G) form a group.
      beta: slope inside the sigmoid (ops-nn's swish_scale).

      quant: quantise y: one of the kinds that `normlib.layer_norm` takes. A row, which has one dynamic scale, is the
        channels of one position; a feature is a channel.
      norm_round_first: round y to x's dtype before quantising; False quantises the float32 value.
      out_dtype: dtype of y, rounded once from float32; that of x where None.

    The other arguments are those of `normlib.group_norm`.

    Returns:
      y in x's shape and dtype (float32 for integers), or codes with their scale with `quant`. The
      backward keeps x and the statistics, not z.

    Raises:
      ValueError: if C is not a multiple of `num_groups`, for shapes or axes that do not fit, or eps < 0.
      TypeError: for a mask that is not boolean, or a beta that is not a number.
      NameError: if `axis_name` is not bound here.

    Source: Wu and He 2018; Ramachandran, Zoph and Le 2017 for Swish.

    >>> np.float64(group_norm_silu(jnp.array([[1.0, 3.0]]), num_groups=1)).round(3).tolist()
    [[-0.269, 0.731]]
    """
    x = check.array(x)
    sets = grouped(
        x, num_groups, axis, reduction_axes, axis_name=axis_name, axis_index_groups=axis_index_groups, method=method
    )  # fmt: skip
    where = checked_mask(where, x, sets, on_single, "group_norm_silu")
    scale, bias = (check.parameter(p, n, x, sets.channels) for p, n in ((scale, "scale"), (bias, "bias")))
    dtype = check.result_dtype(out_dtype, x.dtype)
    y = composed(
        [x], scale, bias, axes=sets.reduced, eps=check.epsilon(eps), where=where, scale_offset=scale_offset,
        scope=sets.scope, activation=Swish(check.number(beta, "beta")), residual=False, rule=rule, rescale=rescale,
        backend=backend, out_dtype=quantize.out_dtype(quant, dtype),
    ).y  # fmt: skip
    # a row with a dynamic scale is the channels of one position: whole here, whatever devices share the statistics
    return quantize.finish(y, quant, dtype, axes=sets.channels, where=where, norm_round_first=norm_round_first)


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
      eps: added to the variance inside the root, in units of z squared; with 0 a set of equal entries is NaN.
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
        activation=Relu(), residual=False, rule=rule, rescale=rescale, backend=backend,
    )  # fmt: skip
    return ConvBatchNormOutput(out.y, jax.tree.map(lambda t: t.reshape(z.shape[-1]), out.total))


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
