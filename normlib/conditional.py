"""Norms of images whose scale and shift belong to the sample, its class, a map over space, or a style.

Scales are deviations from 1 where `scale_offset` is 1; 1 + scale is formed in float32, and affine and modulation are
folded into one scale and one shift before the norm, which then rounds once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib._batch import batch_normalized
from normlib._modulation import combined, factor, looked_up
from normlib._per_sample import PerSample, checked_mask, grouped, instances
from normlib.engine import normalize
from normlib.moments import Moments


class ConditionalBatchNormOutput(NamedTuple):
    """What `conditional_batch_norm` returns: y in x's shape and dtype, and moments `[C]` of the whole scope."""

    y: Array
    moments: Moments


def conditional_batch_norm(
    x: Num[Array, "n *space c"],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    labels: Num[Array, " n"] | None = None,
    scale_offset: float = 1.0,
    axis: int = -1,
    eps: float = 1e-5,
    where: Bool[Array, ...] | None = None,
    axis_name=None,
    axis_index_groups=None,
    virtual_batch_size: int | None = None,
    ragged: bool = False,
    running: str = "merged",
    shift: Float[Array, " c"] | None = None,
    method: str = "auto",
    on_single: str = "raise",
    rule: str = "reverse",
    rescale: bool = False,
    backend: str | None = None,
    out_dtype: DTypeLike | None = None,
) -> ConditionalBatchNormOutput:
    """Batch normalization whose scale and bias belong to the sample: to its class, or to its conditioning network.

        y = (x - mean) / sqrt(var + eps) * (scale[n] + scale_offset) + bias[n]

    Args:
      x: `[N, ..., C]`, or any shape with samples along axis 0 and `axis` naming the channels.
      scale: `[N, C]`, a deviation from `scale_offset`; a table `[classes, C]` with `labels`; or None for zeros.
      bias: likewise, or None for zeros.
      labels: `[N]` integers, rows of the tables; None where scale and bias are per sample already. One out of range
        gives NaN, not another class.
      scale_offset: added to `scale` in float32.
      axis: channel axis, not 0; every other axis is reduced.
      eps: added to the variance inside the root, in units of x squared; with 0 a set of equal entries is NaN.
      where, axis_name, axis_index_groups, virtual_batch_size, ragged, running, shift, method, on_single, rule, rescale,
        backend, out_dtype: as `normlib.batch_norm`.

    Returns:
      `ConditionalBatchNormOutput(y, moments)`; update running statistics with `normlib.update_running`, and evaluate
      with `batch_norm_inference` followed by `modulate`.

    Raises:
      ValueError: for shapes or axes that do not fit, one entry per channel, or eps < 0.
      TypeError: for labels that are not integers.

    Source: de Vries et al. 2017, "Modulating early visual processing by language"; 1 + scale: Brock et al. 2019.

    >>> table = jnp.array([[0.0], [1.0]])
    >>> conditional_batch_norm(jnp.array([[-1.0], [1.0]]), table, labels=jnp.array([0, 1])).y.round(3).tolist()
    [[-1.0], [2.0]]
    """
    x = check.array(x)
    (channel,) = check.axes(axis, x.ndim)
    if channel == 0:
        raise ValueError(f"`axis` must not be 0, which holds the samples of x, shape {x.shape}.")
    raised = [
        _per_sample_channels(looked_up(p, name, labels, x), name, x, channel)
        for p, name in ((scale, "scale"), (bias, "bias"))
    ]
    y, moments = batch_normalized(
        x, factor(raised[0], scale_offset, x), raised[1], channels=(channel,), eps=eps, where=where,
        operator="conditional_batch_norm", axis_name=axis_name, axis_index_groups=axis_index_groups,
        virtual_batch_size=virtual_batch_size, ragged=ragged, running=running, shift=shift, method=method,
        on_single=on_single, rule=rule, rescale=rescale, backend=backend, out_dtype=out_dtype,
    )  # fmt: skip
    return ConditionalBatchNormOutput(y, moments)


def modulated_group_norm(
    x: Num[Array, "n *space c"],
    mod_scale: Float[Array, ...] | None = None,
    mod_shift: Float[Array, ...] | None = None,
    scale: Float[Array, " c"] | None = None,
    bias: Float[Array, " c"] | None = None,
    *,
    num_groups: int,
    scale_offset: float = 1.0,
    axis: int = -1,
    eps: float = 1e-5,
    where: Bool[Array, ...] | None = None,
    axis_name=None,
    method: str = "auto",
    on_single: str = "raise",
    rule: str = "reverse",
    rescale: bool = False,
    backend: str | None = None,
) -> Array:
    """Group normalization modulated per sample (AdaGN) or per position (SPADE).

        y = (group_norm(x) * scale + bias) * (scale_offset + mod_scale) + mod_shift

    Args:
      x: `[N, ..., C]`, or any shape with samples along axis 0 and `axis` naming the channels.
      mod_scale: `[N, C]`, or of x's rank and broadcastable to it (a map over space), or None for zeros.
      mod_shift: likewise.
      scale: `[C]` of the norm itself, or None for ones.
      bias: `[C]`, or None for zeros.
      num_groups: G; C for the instance statistics of SPADE's variants.
      scale_offset: added to `mod_scale` in float32.
      axis, eps, where, axis_name, method, on_single, rule, rescale, backend: as `normlib.group_norm`.

    Returns:
      y in x's shape and dtype, rounded once.

    Raises:
      ValueError: for shapes, axes or groups that do not fit, or eps < 0.

    Source: Dhariwal and Nichol 2021 (AdaGN); Park et al. 2019 (SPADE).

    >>> modulated_group_norm(jnp.array([[1.0, 3.0]]), jnp.array([[0.0, 1.0]]), num_groups=1).round(2).tolist()
    [[-1.0, 2.0]]
    """
    x = check.array(x)
    sets = grouped(x, num_groups, axis, None, axis_name=axis_name, method=method)
    mod_scale, mod_shift = (
        _per_sample_channels(m, n, x, sets.channels[0]) for m, n in ((mod_scale, "mod_scale"), (mod_shift, "mod_shift"))
    )
    scale, bias = (check.parameter(p, n, x, sets.channels) for p, n in ((scale, "scale"), (bias, "bias")))
    scale, bias, offset = combined(scale, bias, mod_scale, mod_shift, scale_offset, x)
    where = checked_mask(where, x, sets, on_single, "modulated_group_norm")
    return _normalized(x, scale, bias, offset, sets, eps, where, rule, rescale, backend)


def adaptive_instance_norm(
    x: Num[Array, "n *space c"],
    style: Num[Array, "n *style_space c"] | None = None,
    *,
    style_mean: Float[Array, "n c"] | None = None,
    style_std: Float[Array, "n c"] | None = None,
    axis: int = -1,
    eps: float = 1e-5,
    where: Bool[Array, ...] | None = None,
    on_single: str = "raise",
    rule: str = "reverse",
    rescale: bool = False,
    backend: str | None = None,
) -> Array:
    """Give every channel of every sample the mean and standard deviation of a style.

        y = style_std * (x - mean) / sqrt(var + eps) + style_mean

    Args:
      x: `[N, ..., C]`, the content.
      style: `[N, ..., C]` of x's rank, N and C and any size of space: its statistics are measured, with
        style_std = sqrt(var + eps). None where they are given.
      style_mean: `[N, C]`, or of x's rank and broadcastable to it; with `style_std`, instead of `style`.
      style_std: likewise.
      axis: channel axis.
      eps: added to both variances inside the root, in units of x squared.
      where: bool, broadcastable to x: which entries of x are measured.
      on_single, rule, rescale, backend: as `normlib.instance_norm`.

    Returns:
      y in x's shape and dtype, rounded once. Gradients reach x and the style.

    Raises:
      ValueError: for shapes that do not fit, if not exactly one form of style is given, or eps < 0.

    Source: Huang and Belongie 2017, "Arbitrary Style Transfer in Real-time with Adaptive Instance Normalization".

    >>> x = jnp.array([[[1.0], [3.0]]])
    >>> np.float64(adaptive_instance_norm(x, jnp.array([[[10.0], [20.0], [30.0], [40.0]]]))).round(1).tolist()
    [[[13.8], [36.2]]]
    """
    x, eps = check.array(x), check.epsilon(eps)
    given = style is not None, style_mean is not None, style_std is not None
    if given not in ((True, False, False), (False, True, True)):
        raise ValueError("give either `style`, or both `style_mean` and `style_std`.")
    sets = instances(x, axis)
    (channel,) = sets.channels
    if style is not None:
        style = check.array(style, "style")
        fixed = [(t.shape[0], t.shape[channel]) if t.ndim == x.ndim else None for t in (style, x)]
        if fixed[0] != fixed[1]:
            raise ValueError(f"`style` must have x's rank, samples and channels, {x.shape}; got {style.shape}.")
        # y is not used: the engine's moments have its hand-written backward
        found = normalize(style, axes=sets.reduced, eps=eps, rule=rule, rescale=rescale, backend=backend).moments
        room = jnp.asarray(eps, found.var.dtype)
        mean, std = found.mean, jnp.sqrt(found.var + room)
    else:
        pairs = ((style_mean, "style_mean"), (style_std, "style_std"))
        mean, std = (_per_sample_channels(t, n, x, channel) for t, n in pairs)  # type: ignore[assignment]
    where = checked_mask(where, x, sets, on_single, "adaptive_instance_norm")
    return _normalized(x, std, mean, 0.0, sets, eps, where, rule, rescale, backend)


def _normalized(x, scale, bias, offset, sets: PerSample, eps, where, rule, rescale, backend) -> Array:
    return normalize(
        x, scale, bias, axes=sets.reduced, eps=check.epsilon(eps), where=where, scale_offset=offset,
        scope=sets.scope, rule=rule, rescale=rescale, backend=backend,
    ).y  # fmt: skip


def _per_sample_channels(m, name: str, x: Array, channel: int) -> Array | None:
    """[N, C], or anything of x's rank that broadcasts to x, in x's rank."""
    if m is None:
        return None
    m = check.array(m, name)
    expected = (x.shape[0], x.shape[channel])
    if m.shape == expected:
        return m.reshape([s if a in (0, channel) else 1 for a, s in enumerate(x.shape)])
    if m.ndim == x.ndim and all(s in (1, t) for s, t in zip(m.shape, x.shape)):
        return m
    raise ValueError(
        f"`{name}` must have shape {expected} (samples, channels), or x's rank and broadcast to {x.shape}; "
        f"got {m.shape}."
    )
