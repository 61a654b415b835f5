"""A norm between a sum and an activation, in the memory of a norm: what the fused operators share.

    s = sum_i weights[i] * terms[i];   y = activation(normalize(s) + behind),   rounded once;   residual = s, rounded

The hand-written backward keeps the terms (or s, where it is an array anyway) and the statistics, and forms the sum, the
activation's derivative and ds inside the loops of the norm's own passes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array

from normlib import _arguments as check
from normlib import passes
from normlib._deferred import Deferred
from normlib._forward import Config, apply, by_channel, effective, folded, heeded, pooled, sets_of, wide_or_none
from normlib._rules import backward
from normlib._varying import like, typed_like, varying
from normlib.engine import normalize
from normlib.moments import Moments
from normlib.passes import xla
from normlib.precision import output_dtype, rounded, wide, wide_dtype
from normlib.scope import LOCAL, Scope, unbroadcast


class Composed(NamedTuple):
    """What `composed` returns: y, the sum as an array of its own (None if not asked for), and the moments as
    `normlib.Normalized` has them."""

    y: Array
    residual: Array | None
    moments: Moments
    total: Moments


@dataclass(frozen=True)
class Plan:
    """The static part: of `config`, out_dtype is that of y before the activation."""

    config: Config
    weights: tuple[float, ...]
    terms: tuple[tuple[tuple[int, ...], str, frozenset[str]], ...]  # shape, dtype, varying mesh axes
    activation: Activation | None
    dtype: str  # of the sum as an array
    out_dtype: str
    round_first: bool
    residual: bool

    @property
    def wide(self):
        """The dtype that the sum is formed in."""
        return wide_dtype(self.dtype)

    @property
    def is_fused(self) -> bool:
        """True where the backend applies what stands behind the norm in the same sweep."""
        behind = self.activation is not None or self.config.out_dtype != self.out_dtype
        return behind and hasattr(self.config.passes, "apply_behind")

    @property
    def is_array(self) -> bool:
        """True where s is written out: one term, a rounded sum, or no 16-bit terms to form it from again."""
        alone = len(self.terms) == 1 and self.weights == (1.0,)
        return self.round_first or alone or not self.config.is_xla or self.dtype == self.wide.name


def composed(
    terms: list[Array], scale: Array | None = None, bias: Array | None = None, *, axes: tuple[int, ...], eps: float,
    weights: tuple[float, ...] | None = None, added: Array | None = None, centered: bool = True,
    where: Array | None = None, scale_offset: float = 0.0, scope: Scope = LOCAL, shift: Array | None = None,
    behind: Array | None = None, activation: Activation | None = None, round_first: bool = False,
    residual: bool = True, out_dtype: DTypeLike | None = None,
    rule: str = "reverse", rescale: bool = False, batch_invariant: bool = False, backend: str | None = None,
) -> Composed:  # fmt: skip
    """Normalise a weighted sum of `terms`, arrays of one shape, then apply `activation`.

    `added`, of their rank and broadcastable to them, is one more summand; `behind`, of their shape, is added after
    the norm. y has the terms' common dtype, or
    `out_dtype`; the rest is as in `normlib.engine.normalize`. With `round_first` the sum is rounded to its dtype
    before it is measured. Without `residual` the sum is no result, and no kernel writes it.
    """
    dtype = output_dtype(jnp.result_type(*terms))
    terms = terms if added is None else [*terms, added]
    terms = [t.astype(output_dtype(t.dtype)) for t in terms]
    out = check.result_dtype(out_dtype, dtype).name
    weights = (1.0,) * len(terms) if weights is None else weights
    raw = out if activation is None and behind is None else wide_dtype(dtype).name
    name = passes.current_backend() if backend is None else passes.checked(backend)
    known = float(eps) if isinstance(eps, int | float) else None
    config = Config(axes, centered, scale_offset, scope, batch_invariant, name, raw, known)
    types = tuple((t.shape, t.dtype.name, varying(t)) for t in terms)
    plan = Plan(config, weights, types, activation, dtype.name, out, round_first, residual)
    if rule == "reverse" and not rescale and not jnp.issubdtype(dtype, jnp.complexfloating):
        scope.check_bound()
        room = jnp.asarray(eps, plan.wide)
        # as a program of its own outside of jit (see engine._run), but not one for every new function object
        run = _composed if activation is not None and not isinstance(activation, Swish | Relu) else _run
        y, whole, own, total = run(plan, tuple(terms), scale, bias, behind, where, shift, room)
        return Composed(y, whole, own, total if scope.has_total else own)
    s = _sum(plan, _weights(plan), *terms)
    whole = rounded(s, dtype)
    s = whole if round_first or plan.is_array else s
    normalized = normalize(
        s, scale, bias, axes=axes, eps=eps, centered=centered, where=where, scale_offset=scale_offset, scope=scope,
        shift=shift, rule=rule, rescale=rescale, batch_invariant=batch_invariant, backend=backend, out_dtype=raw,
    )  # fmt: skip
    y = _activated(plan, normalized.y, behind)
    return Composed(y, whole if residual else None, normalized.moments, normalized.total)


class Activation(Protocol):
    """An element-wise function, equal and hashable by value, with its derivative."""

    def __call__(self, z: Array) -> Array:
        """The value at z."""

    def pull(self, dy: Array, z: Array, one: Array) -> Array:
        """The cotangent of z; `one` is a scalar 1 that XLA cannot see through."""


@dataclass(frozen=True)
class Swish:
    """z * sigmoid(beta * z), element by element."""

    beta: float = 1.0

    def __call__(self, z: Array) -> Array:
        return z * jax.nn.sigmoid(self.beta * z)

    def pull(self, dy, z, one):
        """dy * (s + beta * z * s * (1 - s)), s = sigmoid(beta * z).

        With a literal 1, XLA on CPU writes a float32 array of ones that the two passes share (2 x a 16-bit x).
        """
        t = z * (one * self.beta)
        s = one / (one + jnp.exp(-t))
        return dy * (s + t * s * (one - s))


@dataclass(frozen=True)
class Relu:
    """max(z, 0), element by element; its derivative at 0 is 0."""

    def __call__(self, z: Array) -> Array:
        return jax.nn.relu(z)

    def pull(self, dy, z, one):
        """dy where z is positive.

        As a product: XLA on CPU writes out what it selects (2 x a 16-bit x, measured on jax 0.10.2 and 0.12.0).
        """
        return dy * jnp.sign(jnp.maximum(z, 0 * one))


def _sum(plan: Plan, weights, *terms: Array) -> Array:
    """The weighted sum in the wide dtype, from left to right."""
    widened = [t.astype(plan.wide) if w is None else t.astype(plan.wide) * w for t, w in zip(terms, weights)]
    return functools.reduce(jnp.add, widened)


def _weights(plan: Plan):
    """The weights as operands, None for 1: XLA on CPU writes out an array of a literal that several passes read."""
    return tuple(None if w == 1 else jnp.asarray(w, plan.wide) for w in plan.weights)


def _summed(plan: Plan, terms) -> Array | Deferred:
    if plan.is_array:
        s = _sum(plan, _weights(plan), *terms)
        return rounded(s, plan.dtype) if plan.round_first or len(terms) == 1 else s
    return _deferred_sum(plan, terms)


def _deferred_sum(plan: Plan, terms) -> Deferred:
    return Deferred(functools.partial(_sum, plan), (_weights(plan), *terms), plan.terms[0][0], plan.wide)


def _activated(plan: Plan, z: Array, behind: Array | None) -> Array:
    if behind is not None:
        z = z + wide(*xla.own_copy(behind))
    return (z if plan.activation is None else plan.activation(z)).astype(plan.out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _composed(plan: Plan, terms, scale, bias, behind, where, shift, eps):
    """(y, residual or None, moments, total); the arrays as in `composed`."""
    return _forward(plan, terms, scale, bias, behind, where, shift, eps)[0]


def _forward(plan, terms, scale, bias, behind, where, shift, eps):
    parameters = scale, bias, behind, where
    if (found := _whole_forward(plan, terms, *parameters, shift, eps)) is not None:
        y, residual, own, rstd = found
        exact = residual is not None and (plan.round_first or plan.dtype == plan.wide.name)
        kept = {"sum": residual} if exact else {"terms": tuple(terms)}
        residual = residual if plan.residual else None
        return (y, residual, own, own), (kept, *parameters, own, own, rstd)
    s = _summed(plan, terms)
    own, total = pooled(plan.config, s, where, shift, eps)
    rstd = own.rstd(eps)
    if plan.is_fused:
        mean, low, by_entry = by_channel(plan.config, s, own, rstd)
        folds = folded(by_entry, effective(scale, plan.config.scale_offset), wide_or_none(bias), where)
        options = {"activation": plan.activation, "dtype": plan.out_dtype}
        y = plan.config.passes.apply_behind(s, mean, low, *folds, behind, where, **options)
    else:
        y = _activated(plan, apply(plan.config, s, own, rstd, scale, bias, where), behind)
    kept = {"sum": s} if plan.is_array else {"terms": tuple(terms)}
    return (y, s.astype(plan.dtype) if plan.residual else None, own, total), (kept, *parameters, own, total, rstd)


def _whole_forward(plan, terms, scale, bias, behind, where, shift, eps):
    """(y, residual, moments, rstd) in one kernel, where the backend has one for it."""
    config = plan.config
    whole = getattr(config.passes, "forward", None)
    if whole is None or not config.scope.is_local or heeded(config, shift):
        return None
    return whole(
        terms, effective(scale, config.scale_offset), wide_or_none(bias), where, behind, axes=config.axes,
        eps=eps if config.eps is None else config.eps, centered=config.centered, dtype=plan.out_dtype,
        weights=plan.weights, activation=plan.activation,
        residual_dtype=plan.dtype if plan.residual or plan.round_first else None, round_first=plan.round_first,
        batch_invariant=config.batch_invariant, **sets_of(config),
    )  # fmt: skip


def _composed_fwd(plan, *primals):
    return _forward(plan, *jax.tree.map(lambda p: p.value, primals))


def _composed_bwd(plan, residuals, cotangents):
    if (found := _whole_backward(plan, residuals, cotangents)) is not None:
        return found
    kept, scale, bias, behind, where, own, total, rstd = residuals
    dy, d_residual, d_own, d_total = cotangents
    # ds is asked for in the wide dtype: the residual's cotangent is added before the one rounding
    if "sum" in kept:
        wider = Deferred(wide, (kept["sum"],), plan.terms[0][0], plan.wide)
    else:
        wider = _deferred_sum(plan, kept["terms"])
    s = _readable(plan, wider)
    d_behind = None
    if plan.activation is not None and not isinstance(dy, SymbolicZero):
        dy = _through_activation(plan, dy, s, own, rstd, scale, bias, behind, where)
    if behind is not None and not isinstance(dy, SymbolicZero):
        (own_dy,) = xla.own_copy(*xla.own_copy(dy))  # behind one barrier alone, it would be the copy of a pass
        d_behind = like(own_dy.astype(plan.wide), behind)
    # y's dtype does not matter to the backward
    config = replace(plan.config, out_dtype=None)
    ds, dscale, dbias = backward(config, (s, scale, bias, where, own, total, rstd), (dy, d_own, d_total))

    def total_ds(again=False):
        if d_residual is None or isinstance(d_residual, SymbolicZero):
            return ds(again)
        (extra,) = xla.own_copy(d_residual)
        (extra,) = xla.own_copy(extra) if again else (extra,)
        return ds(again) + wide(extra)

    whole = functools.cache(total_ds)
    cts = []
    for (shape, dtype, names), w in zip(plan.terms, plan.weights):
        if shape == plan.terms[0][0]:
            # in 16 bits, one float32 ds for two weights would be written out
            part = total_ds(again=True) if w != 1 and dtype != plan.wide.name else whole()
        else:
            part = unbroadcast(total_ds(again=True), shape)
        cts.append(typed_like(part if w == 1 else part * w, dtype, names))
    return tuple(cts), dscale, dbias, d_behind, None, None, None


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(plan: Plan, *arrays):
    return _composed(plan, *arrays)


_composed.defvjp(_composed_fwd, _composed_bwd, symbolic_zeros=True)


def _whole_backward(plan, residuals, cotangents):
    """All cotangents in one kernel, where the backend has one for it and none comes through the moments."""
    kept, scale, bias, behind, where, own, _, rstd = residuals
    dy, d_residual, d_own, _ = cotangents
    config = plan.config
    whole = getattr(config.passes, "backward", None)
    if whole is None or where is not None or not config.scope.is_local:
        return None
    if isinstance(dy, SymbolicZero) or not all(isinstance(t, SymbolicZero) for t in (d_own.mean, d_own.m2)):
        return None
    shape = plan.terms[0][0]
    outs: list[tuple[float, str]] = []
    for (own_shape, dtype, _), w in zip(plan.terms, plan.weights):
        if own_shape == shape and (w, dtype) not in outs:
            outs.append((w, dtype))
    parameters = {"scale": scale, "bias": bias}
    shapes = {k: p.shape for k, p in parameters.items() if p is not None}
    if plan.terms[-1][0] != shape:
        shapes["sum"] = plan.terms[-1][0]
    through = plan.activation is not None
    centre = (own.mean, own.low) if config.centered else (None, None)
    found = whole(
        [kept["sum"]] if "sum" in kept else kept["terms"], dy, *centre, rstd,
        effective(scale, config.scale_offset), wide_or_none(bias) if through else None,
        behind if through else None, None if isinstance(d_residual, SymbolicZero) else d_residual, axes=config.axes,
        weights=None if "sum" in kept else plan.weights, activation=plan.activation, outs=outs,
        behind_dtype=behind.dtype if behind is not None and through else None, shapes=shapes, **sets_of(config),
    )  # fmt: skip
    if found is None:
        return None
    cts = []
    for (own_shape, dtype, names), w in zip(plan.terms, plan.weights):
        part = found.ds[outs.index((w, dtype))] if own_shape == shape else found.parameters["sum"] * w
        cts.append(typed_like(part, dtype, names))
    d_scale, d_bias = (None if p is None else like(found.parameters[k], p) for k, p in parameters.items())
    d_behind = None if behind is None else like(found.dz if through else dy, behind)
    return tuple(cts), d_scale, d_bias, d_behind, None, None, None


def _readable(plan: Plan, t: Deferred) -> Array | Deferred:
    """`t`, as an array where the backend is another than XLA."""
    return t if plan.config.is_xla else t.astype(t.dtype)


def _through_activation(plan, dy, s, own, rstd, scale, bias, behind, where) -> Array | Deferred:
    """The cotangent of z = normalize(s) + behind, from that of activation(z); z is formed again from what was kept."""
    mean, low, rstd = by_channel(plan.config, s, own, rstd)
    weight = effective(scale, plan.config.scale_offset)
    parameters = folded(rstd, weight, wide_or_none(bias), where)
    if plan.is_fused:
        return plan.config.passes.pull_behind(
            s, mean, low, *parameters, behind, where, dy, activation=plan.activation, dtype=plan.wide
        )

    def pulled(one, dy, s, mean, low, rstd, weight, bias, behind, where):
        z = xla.mapped(s, mean, low, rstd, weight, bias, where)
        z = z if behind is None else z + wide(behind)
        z = z if where is None else jnp.where(where | jnp.isfinite(z), z, 0)  # 0 * NaN behind the mask
        return plan.activation.pull(wide(dy), z, one)

    one = jnp.ones((), plan.wide)
    return _readable(plan, Deferred(pulled, (one, dy, s, mean, low, *parameters, behind, where), s.shape, plan.wide))
