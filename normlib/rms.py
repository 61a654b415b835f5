"""Root mean square normalization."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib import passes, quantize
from normlib._forward import effective
from normlib._row import RowNormOutput, row_norm
from normlib.precision import output_dtype, wide
from normlib.quantize import DualQuantized, Quantized


def rms_norm(
    x: Num[Array, ...],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    axis: check.Axes = -1,
    eps: float = 1e-6,
    where: Bool[Array, ...] | None = None,
    scale_offset: float = 0.0,
    axis_name=None,
    axis_index_groups=None,
    method: str = "auto",
    rule: str = "reverse",
    rescale: bool = False,
    batch_invariant: bool = False,
    return_moments: bool = False,
    backend: str | None = None,
    out_dtype: DTypeLike | None = None,
    quant=None,
    norm_round_first: bool = False,
    partial: float | None = None,
) -> Array | Quantized | DualQuantized | RowNormOutput:
    """Divide every row by its root mean square over `axis`.

        y = x / sqrt(mean(x**2) + eps) * (scale + scale_offset) + bias

    Args:
      x: `[..., D]`, or any shape with `axis` naming the normalised axes; computed in float32 (float64 for float64 x).
      scale: the shape of x along `axis` (`[D]`), or of x's rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      axis: normalised axis or axes.
      eps: added to the mean square inside the root, in units of x squared.
      where: bool, broadcastable to x: which entries are measured. A mask of lower rank stands for x's first axes.
      scale_offset: added to `scale` in float32: 1 for Gemma's (1 + scale).
      axis_name: mesh axis or axes over which the normalised axis is split: one collective forward, one backward.
      axis_index_groups: groups of indices along `axis_name`; only devices of one group share.
      method: accepted for symmetry with `layer_norm`; uncentred sums always pool by one all-reduce.
      rule: "reverse", "both" or "autodiff"; see `normlib.engine.normalize`.
      rescale: protect float32 from overflow of squares above 1e19, at the price of another pass.
      batch_invariant: y of a row does not change by a bit with the number of rows beside it.
      return_moments: return `RowNormOutput(y, moments)` instead of y; `moments.var` is the mean square.
      backend: which pass runs it; None for the one of `normlib.use_backend`.
      out_dtype: dtype of y, rounded once from float32; x's where None.
      quant: quantise y: a `normlib.Static`, `Dual`, `Dynamic`, `Asymmetric`, `MX` or `StraightThrough`. Its scales are
        per tensor or of `scale`'s shape; its rows are those that are normalised.
      norm_round_first: round y to x's dtype before quantising; False quantises the float32 value.
      partial: p-RMSNorm, in (0, 1]: only the first ceil(partial * D) entries along `axis`, one axis, are measured.

    Returns:
      y in x's shape and dtype (float32 for integers) or `out_dtype`, rounded once. With `quant` its codes
      with their scale, as `Quantized(y, scale, zero_point)` or `DualQuantized`.

    Raises:
      ValueError: for shapes, axes or groups that do not fit, or eps < 0.
      TypeError: for a mask that is not boolean, or a `quant` that is none of the kinds.
      NameError: if `axis_name` is not bound here.

    Source: Zhang and Sennrich 2019, section 4 for partial; scale_offset: Gemma's reference implementation.

    >>> rms_norm(jnp.array([[3.0, 3.0, 3.0]])).round(3).tolist()
    [[1.0, 1.0, 1.0]]
    """
    out = row_norm(
        x, scale, bias, axis=axis, eps=eps, centered=False, where=where, scale_offset=scale_offset,
        axis_name=axis_name, axis_index_groups=axis_index_groups, method=method, rule=rule, rescale=rescale,
        batch_invariant=batch_invariant, backend=backend, out_dtype=out_dtype, quant=quant,
        norm_round_first=norm_round_first, first=None if partial is None else _first(x, axis, partial),
    )  # fmt: skip
    return out if return_moments else out.y


def sharded_rms_norm(
    x: Num[Array, "*batch local"],
    scale: Float[Array, " local"] | None = None,
    bias: Float[Array, " local"] | None = None,
    *,
    axis_name,
    **options,
) -> Array | Quantized | DualQuantized | RowNormOutput:
    """`rms_norm` of rows split over a mesh axis: this device holds a part of every row, and of the parameters.

    One all-reduce of a sum of squares forward, one of a sum backward.

    Args:
      x: `[..., D / P]`, inside jax.shard_map, jax.pmap or jax.vmap.
      scale: `[D / P]`, this device's part, or None for ones.
      bias: likewise, or None for zeros.
      axis_name: mesh axis or axes over which the normalised axis is split.
      options: keyword arguments of `rms_norm`.

    Returns, raises: as `rms_norm`.

    >>> halves = jnp.array([[[1.0, 1.0]], [[3.0, 3.0]]])  # one row of four, in two parts
    >>> norm = jax.vmap(lambda x: sharded_rms_norm(x, axis_name="d"), axis_name="d")
    >>> np.float64(norm(halves)).round(3).tolist()
    [[[0.447, 0.447]], [[1.342, 1.342]]]
    """
    return rms_norm(x, scale, bias, axis_name=check.split_axis(axis_name), **options)


def _first(x, axis, partial: float) -> Array:
    """Mask of the first entries along `axis`."""
    x = check.array(x)
    axes = check.axes(axis, x.ndim)
    partial = check.number(partial, "partial")
    if len(axes) != 1 or not 0 < partial <= 1:
        raise ValueError(f"`partial` must lie in (0, 1], along one `axis`; got {partial} and axes {axes}.")
    size = x.shape[axes[0]]
    # ceil, but not of what binary fractions add: 0.07 * 100 is 7.000000000000001
    kept = math.ceil(round(partial * size, 9))
    return (jnp.arange(size) < kept).reshape([size if a == axes[0] else 1 for a in range(x.ndim)])


class RmsNormGradients(NamedTuple):
    """What `rms_norm_backward` returns.

    Attributes:
      dx: x's shape and dtype, or its codes with their scale.
      dscale: scale's shape and dtype, summed in float32; None without a scale.
    """

    dx: Array | Quantized | DualQuantized
    dscale: Array | None


def rms_norm_backward(
    dy: Float[Array, ...],
    x: Num[Array, ...],
    rstd: Float[Array, ...],
    scale: Float[Array, ...] | None = None,
    *,
    axis: check.Axes = -1,
    scale_offset: float = 0.0,
    quant=None,
    norm_round_first: bool = False,
    backend: str | None = None,
) -> RmsNormGradients:
    """The backward of `rms_norm` on its own, with dx quantised if wanted.

        g = dy * (scale + scale_offset),   dx = (g - x * rstd**2 * mean(g * x)) * rstd,   dscale = sum(dy * x * rstd)

    Args:
      dy: x's shape, the cotangent of y; any float dtype.
      x: `[..., D]`, as it went into `rms_norm`.
      rstd: x's shape without the normalised axes, or with size 1 along them: `moments.rstd(eps)` of
        `rms_norm(..., return_moments=True)`.
      scale: as it went into `rms_norm`.
      axis: normalised axis or axes.
      scale_offset: as it went into `rms_norm`.
      quant: quantise dx: one of the kinds; static scales are per tensor or of `scale`'s shape.
      norm_round_first: round dx to x's dtype before quantising; False quantises the float32 value.
      backend: which pass runs it; None for the one of `normlib.use_backend`.

    Returns:
      `RmsNormGradients(dx, dscale)`; dx is rounded once.

    Raises:
      ValueError: for shapes or axes that do not fit.
      TypeError: if `quant` is none of the kinds.

    Source: Zhang and Sennrich 2019, section 4; quantised as ops-nn's RmsNormGradQuant.

    >>> out = rms_norm_backward(jnp.ones((1, 2)), jnp.ones((1, 2)), jnp.ones(1), jnp.ones(2))
    >>> out.dx.tolist(), out.dscale.tolist()
    ([[0.0, 0.0]], [1.0, 1.0])
    """
    x, dy, rstd = check.array(x), check.array(dy, "dy"), check.array(rstd, "rstd")
    axes = check.axes(axis, x.ndim)
    if dy.shape != x.shape:
        raise ValueError(f"`dy` must have x's shape {x.shape}; got {dy.shape}.")
    kept = tuple(1 if a in axes else s for a, s in enumerate(x.shape))
    if rstd.shape not in (kept, tuple(s for a, s in enumerate(x.shape) if a not in axes)):
        raise ValueError(f"`rstd` must have x's shape {x.shape} without axes {axes}, or 1 there; got {rstd.shape}.")
    run = passes.current_backend() if backend is None else passes.checked(backend)
    dtype = output_dtype(x.dtype)
    out_dtype = quantize.out_dtype(quant, dtype)
    raised = check.parameter(scale, "scale", x, axes)
    weight, rstd = effective(raised, scale_offset), wide(rstd).reshape(kept)
    x = x.astype(dtype)
    x = x if quant is None else wide(x)
    _, b = run.grad_sums(x, dy, None, None, rstd, weight, axes=axes, where=None)
    c1 = rstd * b / max(math.prod(x.shape[a] for a in axes), 1)
    dx = run.grad_apply(x, dy, None, None, rstd, weight, c1, None, where=None).astype(out_dtype)
    dx = quantize.finish(dx, quant, dtype, axes=axes, norm_round_first=norm_round_first)
    if scale is None or raised is None:
        return RmsNormGradients(dx, None)
    spread = tuple(a for a, (s, t) in enumerate(zip(raised.shape, x.shape)) if s != t)
    _, dscale = run.grad_sums(x, dy, None, None, rstd, None, axes=spread, where=None)
    given = check.array(scale, "scale")
    return RmsNormGradients(dx, dscale.reshape(given.shape).astype(given.dtype))
