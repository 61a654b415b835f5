"""A norm whose scale and bias are computed from its own moments: mixed, clipped or otherwise corrected statistics.

    y = (x - mean) * rstd * k + t,   (k, t) = style(moments, extras), constant along the reduced axes

The backward takes the cotangents of k and t, which the engine's two sums give, through `style` to the moments, and adds
them where any cotangent of moments goes: x is read as often as by a plain norm, and dx is rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array

from normlib import _arguments as check
from normlib import passes
from normlib._forward import Config, apply, pooled
from normlib._rules import backward
from normlib._varying import like
from normlib.engine import Normalized, normalize
from normlib.moments import Moments
from normlib.precision import output_dtype, statistics_dtype, wide
from normlib.scope import LOCAL, Scope

Style = Callable[[Moments, Any], tuple[Array, Array | None]]


@dataclass(frozen=True)
class _Plan:
    config: Config
    style: Style


def restyled(
    style: Style, x: Array, extras: Any, *, axes: tuple[int, ...], eps: float, where: Array | None = None,
    scope: Scope = LOCAL, shift: Array | None = None, rule: str = "reverse", backend: str | None = None,
    out_dtype: DTypeLike | None = None,
) -> Normalized:  # fmt: skip
    """Normalise x with what `style` makes of its moments; `style` must be hashable by value.

    Arguments as `normlib.engine.normalize`; `extras` is a pytree of floating-point arrays.
    """
    x = x.astype(output_dtype(x.dtype))
    out = check.result_dtype(out_dtype, x.dtype)
    if rule == "reverse" and not jnp.iscomplexobj(x):
        scope.check_bound()
        name = passes.current_backend() if backend is None else passes.checked(backend)
        plan = _Plan(Config(axes, True, 0.0, scope, False, name, out.name), style)
        return Normalized(*_run(plan, x, extras, where, shift, jnp.asarray(eps, statistics_dtype(x))))

    def composed(x, extras):
        found = normalize(
            wide(x), axes=axes, eps=eps, where=where, scope=scope, shift=shift, rule=rule, backend=backend
        )  # fmt: skip
        own = found.moments
        k, t = style(own, extras)
        y = passes.xla.apply(wide(x), own.mean, own.low, own.rstd(eps), k, t, where=where, dtype=out)
        return y, own, found.total

    # a checkpoint around a rule that has its own inside fails on jax 0.12
    run = composed if rule == "both" else jax.checkpoint(composed)
    return Normalized(*run(x, extras))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _restyled(plan: _Plan, x, extras, where, shift, eps) -> tuple[Array, Moments, Moments]:
    return _forward(plan, x, extras, where, shift, eps)[0]


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(plan: _Plan, *arrays):
    """One program outside of jit, see `normlib.engine`."""
    return _restyled(plan, *arrays)


def _forward(plan, x, extras, where, shift, eps):
    own, total = pooled(plan.config, x, where, shift, eps)
    rstd = own.rstd(eps)
    scale, bias = plan.style(own, extras)
    y = apply(plan.config, x, own, rstd, scale, bias, where)
    return (y, own, total), (x, extras, where, own, total, rstd)


def _restyled_fwd(plan, *primals):
    return _forward(plan, *jax.tree.map(lambda p: p.value, primals))


def _restyled_bwd(plan, residuals, cotangents):
    x, extras, where, own, total, rstd = residuals
    dy, d_own, d_total = cotangents
    config = replace(plan.config, out_dtype=None)  # dx has the dtype of x
    floats = own.mean, own.m2

    def style(floats, extras):
        return plan.style(own._replace(mean=floats[0], m2=floats[1]), extras)

    (k, t), pull = jax.vjp(style, floats, extras)
    kept = (x, k, t, where, own, total, rstd)
    _, dk, dt = backward(config, kept, (dy, d_own, d_total))
    d_floats, d_extras = pull((dk, dt))
    parts = zip((d_own.mean, d_own.m2), d_floats, floats)
    mean, m2 = (like(f, p) if isinstance(d, SymbolicZero) else d + like(f, p) for d, f, p in parts)
    # the sums of this second call are those of the first: XLA merges them
    dx, _, _ = backward(config, kept, (dy, d_own._replace(mean=mean, m2=m2), d_total))
    return like(dx(), x), jax.tree.map(like, d_extras, extras), None, None, None


_restyled.defvjp(_restyled_fwd, _restyled_bwd, symbolic_zeros=True)
