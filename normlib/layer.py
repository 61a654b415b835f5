"""Layer normalization."""

from __future__ import annotations

from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib._row import RowNormOutput, row_norm
from normlib.quantize import DualQuantized, Quantized


def layer_norm(
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
    rule: str = "reverse",
    rescale: bool = False,
    batch_invariant: bool = False,
    return_moments: bool = False,
    backend: str | None = None,
    out_dtype: DTypeLike | None = None,
    quant=None,
    norm_round_first: bool = False,
) -> Array | Quantized | DualQuantized | RowNormOutput:
    """Normalise every row by its own mean and variance over `axis`.

        y = (x - mean) / sqrt(var + eps) * (scale + scale_offset) + bias

    Args:
      x: `[..., D]`, or any shape with `axis` naming the normalised axes; computed in float32 (float64 for float64 x).
      scale: the shape of x along `axis` (`[D]`), or of x's rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      axis: normalised axis or axes.
      eps: added to the variance inside the root, in units of x squared; with 0 a set of equal entries is NaN.
      where: bool, broadcastable to x: which entries are measured. A mask of lower rank stands for x's first axes.
      scale_offset: added to `scale` in float32 (1 for zero-centred scales).
      axis_name: mesh axis or axes over which the normalised axis is split: one collective forward, one backward.
      axis_index_groups: groups of indices along `axis_name`; only devices of one group share.
      method: how devices pool; see `normlib.scope.Scope`.
      rule: "reverse", "both" or "autodiff"; see `normlib.engine.normalize`.
      rescale: protect float32 from overflow of squares above 1e19, at the price of another pass.
      batch_invariant: y of a row does not change by a bit with the number of rows beside it.
      return_moments: return `RowNormOutput(y, moments)` instead of y.
      backend: which pass runs it; None for the one of `normlib.use_backend`.
      out_dtype: dtype of y, rounded once from float32; x's where None.
      quant: quantise y: a `normlib.Static`, `Dual`, `Dynamic`, `Asymmetric`, `MX` or `StraightThrough`. Its scales are
        per tensor or of `scale`'s shape; its rows are those that are normalised.
      norm_round_first: round y to x's dtype before quantising; False quantises the float32 value.

    Returns:
      y in x's shape and dtype (float32 for integers) or `out_dtype`, rounded once. With `quant` its codes
      with their scale, as `Quantized(y, scale, zero_point)` or `DualQuantized`.

    Raises:
      ValueError: for shapes, axes or groups that do not fit, or eps < 0.
      TypeError: for a mask that is not boolean, or a `quant` that is none of the kinds.
      NameError: if `axis_name` is not bound here.

    Source: Ba, Kiros and Hinton 2016.

    >>> layer_norm(jnp.array([[1.0, 3.0], [5.0, 5.0]]), eps=0.0 + 1e-12).round(3).tolist()
    [[-1.0, 1.0], [0.0, 0.0]]
    """
    out = row_norm(
        x, scale, bias, axis=axis, eps=eps, centered=True, where=where, scale_offset=scale_offset, axis_name=axis_name,
        axis_index_groups=axis_index_groups, method=method, rule=rule, rescale=rescale,
        batch_invariant=batch_invariant, backend=backend, out_dtype=out_dtype, quant=quant,
        norm_round_first=norm_round_first,
    )  # fmt: skip
    return out if return_moments else out.y


def sharded_layer_norm(
    x: Num[Array, "*batch local"],
    scale: Float[Array, " local"] | None = None,
    bias: Float[Array, " local"] | None = None,
    *,
    axis_name,
    **options,
) -> Array | Quantized | DualQuantized | RowNormOutput:
    """`layer_norm` of rows split over a mesh axis: this device holds a part of every row, and of the parameters.

    One collective of merged moments forward (up to 8 devices; two all-reduces beyond), one of two sums backward.

    Args:
      x: `[..., D / P]`, inside jax.shard_map, jax.pmap or jax.vmap.
      scale: `[D / P]`, this device's part, or None for ones.
      bias: likewise, or None for zeros.
      axis_name: mesh axis or axes over which the normalised axis is split.
      options: keyword arguments of `layer_norm`.

    Returns, raises: as `layer_norm`.

    >>> halves = jnp.array([[[1.0, 1.0]], [[3.0, 3.0]]])  # one row of four, in two parts
    >>> norm = jax.vmap(lambda x: sharded_layer_norm(x, axis_name="d"), axis_name="d")
    >>> norm(halves).round(3).tolist()
    [[[-1.0, -1.0]], [[1.0, 1.0]]]
    """
    return layer_norm(x, scale, bias, axis_name=check.split_axis(axis_name), **options)
