"""The derivative rules: `reverse` (hand-written backward) and `both` (one linear tangent map, for both modes)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from normlib._deferred import zeros
from normlib._forward import Config, by_channel, constant_along, effective, forward, normalized, sets_of
from normlib._varying import is_bound, is_typed, like, summed_like, vary, varying
from normlib.moments import Moments, positive
from normlib.passes.xla import centred, own_copy
from normlib.precision import wide
from normlib.scope import pack_counts, unbroadcast, unpack_counts


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def reverse(config: Config, x, scale, bias, where, shift, eps) -> tuple[Array, Moments, Moments]:
    """(y, moments, total) with the hand-written backward; x of any shape, the rest broadcastable to it.

    Kept for the backward: x, scale, bias's dtype and the statistics, so 1 x the bytes of x.
    """
    return forward(config, x, scale, bias, where, shift, eps)


def _reverse_fwd(config, *primals):
    x, scale, bias, where, shift, eps = (None if p is None else p.value for p in primals)
    y, own, total, rstd = normalized(config, x, scale, bias, where, shift, eps)
    return (y, own, total), (x, scale, bias, where, own, total, rstd)


def _reverse_bwd(config, residuals, cotangents):
    dx, dscale, dbias = backward(config, residuals, cotangents)
    return like(dx(), residuals[0]), dscale, dbias, None, None, None


def backward(config: Config, residuals, cotangents) -> tuple[Callable[..., Array], Array | None, Array | None]:
    """(dx, dscale, dbias) from what a forward kept and the cotangents of (y, moments, total).

    dx is a function, so that who needs it twice (for an array and for the sum of it) computes it `again`, from operands
    of its own: as one value it would be written out in float32. x and dy may be deferred on the XLA backend; dx is then
    in the dtype that the deferred x states.
    """
    x, scale, bias, where, own, total, rstd = residuals
    dy, d_own, d_total = cotangents
    if isinstance(dy, SymbolicZero):
        dy = (zeros if config.is_xla else jnp.zeros)(x.shape, config.out_dtype or x.dtype)
    scope = config.scope
    mean, low, rstd_c = by_channel(config, x, own, rstd)
    weight = effective(scale, config.scale_offset)
    # a weight that varies along the reduced axes (layer norm) needs its own sums; a constant one (batch norm) does
    # not: there the two sums of dx are also dbias and dscale
    rowwise = weight is not None and not constant_along(weight.shape, rstd_c.shape)

    @functools.cache
    def sums(axes, weighted=False):
        return config.passes.grad_sums(
            x, dy, mean, low, rstd_c, weight if weighted else None, axes=axes, where=where
        )  # fmt: skip

    def parameter(p, part, shared=False):
        if p is None:
            return None
        axes = tuple(i for i, (k, m) in enumerate(zip(p.shape, x.shape)) if k == 1 and m != 1)
        found = unbroadcast((s0, s1)[part], p.shape) if shared else sums(axes)[part]
        return like(found if is_bound(scope.all_names) else summed_like(p, found), p)

    given = {k: p for k, p in (("scale", scale), ("bias", bias)) if p is not None}
    if (whole := _whole_backward(config, x, dy, d_own, own, rstd, weight, where, given)) is not None:
        dscale, dbias = (like(whole.parameters[k], given[k]) if k in given else None for k in ("scale", "bias"))
        return lambda again=False: whole.ds[0], dscale, dbias
    s0, s1 = sums(config.axes, rowwise)
    # A moment that was pooled over typed axes, or over a vmap seen from outside, is one value for all, its cotangent
    # already the total: it is added after pooling. Otherwise every device holds a copy, whose cotangent is a part: it
    # is added before.
    one_value = _is_one_value(scope.names) and scope.groups is None
    # Scaling comes before pooling, since devices may hold different scales, unless the types prove that they do not:
    # then unscaled sums are pooled once and serve as dscale and dbias too.
    same_weight = is_typed(scope.names) and scope.groups is None and not _vary_over(scope.names, scale, bias)
    pooled_first = same_weight and not rowwise and scope.channels is None
    if pooled_first:
        (s0, s1), _ = scope.sum_cotangents([s0, s1], None)
    a, b = (s0, s1) if rowwise or weight is None else (s0 * weight, s1 * weight)
    n = positive(own.count, rstd.dtype)
    # dx = (g - c1 * (x - mean) - c0) * rstd, with c0 = w0 / n and c1 = w1 / n
    w0, w1 = scope.sum_channels(a), rstd * scope.sum_channels(b)
    safe = jnp.where(rstd == 0, 1, rstd)
    d_mean, d_m2 = _cotangent(d_own.mean, own.mean) / safe, 2 * n * (_cotangent(d_own.m2, own.m2) / safe)
    if not one_value:
        w0, w1 = w0 - d_mean, w1 - d_m2
    d_total = _total_cotangents(config, d_total, total)
    if not pooled_first:
        in_parts = d_total is not None and not _is_one_value(scope.all_names)
        (w0, w1), summed = scope.sum_cotangents([w0, w1], d_total if in_parts else None)
        d_total = summed if in_parts else d_total
    if one_value:
        w0, w1 = w0 - d_mean, w1 - d_m2
    c0, c1 = w0 / n, w1 / n
    if d_total is not None:
        t0, t1 = d_total
        apart = (own.mean - total.mean) + (own.low - total.low)
        c0 = c0 - (t0 / positive(total.count, n.dtype) + 2 * t1 * apart) / safe
        c1 = c1 - 2 * t1 / safe
    c0, c1 = (_expanded(config, x, c) for c in (c0, c1))

    def dx(again=False):
        given = x, dy, mean, low, rstd_c, weight, c1, c0 if config.centered else None
        return config.passes.grad_apply(*(own_copy(*given) if again else given), where=where)

    def shared(p):
        return p is not None and not rowwise and constant_along(p.shape, s0.shape)

    return dx, parameter(scale, 1, shared(scale)), parameter(bias, 0, shared(bias))


def _whole_backward(config, x, dy, d_own, own, rstd, weight, where, parameters):
    """Everything in one sweep, where the backend has one for it and no cotangent comes through the moments."""
    whole = getattr(config.passes, "backward", None)
    if whole is None or where is not None or not config.scope.is_local or not isinstance(x, jax.Array):
        return None
    if not all(isinstance(t, SymbolicZero) for t in (d_own.mean, d_own.m2)):
        return None
    centre = (own.mean, own.low) if config.centered else (None, None)
    shapes = {k: p.shape for k, p in parameters.items()}
    return whole([x], dy, *centre, rstd, weight, axes=config.axes, shapes=shapes, **sets_of(config))


reverse.defvjp(_reverse_fwd, _reverse_bwd, symbolic_zeros=True)


def _expanded(config, x, t):
    return config.scope.expand(t, x.shape[config.scope.channel_axis]) if x.ndim else t


def _is_one_value(names) -> bool:
    """True if JAX sees what was pooled over `names` as one value, whose cotangent comes once, not once per device."""
    return is_typed(names) or not is_bound(names)


def _vary_over(names, *parameters) -> bool:
    return any(set(names) & varying(p) for p in parameters if p is not None)


def _cotangent(ct, primal):
    return jnp.zeros_like(primal) if isinstance(ct, SymbolicZero) else ct


def _total_cotangents(config, d_total, total):
    """Cotangents of the whole scope's mean and m2; None where they are zero or the moments are those of y."""
    parts = d_total.mean, d_total.m2
    if not config.scope.has_total or all(isinstance(p, SymbolicZero) for p in parts):
        return None
    return [_cotangent(p, t) for p, t in zip(parts, (total.mean, total.m2))]


def both(config: Config, x, scale, bias, where, shift, eps) -> tuple[Array, Moments, Moments]:
    """(y, moments, total) whose tangent map is linear and rematerialised, so that forward and reverse mode work.

    Shapes as `reverse`; it keeps as little, takes 1.2 to 2.2 times its time, and checks it independently.
    """
    y, own, total = _both(config, x, scale, bias, where, shift, eps)
    return y, _with_counts(own), _with_counts(total)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _both(config, x, scale, bias, where, shift, eps):
    y, own, total = forward(config, x, scale, bias, where, shift, eps)
    return y, _in_floats(own), _in_floats(total)


def _in_floats(moments: Moments) -> list[Array]:
    """[high, low words of the count, mean, low, m2]: the tangent of an integer could not be typed as varying."""
    return [*pack_counts(moments.count), *moments[1:]]


def _with_counts(words: list[Array]) -> Moments:
    return Moments(*unpack_counts(words))


@_both.defjvp
def _both_jvp(config, primals, tangents):
    x, scale, bias, where, shift, eps = primals
    x_dot, scale_dot, bias_dot = tangents[:3]
    y, own, total, rstd = normalized(config, x, scale, bias, where, shift, eps)
    fixed, dots = (x, scale, where, own, total, rstd), (x_dot, scale_dot, bias_dot)
    y_dot, own_dot, total_dot = jax.checkpoint(functools.partial(_tangent, config))(fixed, dots)
    mine, whole = _in_floats(own), _in_floats(total)
    return (y, mine, whole), (y_dot, _moments_dot(mine, own_dot), _moments_dot(whole, total_dot))


def _tangent(config, fixed, dots):
    x, scale, where, own, total, rstd = fixed
    x_dot, scale_dot, bias_dot = dots
    scope = config.scope
    mean, low, rstd_c = by_channel(config, x, own, rstd)
    n = positive(own.count, rstd.dtype)
    xc = centred(x, mean, low)
    if where is not None:
        xc = jnp.where(where | jnp.isfinite(xc), xc, 0)
    measured = wide(x_dot) if where is None else jnp.where(where, wide(x_dot), 0)
    local = [jnp.sum(t, config.axes, keepdims=True) for t in (measured, measured * xc)]
    (s0, s1), _ = scope.sum_cotangents([scope.sum_channels(t) for t in local], None)
    mean_dot = s0 / n if config.centered else jnp.zeros_like(s0)
    m2_dot = 2 * s1
    rstd_dot = -0.5 * rstd**3 * m2_dot / n
    mean_dot_c, rstd_dot_c = (_expanded(config, x, t) for t in (mean_dot, rstd_dot))
    weight = effective(scale, config.scale_offset)
    y_dot = (wide(x_dot) - mean_dot_c) * rstd_c + xc * rstd_dot_c
    y_dot = y_dot if weight is None else y_dot * weight
    y_dot = y_dot if scale is None else y_dot + xc * rstd_c * wide(scale_dot)
    y_dot = y_dot if bias_dot is None else y_dot + wide(bias_dot)
    total_dot = mean_dot, m2_dot
    if scope.has_total:
        apart = (own.mean - total.mean) + (own.low - total.low)
        t0, t1 = scope.sum_total([local[0], local[1] + apart * local[0]])
        total_dot = t0 / positive(total.count, n.dtype), 2 * t1
    return y_dot.astype(config.out_dtype or x.dtype), (mean_dot, m2_dot), total_dot


def _moments_dot(words: list[Array], dots) -> list[Array]:
    high, low_word, mean, low, m2 = words
    mean_dot, m2_dot = dots
    none = [vary(jnp.zeros_like(w), sorted(varying(w))) for w in (high, low_word, low)]
    return [none[0], none[1], _typed_like(mean_dot, mean), none[2], _typed_like(m2_dot, m2)]


def _typed_like(dot: Array, primal: Array) -> Array:
    return vary(dot, sorted(varying(primal)))
