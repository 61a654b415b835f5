"""Norms that adapt: a bounded activation instead of statistics, a learned mix of statistics, batch renormalization."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib._forward import wide_or_none
from normlib._restyled import restyled
from normlib._varying import like
from normlib.engine import normalize
from normlib.moments import Moments, reciprocal_root
from normlib.passes.xla import own_copy
from normlib.precision import output_dtype, statistics_dtype, wide
from normlib.scope import Scope, axis_size, unbroadcast


class SwitchableNormOutput(NamedTuple):
    """What `switchable_norm` returns: y in x's shape and dtype, and the batch's moments `[C]` for
    `normlib.update_running` (at evaluation those that were given)."""

    y: Array
    moments: Moments


class BatchRenormOutput(NamedTuple):
    """What `batch_renorm` returns: y in x's shape and dtype, and moments `[C]` for `normlib.update_running`."""

    y: Array
    moments: Moments


def dynamic_tanh(
    x: Num[Array, "*batch d"],
    alpha: float | Float[Array, ""] = 0.5,
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    axis: check.Axes = -1,
    out_dtype: DTypeLike | None = None,
) -> Array:
    """DyT: an element-wise replacement of a norm, without any reduction.

        y = tanh(alpha * x) * scale + bias

    Args:
      x: `[..., D]`; computed in float32 (float64 for float64 x).
      alpha: scalar, learnable; starts at 0.5, in units of 1 / x.
      scale: the shape of x along `axis` (`[D]`), or of x's rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      axis: axis or axes of the parameters.
      out_dtype: dtype of y, rounded once from float32; that of x where None.

    Returns:
      y in x's shape and dtype (float32 for integers), rounded once. The backward keeps x and forms tanh again.

    Raises:
      ValueError: for shapes or axes that do not fit.

    Source: Zhu et al. 2025, "Transformers without Normalization".

    >>> dynamic_tanh(jnp.array([0.0, 100.0]), 0.5, jnp.array([2.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    x, alpha = check.array(x), check.array(alpha, "alpha")
    if alpha.size != 1:
        raise ValueError(f"`alpha` must be a scalar; got shape {alpha.shape}.")
    axes = check.axes(axis, x.ndim)
    scale, bias = (check.parameter(p, n, x, axes) for p, n in ((scale, "scale"), (bias, "bias")))
    x = x.astype(output_dtype(x.dtype))
    dtype = check.result_dtype(out_dtype, x.dtype).name
    return _dynamic_tanh(dtype, x, alpha.reshape((1,) * x.ndim), scale, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dynamic_tanh(dtype: str, x, alpha, scale, bias) -> Array:
    y = jnp.tanh(wide(x) * wide(alpha))
    y = y if scale is None else y * wide(scale)
    return (y if bias is None else y + wide(bias)).astype(dtype)


def _dynamic_tanh_fwd(dtype, x, alpha, scale, bias):
    return _dynamic_tanh(dtype, x, alpha, scale, bias), (x, alpha, scale, bias)


def _dynamic_tanh_bwd(_, residuals, dy):
    """Every sum reads operands of its own: shared, tanh would be written out in float32."""
    x, alpha, scale, bias = residuals
    one = jnp.ones((), statistics_dtype(x))
    operands = (x, dy, alpha, scale, one)

    def pieces():
        nonlocal operands
        operands = own_copy(*operands)
        x, dy, alpha, scale, one = operands
        t = jnp.tanh(wide(x) * wide(alpha))
        g = wide(dy) if scale is None else wide(dy) * wide(scale)
        return wide(x), wide(dy), wide(alpha), t, g * (one - t * t)

    xs, _, _, _, slope = pieces()
    dalpha = unbroadcast(slope * xs, alpha.shape)
    dscale = None
    if scale is not None:
        _, ds, _, t, _ = pieces()
        dscale = like(unbroadcast(ds * t, scale.shape), scale)
    dbias = None if bias is None else like(unbroadcast(pieces()[1], bias.shape), bias)
    _, _, by, _, slope = pieces()
    return like(slope * by, x), like(dalpha, alpha), dscale, dbias


_dynamic_tanh.defvjp(_dynamic_tanh_fwd, _dynamic_tanh_bwd)


def switchable_norm(
    x: Num[Array, "n *space c"],
    mean_logits: Float[Array, 3],
    var_logits: Float[Array, 3],
    scale: Float[Array, " c"] | None = None,
    bias: Float[Array, " c"] | None = None,
    *,
    running_mean: Float[Array, " c"] | None = None,
    running_var: Float[Array, " c"] | None = None,
    axis: int = -1,
    eps: float = 1e-5,
    where: Bool[Array, ...] | None = None,
    axis_name=None,
    on_single: str = "raise",
    rule: str = "reverse",
    backend: str | None = None,
    out_dtype: DTypeLike | None = None,
) -> SwitchableNormOutput:
    """Normalise by a learned mix of instance, layer and batch statistics.

        mean = sum_k softmax(mean_logits)[k] * mean_k,   var likewise,   k = instance, layer, batch
        y = (x - mean) / sqrt(var + eps) * scale + bias

    Args:
      x: `[N, ..., C]`, or any shape with samples along axis 0 and `axis` naming the channels; statistics in float32
        (float64 for float64 x). x is read once for the three: the others are merged from the instances' moments.
      mean_logits: `[3]`, softmax of which weighs the means, in the order instance, layer, batch.
      var_logits: `[3]`, likewise for the variances.
      scale: `[C]`, or of x's rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      running_mean: `[C]`, with `running_var` in place of the batch's statistics, for evaluation; None in training.
      running_var: `[C]`.
      axis: channel axis.
      eps: added to the mixed variance inside the root, in units of x squared.
      where: bool, broadcastable to x: which entries are measured, by instance, layer and batch, weighted by count.
        An instance of which none is measured gives bias. A mask of lower rank stands for x's first axes.
      axis_name: mesh axis or axes over which the batch statistics are shared (one more pass over x).
      on_single: "raise" if an instance has one entry only, or "zero" to accept its variance of 0.
      rule, backend, out_dtype: as `normlib.batch_norm`.

    Returns:
      `SwitchableNormOutput(y, moments)`; y is rounded once.

    Raises:
      ValueError: for shapes or axes that do not fit, one running statistic without the other, or eps < 0.
      TypeError: for a mask that is not boolean.

    Source: Luo et al. 2019, "Differentiable Learning-to-Normalize via Switchable Normalization".

    >>> x = jnp.array([[[1.0], [3.0]], [[5.0], [7.0]]])
    >>> only_instance = jnp.array([0.0, -100.0, -100.0])
    >>> switchable_norm(x, only_instance, only_instance).y.round(3).ravel().tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    x, eps = check.array(x), check.epsilon(eps)
    (channel,) = check.axes(axis, x.ndim)
    logits = [wide(check.array(t, n)) for t, n in ((mean_logits, "mean_logits"), (var_logits, "var_logits"))]
    for t, n in zip(logits, ("mean_logits", "var_logits")):
        if t.shape != (3,):
            raise ValueError(f"`{n}` must have shape (3,), for instance, layer and batch; got {t.shape}.")
    if (running_mean is None) != (running_var is None):
        raise ValueError("`running_mean` and `running_var` must be given together.")
    if channel == 0:
        raise ValueError(f"`axis` must not be 0, which holds the samples of x, shape {x.shape}.")
    space = tuple(a for a in range(1, x.ndim) if a != channel)
    entries = math.prod(x.shape[a] for a in space)
    where = check.mask(where, x)
    if where is None:
        check.more_than_one(entries, on_single, f"switchable_norm of x with shape {x.shape}")
    check.one_of(on_single, ("raise", "zero"), "on_single")
    scale, bias = (check.parameter(p, n, x, (channel,)) for p, n in ((scale, "scale"), (bias, "bias")))
    extras: dict = {"mean": logits[0], "var": logits[1], "scale": wide_or_none(scale), "bias": wide_or_none(bias)}
    batch = None
    if running_mean is not None:
        batch = _stored(x, running_mean, running_var, channel)
    elif axis_name is not None:
        scope = Scope(names=check.names(axis_name))
        shared = normalize(x, axes=(0, *space), eps=eps, where=where, scope=scope, rule=rule, backend=backend)
        batch = shared.moments
    if batch is not None:
        extras["batch"] = (batch.mean, batch.low, batch.var)
    out = restyled(
        _Mix(channel, eps), x, extras, axes=space, eps=eps, where=where, rule=rule, backend=backend,
        out_dtype=out_dtype,
    )  # fmt: skip
    batch = out.moments.merge_axis(0, keepdims=True) if batch is None else batch
    return SwitchableNormOutput(out.y, jax.tree.map(lambda t: t.reshape(x.shape[channel]), batch))


@dataclass(frozen=True)
class _Mix:
    """From the instances' statistics to mixed ones, as a scale and a bias behind the instance norm."""

    channel: int
    eps: float

    def __call__(self, own: Moments, extras) -> tuple[Array, Array]:
        layer = own.merge_axis(self.channel, keepdims=True)
        if "batch" in extras:
            mean, low, batch_var = extras["batch"]
        else:
            batch = own.merge_axis(0, keepdims=True)
            mean, low, batch_var = batch.mean, batch.low, batch.var
        by_mean, by_var = jax.nn.softmax(extras["mean"]), jax.nn.softmax(extras["var"])
        # as steps from the instance's mean: equal means then mix to exactly that mean, whatever the weights sum to
        step = by_mean[1] * ((layer.mean - own.mean) + (layer.low - own.low))
        step = step + by_mean[2] * ((mean - own.mean) + (low - own.low))
        var = by_var[0] * own.var + by_var[1] * layer.var + by_var[2] * batch_var
        room = jnp.asarray(self.eps, var.dtype)
        rstd = reciprocal_root(var + room)
        rstd = rstd if extras["scale"] is None else rstd * extras["scale"]
        bias = jnp.where(own.count > 0, -step * rstd, 0)  # an instance without entries has no mean to step from
        return rstd * jnp.sqrt(own.var + room), bias if extras["bias"] is None else bias + extras["bias"]


def batch_renorm(
    x: Num[Array, "*rows c"],
    running_mean: Float[Array, " c"],
    running_var: Float[Array, " c"],
    scale: Float[Array, " c"] | None = None,
    bias: Float[Array, " c"] | None = None,
    *,
    r_max: float | Float[Array, ""] = 3.0,
    d_max: float | Float[Array, ""] = 5.0,
    axis: int = -1,
    eps: float = 1e-5,
    where=None,
    axis_name=None,
    method: str = "auto",
    on_single: str = "raise",
    rule: str = "reverse",
    backend: str | None = None,
) -> BatchRenormOutput:
    """Batch normalization corrected towards the running statistics, so that training and evaluation agree.

        y = ((x - mean) / std * r + d) * scale + bias,   std = sqrt(var + eps)
        r = clip(std / running_std, 1 / r_max, r_max),   d = clip((mean - running_mean) / running_std, -d_max, d_max)

    Args:
      x: `[..., C]`, or any shape with `axis` naming the channels; statistics in float32 (float64 for float64 x).
      running_mean: `[C]`.
      running_var: `[C]`; running_std = sqrt(running_var + eps).
      scale: `[C]` or None for ones.
      bias: `[C]` or None for zeros.
      r_max: largest correction of the scale, 1 for plain batch norm; the paper ends at 3. May be traced (a schedule).
      d_max: largest correction of the mean, 0 for plain batch norm; the paper ends at 5.
      axis: channel axis; every other axis is reduced.
      eps: added to variances inside the root, in units of x squared.
      where, axis_name, method, on_single, rule, backend: as `normlib.batch_norm`.

    Returns:
      `BatchRenormOutput(y, moments)`. r and d take no gradient; update the running statistics with
      `normlib.update_running`, evaluate with `normlib.batch_norm_inference`.

    Raises:
      ValueError: for shapes or axes that do not fit, r_max < 1, d_max < 0, one entry per channel, or eps < 0.

    Source: Ioffe 2017, "Batch Renormalization".

    >>> x = jnp.array([[1.0], [3.0]])
    >>> batch_renorm(x, jnp.array([2.0]), jnp.array([1.0])).y.round(3).tolist()
    [[-1.0], [1.0]]
    """
    x, eps = check.array(x), check.epsilon(eps)
    (channel,) = check.axes(axis, x.ndim)
    for value, least, name in ((r_max, 1, "r_max"), (d_max, 0, "d_max")):
        if isinstance(value, int | float):
            check.number(value, name, least=least)
    raised = ((running_mean, "running_mean"), (running_var, "running_var"), (scale, "scale"), (bias, "bias"))
    old_mean, old_var, scale, bias = (wide_or_none(check.parameter(p, n, x, (channel,))) for p, n in raised)
    if old_mean is None or old_var is None:
        raise TypeError("`running_mean` and `running_var` must be arrays of x's channels; got None.")
    reduced = tuple(a for a in range(x.ndim) if a != channel)
    scope = Scope(names=check.names(axis_name), method=method)
    where = check.mask(where, x)
    if where is None:
        count = math.prod(x.shape[a] for a in reduced) * axis_size(scope.names)
        check.more_than_one(count, on_single, f"batch_renorm of x with shape {x.shape}")
    extras = {
        "old": (old_mean, old_var), "limits": tuple(jnp.asarray(t, statistics_dtype(x)) for t in (r_max, d_max)),
        "scale": scale, "bias": bias,
    }  # fmt: skip
    out = restyled(
        _Correction(eps), x, extras, axes=reduced, eps=eps, where=where, scope=scope, shift=old_mean, rule=rule,
        backend=backend,
    )  # fmt: skip
    return BatchRenormOutput(out.y, jax.tree.map(lambda t: t.reshape(x.shape[channel]), out.moments))


@dataclass(frozen=True)
class _Correction:
    """Batch renormalization's r and d, with the affine parameters behind them."""

    eps: float

    def __call__(self, own: Moments, extras) -> tuple[Array, Array]:
        (old_mean, old_var), (r_max, d_max) = extras["old"], extras["limits"]
        room = jnp.asarray(self.eps, own.m2.dtype)
        old_rstd = reciprocal_root(old_var + room)
        r = jnp.clip(jnp.sqrt(own.var + room) * old_rstd, 1 / r_max, r_max)
        d = jnp.clip((own.mean - old_mean) * old_rstd, -d_max, d_max)
        # running statistics that are not finite correct nothing: plain batch norm
        usable = jnp.isfinite(old_mean) & jnp.isfinite(old_rstd)
        r, d = lax.stop_gradient(jnp.where(usable, r, 1)), lax.stop_gradient(jnp.where(usable, d, 0))
        scale, bias = extras["scale"], extras["bias"]
        d = d if scale is None else d * scale
        return r if scale is None else r * scale, d if bias is None else d + bias


def _stored(x, mean, var, channel) -> Moments:
    """Stored statistics in the form of moments: count 1 only to make `var` what is stored."""
    pairs = ((mean, "running_mean"), (var, "running_var"))
    mean, var = (wide(check.parameter(t, n, x, (channel,))) for t, n in pairs)  # type: ignore[arg-type]
    return Moments(jnp.ones(mean.shape, jnp.int32), mean, jnp.zeros_like(mean), var)
