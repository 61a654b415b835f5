"""What the linen and the nnx layers share: a layer's settings and arrays in, the operator's y and new statistics out.

The functions read the settings from the layer itself, because both packages give their attributes Flax's names; they
hold no state and create no parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from normlib import _arguments as check
from normlib import batch, batch_act, group, layer, rms
from normlib._batch import batch_normalized
from normlib.engine import RULES
from normlib.precision import wide_dtype
from normlib.running import running_weight, update_running
from normlib.scope import METHODS

Axes = int | Sequence[int]


class Running(NamedTuple):
    """A batch norm's running statistics as its layer stores them.

    Attributes:
      mean, var: any shape that holds one entry per feature, float32 unless the layer was told otherwise.
      num_batches: int32 scalar, the batches averaged so far; None unless an option needs it.
    """

    mean: Array
    var: Array
    num_batches: Array | None = None


def sorted_axes(axes: Axes, rank: int, name: str) -> tuple[int, ...]:
    """`axes` as ascending non-negative numbers, the order in which Flax lays out a parameter's dimensions.

    Raises:
      ValueError: naming the layer's argument `name`, for an axis out of range or one given twice.
    """
    given = (axes,) if isinstance(axes, int) else tuple(axes)
    for axis in given:
        if not -rank <= axis < rank:
            raise ValueError(f"`{name}` holds axis {axis}, but x has {rank} dimensions: use {-rank} to {rank - 1}.")
    found = sorted(axis % rank for axis in given)
    if len(set(found)) != len(found):
        raise ValueError(f"`{name}`={axes!r} names an axis of a {rank}-dimensional x twice; give each axis once.")
    return tuple(found)


def result_dtype(dtype: Any, *arrays: Array | None) -> jnp.dtype:
    """`dtype`, or Flax's promotion of the arrays when it is None (integers and bools become float32).

    Raises:
      ValueError: if `dtype` is neither floating nor complex.
    """
    if dtype is not None:
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(f"`dtype` must be a floating or complex type; got {jnp.dtype(dtype).name}.")
        return jnp.dtype(dtype)
    found = jnp.result_type(*(a for a in arrays if a is not None))
    return found if jnp.issubdtype(found, jnp.inexact) else jnp.promote_types(jnp.float32, found)


def typed(settings: Any, x: Array, *others: Array | None) -> tuple[Array, jnp.dtype]:
    """(x, dtype of the result), x widened only where its statistics would be narrower than the result.

    The operators compute in float32 at least and round once, so a 16-bit x stays what the backward keeps.
    """
    out = result_dtype(settings.dtype, x, *others)
    enough = jnp.promote_types(wide_dtype(x.dtype), out) == wide_dtype(x.dtype)
    return (x if enough else x.astype(jnp.promote_types(x.dtype, out))), out


def spread(parameter: Array | None, name: str, x: Array, features: tuple[int, ...]) -> Array | None:
    """A parameter over the feature axes, reshaped to x's rank with 1 elsewhere."""
    if parameter is None:
        return None
    shape = tuple(n if axis in features else 1 for axis, n in enumerate(x.shape))
    if parameter.size != math.prod(shape):
        raise ValueError(
            f"`{name}` has shape {parameter.shape}, but x of shape {x.shape} has {math.prod(shape)} features along "
            f"axes {features}; build the layer for that number of features, or name other feature axes."
        )
    return parameter.reshape(shape)


def check_settings(settings: Any) -> None:
    """Raise for a setting that no x could make right, of those that the operators would refuse later.

    Raises:
      TypeError, ValueError: naming the argument.
    """
    check.epsilon(getattr(settings, "epsilon", 0.0), "epsilon")
    check.number(getattr(settings, "scale_offset", 0.0), "scale_offset")
    for name, choices in (("method", METHODS), ("rule", tuple(RULES)), ("running", ("merged", "group_mean"))):
        check.one_of(getattr(settings, name, choices[0]), choices, name)


def options_of(settings: Any, x: Array, where: Array | None, initializing: bool) -> dict[str, Any]:
    """The arguments every operator takes. No axis is bound while a model is being initialised, so none is used."""
    named = settings.axis_name is not None and not initializing
    return {
        "eps": check.epsilon(settings.epsilon, "epsilon"),
        "where": None if where is None else broadcast_mask(where, x),
        "scale_offset": settings.scale_offset,
        "axis_name": settings.axis_name if named else None,
        "axis_index_groups": settings.axis_index_groups if named else None,
        "method": settings.method,
        "rule": settings.rule,
        "rescale": settings.rescale,
    }


def quantised(settings: Any) -> dict[str, Any]:
    """The arguments that say how an operator's y is quantised."""
    return {"quant": settings.quant, "norm_round_first": settings.norm_round_first}


def broadcast_mask(where: Array, x: Array) -> Array:
    """A mask of lower rank stands for x's last axes where it fits there, as for Flax; else the operator decides.

    In a mask of numbers all but 0 is measured.
    """
    where = jnp.asarray(where, bool)
    last = (1,) * (x.ndim - where.ndim) + where.shape
    fits = len(last) == x.ndim and all(a in (1, b) for a, b in zip(last, x.shape, strict=True))
    return where.reshape(last) if fits else where


def layer_norm(
    settings: Any,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    where: Array | None,
    *,
    centered: bool = True,
    initializing: bool = False,
) -> Array:
    """Layer norm (RMS norm if not `centered`) over `settings.reduction_axes`; parameters along `feature_axes`.

    Args:
      settings: a LayerNorm or RMSNorm layer.
      x: `[...]`, any dtype.
      scale, bias: one entry per feature, or None.
      where: bool, broadcastable to x, or None: what is measured.

    Returns:
      x's shape, in Flax's result dtype.
    """
    reduced = sorted_axes(settings.reduction_axes, x.ndim, "reduction_axes")
    features = sorted_axes(settings.feature_axes, x.ndim, "feature_axes")
    x, out = typed(settings, x, scale, bias)
    operator = layer.layer_norm if centered else rms.rms_norm
    return operator(  # type: ignore[return-value]
        x,
        spread(scale, "scale", x, features),
        spread(bias, "bias", x, features),
        axis=reduced,
        batch_invariant=settings.batch_invariant,
        out_dtype=out,
        **quantised(settings),
        **options_of(settings, x, where, initializing),
    )


def number_of_groups(channels: int, num_groups: int | None, group_size: int | None) -> int:
    """How many groups `channels` are split into, by exactly one of the two arguments.

    Raises:
      ValueError: if both or neither is given, or the channels do not divide evenly.
    """
    if (num_groups is None) == (group_size is None):
        raise ValueError(
            f"give exactly one of `num_groups` and `group_size`; got {num_groups} and {group_size}. "
            "`num_groups` is 32 by default: pass num_groups=None beside `group_size`."
        )
    name, number = ("num_groups", num_groups) if group_size is None else ("group_size", group_size)
    if not isinstance(number, int) or number <= 0 or channels % number:
        raise ValueError(f"`{name}`={number} must be a positive divisor of the number of channels, {channels}.")
    return number if group_size is None else channels // number


def group_norm(
    settings: Any,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    where: Array | None,
    *,
    num_groups: int,
    initializing: bool = False,
) -> Array:
    """Group norm with the channels last, over `settings.reduction_axes` (None: all but the leading axis).

    Args:
      settings: a GroupNorm layer.
      x: `[..., C]`, any dtype.
      scale, bias: `[C]` or None.
      where: bool, broadcastable to x, or None: what is measured.
      num_groups: a divisor of C.

    Returns:
      x's shape, in Flax's result dtype.

    Raises:
      ValueError: if `reduction_axes` lacks the last axis.
    """
    last = x.ndim - 1
    axes = settings.reduction_axes
    reduced = (*range(1, last), last) if axes is None else sorted_axes(axes, x.ndim, "reduction_axes")
    if last not in reduced:
        raise ValueError(f"`reduction_axes`={axes!r} must include the last axis of x, {last}: it holds the channels.")
    x, out = typed(settings, x, scale, bias)
    return group.group_norm(
        x,
        spread(scale, "scale", x, (last,)),
        spread(bias, "bias", x, (last,)),
        num_groups=num_groups,
        reduction_axes=reduced,
        on_single="zero",
        out_dtype=out,
        **options_of(settings, x, where, initializing),
    )


def instance_norm(
    settings: Any,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    where: Array | None,
    *,
    initializing: bool = False,
) -> Array:
    """Instance norm: statistics per entry of the leading axis and of `settings.feature_axes`.

    Args:
      settings: an InstanceNorm layer.
      x: `[N, ...]`, any dtype.
      scale, bias: one entry per feature, or None.
      where: bool, broadcastable to x, or None: what is measured.

    Returns:
      x's shape, in Flax's result dtype.

    Raises:
      ValueError: if the feature axes hold the leading one.
    """
    features = instance_features(settings, x)
    x, out = typed(settings, x, scale, bias)
    return group.instance_norm(
        x,
        spread(scale, "scale", x, features),
        spread(bias, "bias", x, features),
        axis=features,
        on_single="zero",
        out_dtype=out,
        **options_of(settings, x, where, initializing),
    )


def instance_features(settings: Any, x: Array, name: str = "feature_axes") -> tuple[int, ...]:
    """The axes of the setting `name`, none of them the leading (batch) axis of x `[N, ...]`."""
    given = getattr(settings, name)
    features = sorted_axes(given, x.ndim, name)
    if 0 in features:
        raise ValueError(f"`{name}`={given!r} holds axis 0 of x, which is the batch axis.")
    return features


def check_batch_norm(settings: Any) -> None:
    """Raise for settings of a BatchNorm layer that contradict one another.

    Raises:
      TypeError, ValueError: naming the argument and the remedy.
    """
    momentum = settings.momentum
    if momentum is not None:
        check.momentum(momentum)
    if settings.zero_debias and (momentum is None or momentum == 1):
        raise ValueError(
            f"`zero_debias` corrects a moving average with a momentum below 1; got momentum={momentum}. "
            "Leave it off: a cumulative average (momentum=None) has no such bias."
        )
    if settings.frozen not in (False, True, "statistics"):
        raise ValueError(f"`frozen` must be False, True or 'statistics'; got {settings.frozen!r}.")
    if settings.frozen and not settings.track_running_stats:
        raise ValueError("`frozen` uses running statistics, which `track_running_stats=False` does without.")


def counts_batches(settings: Any) -> bool:
    """Whether a BatchNorm layer stores the number of batches: the default state stays Flax's."""
    return settings.track_running_stats and (settings.momentum is None or settings.zero_debias)


def batch_norm(
    settings: Any,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    where: Array | None,
    running: Running | None,
    *,
    use_running_average: bool,
    initializing: bool = False,
    residual: Array | None = None,
    per_sample: bool = False,
    promoted_with: tuple[Array, ...] = (),
) -> tuple[Array, Running | None]:
    """Batch norm by the batch's or the running statistics, with what a BatchNormAct has behind it.

    Args:
      settings: a BatchNorm layer, or one that adds to it (an `activation`).
      x: any shape; `settings.axis` are its feature axes.
      scale, bias: one entry per feature (with `per_sample`: and per entry of axis 0), or None.
      where: bool, broadcastable to x, or None: what is measured.
      running: the stored statistics; None where none are kept, which means the batch's are always used.
      use_running_average: normalise by `running`; no named axis, mask or virtual batch plays a part then.
      initializing: batch statistics of this device alone, so that any x and any context will do.
      residual: of x's shape, added behind the norm; or None.
      promoted_with: further arrays that count in the promoted dtype of y.

    Returns:
      (y, new running statistics); the latter None where they stay as they are.

    Raises:
      ValueError: for a `quant` where the batch's statistics are used.
    """
    features = sorted_axes(settings.axis, x.ndim, "axis")
    shape = tuple(x.shape[axis] for axis in features)
    if settings.frozen is True:
        scale, bias, running = jax.tree.map(jax.lax.stop_gradient, (scale, bias, running))
    x, out = typed(settings, x, scale, bias, residual, *promoted_with)
    over = (0, *features) if per_sample else features
    scale, bias = spread(scale, "scale", x, over), spread(bias, "bias", x, over)
    residual = None if residual is None else check.same_shape(residual, "residual", x, "x")
    activation = getattr(settings, "activation", None)
    bare = residual is None and activation is None
    if running is not None and (use_running_average or settings.frozen):
        mean, var = fitted(running.mean, "mean", shape, x), fitted(running.var, "var", shape, x)
        options = {"axis": features, "eps": settings.epsilon, "scale_offset": settings.scale_offset, "out_dtype": out}
        options |= quantised(settings)
        if bare:
            return batch.batch_norm_inference(x, mean, var, scale, bias, **options), None
        options |= {"residual": residual, "activation": activation}
        return batch_act.batch_norm_act_inference(x, mean, var, scale, bias, **options), None
    if settings.quant is not None:
        raise ValueError("`quant` is for inference: use the running statistics (`use_running_average=True`).")
    shift = None if running is None else jax.lax.stop_gradient(fitted(running.mean, "mean", shape, x))
    y, moments = batch_normalized(
        x,
        scale,
        bias,
        channels=features,
        operator=type(settings).__name__,
        added=residual,
        activation=batch_act.activation_of(activation),
        virtual_batch_size=None if initializing else settings.virtual_batch_size,
        ragged=settings.ragged,
        running=settings.running,
        shift=shift,
        on_single="zero",
        out_dtype=out,
        **options_of(settings, x, where, initializing),
    )
    if running is None or initializing:
        return y, None
    return y, updated(settings, running, jax.lax.stop_gradient(moments), shape)


def fitted(value: Array, name: str, shape: tuple[int, ...], x: Array) -> Array:
    """One entry per feature, in the features' shape in x."""
    if value.size != math.prod(shape):
        raise ValueError(
            f"`{name}` has shape {value.shape}, but x of shape {x.shape} has features of shape {shape}; "
            "build the layer for that number of features, or name another `axis`."
        )
    return value.reshape(shape)


def updated(settings: Any, running: Running, moments: Any, shape: tuple[int, ...]) -> Running:
    """The running statistics after one more batch, each in the dtype and shape it is stored in."""
    counted = jnp.any(moments.count > 0)
    if settings.skip_nonfinite_update:  # all features or none, so that they have all seen the same batches
        counted &= jnp.all(jnp.isfinite(moments.mean)) & jnp.all(jnp.isfinite(moments.m2))
    old = [
        jax.lax.stop_gradient(v.reshape(shape).astype(jnp.promote_types(v.dtype, new.dtype)))
        for v, new in ((running.mean, moments.mean), (running.var, moments.m2))
    ]
    momentum = settings.momentum if running.num_batches is None else 0.0
    new = list(update_running(old[0], old[1], moments, momentum=momentum, unbiased=settings.unbiased))
    batches = running.num_batches
    if batches is not None:
        batches = batches + counted.astype(batches.dtype)
        weight = running_weight(batches, settings.momentum)  # not as a momentum: 1 - weight would round it away
        new = [a + weight * (b - a) for a, b in zip(old, new, strict=True)]
    new = [jnp.where(counted, b, a) for a, b in zip(old, new, strict=True)]
    return Running(_stored(new[0], running.mean), _stored(new[1], running.var), batches)


def _stored(value: Array, like: Array) -> Array:
    """`value` as `like` is stored, so that a state keeps its avals; complex ones replace real ones, as in Flax."""
    dtype = jnp.promote_types(like.dtype, value.dtype) if jnp.iscomplexobj(value) else like.dtype
    return value.reshape(like.shape).astype(dtype)


def bn_span(settings: Any, rows: int, devices: int) -> int:
    """How many rows share a statistic in training: the "BN span" that MLPerf logs report.

    Args:
      settings: a BatchNorm layer.
      rows: rows of x on one device (under jit with a globally sharded batch: of the whole batch).
      devices: devices along the layer's `axis_name`, all its axes together.

    Returns:
      Rows per statistics group where every device holds `rows` valid ones (the largest group, where they differ).

    Raises:
      ValueError: if the layer's virtual batch size is not one for that many rows and devices.
    """
    if settings.axis_name is None:
        devices = 1
    size = settings.virtual_batch_size
    if size is None:
        groups = settings.axis_index_groups if settings.axis_name is not None else None
        return rows * (devices if groups is None else max(len(g) for g in groups))
    inside = size <= rows and (rows % size == 0 or settings.ragged)
    across = size % rows == 0 and devices % (size // rows) == 0 if rows else False
    if not (inside or across):
        legal = sorted(
            {d for d in range(1, rows + 1) if rows % d == 0}
            | {rows * k for k in range(1, devices + 1) if devices % k == 0}
        )
        raise ValueError(
            f"`virtual_batch_size`={size} does not fit {rows} rows on each of {devices} devices; legal are {legal}."
        )
    return size
