"""What the linen and the nnx layers without a counterpart in Flax share; as `normlib._layers`, without any state."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from normlib import _arguments as check
from normlib import activated, adaptive, dynamic, fused
from normlib._layers import Running, broadcast_mask, fitted, options_of, quantised, sorted_axes, spread, typed, updated
from normlib._modulation import looked_up
from normlib.adaptive import AdaNormZeroOutput


class AddNorm(NamedTuple):
    """What AddLayerNorm and AddRMSNorm return.

    Attributes:
      y: the normalised sum in `dtype` or the promoted dtype; codes with their scale where the layer has a `quant`.
      residual: the sum in the common dtype of what was added.
    """

    y: Any
    residual: Array


def add_norm(
    settings: Any,
    x: Array,
    residual: Array,
    scale: Array | None,
    bias: Array | None,
    where: Array | None,
    *,
    centered: bool = True,
    initializing: bool = False,
) -> AddNorm:
    """Layer norm (RMS norm if not `centered`) of x + residual, both `[...]` of one shape.

    Raises:
      ValueError: for two shapes.
    """
    x, residual = check.array(x), check.array(residual, "residual")
    check.same_shape(residual, "residual", x, "x")
    reduced = sorted_axes(settings.reduction_axes, x.ndim, "reduction_axes")
    features = sorted_axes(settings.feature_axes, x.ndim, "feature_axes")
    x, out = typed(settings, x, residual, scale, bias)
    options = options_of(settings, x, where, initializing)
    if not centered:
        del options["method"]
    operator = fused.add_layer_norm if centered else fused.add_rms_norm
    found = operator(
        x,
        residual,
        spread(scale, "scale", x, features),
        spread(bias, "bias", x, features),
        axis=reduced,
        residual_round_first=settings.residual_round_first,
        batch_invariant=settings.batch_invariant,
        out_dtype=out,
        **quantised(settings),
        **options,
    )
    return AddNorm(found.y, found.residual)


def ada_layer_norm(
    settings: Any,
    x: Array,
    modulation: Array,
    scale: Array | None,
    bias: Array | None,
    where: Array | None,
) -> Array:
    """Layer norm of x `[B..., S, H]`, modulated by shift and scale.

    Args:
      settings: an AdaLayerNorm layer.
      x: `[B..., S, H]`.
      modulation: shift and scale side by side, `[B..., 2 H]` or `[B..., S, 2 H]`.
      scale, bias: `[H]` of the norm itself, or None.
      where: bool, broadcastable to x, or None: what is measured.
    """
    shift, factor = jnp.split(modulation, 2, axis=-1)
    x, out = typed(settings, x, modulation, scale, bias)
    return adaptive.ada_layer_norm(  # type: ignore[return-value]
        x,
        factor,
        shift,
        scale,
        bias,
        scale_offset=settings.scale_offset,
        eps=settings.epsilon,
        where=where,
        rule=settings.rule,
        rescale=settings.rescale,
        batch_invariant=settings.batch_invariant,
        out_dtype=out,
        **quantised(settings),
    )


def ada_layer_norm_zero(
    settings: Any,
    x: Array,
    modulation: Array,
    scale: Array | None,
    bias: Array | None,
    where: Array | None,
) -> AdaNormZeroOutput:
    """As `ada_layer_norm`, with the gate as the third part of `modulation`, `[B..., 3 H]` or `[B..., S, 3 H]`."""
    features = x.shape[-1]
    y = ada_layer_norm(settings, x, modulation[..., : 2 * features], scale, bias, where)
    gate = modulation[..., 2 * features :]
    return AdaNormZeroOutput(y, gate[..., None, :] if gate.ndim == x.ndim - 1 else gate)


def group_norm_silu(
    settings: Any,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    where: Array | None,
    *,
    num_groups: int,
    initializing: bool = False,
) -> Array:
    """Group norm of x `[..., C]`, then SiLU; as `normlib._layers.group_norm`.

    Raises:
      ValueError: if `reduction_axes` lacks the last axis.
    """
    last = x.ndim - 1
    axes = settings.reduction_axes
    reduced = tuple(range(1, x.ndim)) if axes is None else sorted_axes(axes, x.ndim, "reduction_axes")
    x, out = typed(settings, x, scale, bias)
    return activated.group_norm_silu(  # type: ignore[return-value]
        x,
        spread(scale, "scale", x, (last,)),
        spread(bias, "bias", x, (last,)),
        num_groups=num_groups,
        beta=settings.beta,
        reduction_axes=reduced or (last,),
        on_single="zero",
        out_dtype=out,
        **quantised(settings),
        **options_of(settings, x, where, initializing),
    )


def dynamic_tanh(settings: Any, x: Array, alpha: Array, scale: Array | None, bias: Array | None) -> Array:
    """scale * tanh(alpha * x) + bias; scale and bias along `settings.feature_axes` of x `[...]`, alpha a scalar."""
    features = sorted_axes(settings.feature_axes, x.ndim, "feature_axes")
    x, out = typed(settings, x, alpha, scale, bias)
    scale, bias = spread(scale, "scale", x, features), spread(bias, "bias", x, features)
    return dynamic.dynamic_tanh(x, alpha, scale, bias, axis=features, out_dtype=out)


def switchable_norm(
    settings: Any,
    x: Array,
    logits: tuple[Array, Array],
    scale: Array | None,
    bias: Array | None,
    running: Running,
    where: Array | None = None,
    *,
    use_running_average: bool,
    initializing: bool = False,
) -> tuple[Array, Running | None]:
    """Switchable norm by the batch's or the running batch statistics.

    Args:
      settings: a SwitchableNorm layer.
      x: `[N, ..., C]`, channels along `settings.axis`.
      logits: of the means and of the variances, `[3]` each: instance, layer, batch.
      scale, bias: `[C]` or None.
      running: the stored batch statistics.
      where: bool, broadcastable to x, or None: what is measured.
      use_running_average: use these; no named axis plays a part then.
      initializing: batch statistics of this device alone.

    Returns:
      (y, new running statistics); the latter None where they stay as they are.
    """
    (channel,) = sorted_axes(settings.axis, x.ndim, "axis")
    shape = (x.shape[channel],)
    x, out = typed(settings, x, scale, bias)
    scale, bias = spread(scale, "scale", x, (channel,)), spread(bias, "bias", x, (channel,))
    stored = (fitted(running.mean, "mean", shape, x), fitted(running.var, "var", shape, x))
    y, moments = dynamic.switchable_norm(
        x,
        *logits,
        scale,
        bias,
        running_mean=stored[0] if use_running_average else None,
        running_var=stored[1] if use_running_average else None,
        axis=channel,
        eps=settings.epsilon,
        where=None if where is None else broadcast_mask(where, x),
        axis_name=None if initializing or use_running_average else settings.axis_name,
        on_single="zero",
        rule=settings.rule,
        out_dtype=out,
    )
    if use_running_average or initializing:
        return y, None
    return y, updated(settings, running, jax.lax.stop_gradient(moments), shape)


def class_rows(scale: Array | None, bias: Array | None, labels: Array, x: Array) -> tuple[Array | None, Array | None]:
    """Each sample's rows `[N, C]` of tables `[classes, C]`, NaN for a label out of range.

    Raises:
      TypeError: for labels that are not integers.
      ValueError: for another number of labels than x has samples.
    """
    return looked_up(scale, "scale", labels, x), looked_up(bias, "bias", labels, x)


def check_condition(condition: Array, samples: int) -> None:
    """Raise unless `condition` is `[N, D]` for that many samples.

    Raises:
      ValueError: naming both shapes.
    """
    if condition.ndim != 2 or condition.shape[0] != samples or not jnp.issubdtype(condition.dtype, jnp.floating):
        raise ValueError(
            f"`condition` must be a floating array [{samples}, features] where `num_classes` is None; got "
            f"{condition.dtype}{list(condition.shape)}. For class labels give `num_classes`."
        )


def size_of(x: Array, features: tuple[int, ...]) -> int:
    """Entries of x along its feature axes."""
    return math.prod(x.shape[axis] for axis in features)


def halves(projected: Array, use_scale: bool, use_bias: bool) -> tuple[Array | None, Array | None]:
    """(scale, bias) of a projection `[N, features each]`, scale first; None for one that is not used."""
    if use_scale and use_bias:
        scale, bias = jnp.split(projected, 2, axis=-1)
        return scale, bias
    return (projected if use_scale else None), (projected if use_bias else None)
