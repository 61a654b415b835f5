"""Batch normalization: local, synchronised over devices, and in virtual batches (Ghost BN)."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib import quantize
from normlib._batch import batch_normalized, stored_normalized
from normlib.moments import Moments


class BatchNormOutput(NamedTuple):
    """What `batch_norm` returns.

    Attributes:
      y: x's shape; x's dtype (float32 for integers and bools).
      moments: count, mean, low and m2 of the whole scope, each of the feature shape; `moments.var` is biased.
    """

    y: Array
    moments: Moments


def batch_norm(
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
    virtual_batch_size: int | None = None,
    ragged: bool = False,
    running: str = "merged",
    shift: Float[Array, ...] | None = None,
    method: str = "auto",
    on_single: str = "raise",
    rule: str = "reverse",
    rescale: bool = False,
    backend: str | None = None,
    out_dtype: DTypeLike | None = None,
) -> BatchNormOutput:
    """Normalise every channel by its mean and variance over all other axes, and over devices.

        y = (x - mean) / sqrt(var + eps) * (scale + scale_offset) + bias

    Args:
      x: `[..., C]`, or any shape with `axis` naming the channels; computed in float32 (float64 for float64 x).
      scale: `[C]` (the shape of x along `axis`), or of x's rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      axis: channel axis or axes; every other axis is reduced.
      eps: added to the variance inside the root, in units of x squared; with 0 a set of equal entries is NaN.
      where: bool, broadcastable to x: which entries are measured. Others are mapped with the same statistics and enter
        none. A mask of lower rank stands for x's first axes.
      scale_offset: added to `scale` in float32.
      axis_name: mesh axis or axes whose devices share statistics, inside jax.shard_map, jax.pmap or jax.vmap. Under
        jit with a globally sharded batch leave it None: statistics are global there.
      axis_index_groups: groups of indices along `axis_name`; only devices of one group share.
      virtual_batch_size: rows of axis 0 that share statistics (Ghost BN). With B rows here on each of P devices: a
        divisor of B (several virtual batches per device), or k * B with k dividing P (k neighbouring devices).
      ragged: allow a `virtual_batch_size` below B that does not divide it; the last virtual batch is smaller.
      running: the moments returned where statistics are shared in groups: "merged" by count over the whole scope, or
        "group_mean", the count-weighted mean of the groups' mean and variance, with a group's count.
      shift: `[C]`, a guess of the mean such as the running mean: saves a pass over x and a collective while it is
        within 1.5 standard deviations, never costs accuracy, and may hold anything, NaN included.
      method: "auto", "gather", "two_phase", "shifted", "adaptive" or "fast"; see `normlib.scope.Scope`.
      on_single: "raise" if a set of statistics has one entry only, or "zero" to return the bias then.
      rule: "reverse", "both" or "autodiff"; see `normlib.engine.normalize`.
      rescale: protect float32 from overflow of squares above 1e19, at the price of another pass.
      backend: which pass runs it; None for the one of `normlib.use_backend`.
      out_dtype: dtype of y, rounded once from float32; x's where None.

    Returns:
      `BatchNormOutput(y, moments)`. The variance that normalises is biased (divided by n). Update running statistics
      with `normlib.update_running`.

    Raises:
      ValueError: for shapes, axes or groups that do not fit, an illegal `virtual_batch_size` (the legal ones are
        listed), one entry per set of statistics, or eps < 0.
      TypeError: for a mask that is not boolean.
      NameError: if `axis_name` is not bound here.

    Gradients: with shard_map(check_vma=True) the gradients of replicated scale and bias arrive summed over the mesh;
    with check_vma=False or pmap and grad taken inside they are each device's part, and the caller sums them (psum).

    Source: Ioffe and Szegedy 2015; virtual batches: Hoffer et al. 2017, "Train longer, generalize better".

    >>> out = batch_norm(jnp.array([[1.0, 2.0], [3.0, 6.0]]))
    >>> out.y.round(3).tolist(), out.moments.mean.tolist()
    ([[-1.0, -1.0], [1.0, 1.0]], [2.0, 4.0])
    """
    x = check.array(x)
    channels = check.axes(axis, x.ndim)
    scale, bias = (check.parameter(p, n, x, channels) for p, n in ((scale, "scale"), (bias, "bias")))
    y, moments = batch_normalized(
        x, scale, bias, channels=channels, eps=eps, where=where, operator="batch_norm", scale_offset=scale_offset,
        axis_name=axis_name, axis_index_groups=axis_index_groups, virtual_batch_size=virtual_batch_size, ragged=ragged,
        running=running, shift=shift, method=method, on_single=on_single, rule=rule, rescale=rescale, backend=backend,
        out_dtype=out_dtype,
    )  # fmt: skip
    return BatchNormOutput(y, moments)


def batch_norm_inference(
    x: Num[Array, ...],
    mean: Float[Array, ...],
    var: Float[Array, ...],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    axis: check.Axes = -1,
    eps: float = 1e-5,
    scale_offset: float = 0.0,
    out_dtype: DTypeLike | None = None,
    quant=None,
    norm_round_first: bool = False,
) -> Any:
    """Batch normalization with given statistics: one affine map of x.

        y = (x - mean) * a + bias,   a = (scale + scale_offset) / sqrt(var + eps)

    Args:
      x: `[..., C]`, or any shape with `axis` naming the channels; computed in float32 (float64 for float64 x).
      mean: `[C]`, stored mean.
      var: `[C]`, stored variance; used as it is.
      scale: `[C]` or of x's rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      axis: channel axis or axes.
      eps: added to the variance inside the root, in units of x squared; with 0 a set of equal entries is NaN.
      scale_offset: added to `scale` in float32.
      out_dtype: dtype of y, rounded once from float32; x's where None.
      quant: quantise y: a `normlib.Static`, `Dual`, `Dynamic`, `Asymmetric`, `MX` or `StraightThrough`. Its scales are
        per tensor or per channel; a row with a dynamic scale is the channels of one position. Quantised x: give
        `normlib.dequantize` of it.
      norm_round_first: round y to x's dtype before quantising; False quantises the float32 value.

    Returns:
      The array y in x's shape and dtype (or `out_dtype`), rounded once. Its gradient is dx = dy * a; all five arrays
      get one.
      With `quant` its codes with their scale, as `Quantized(y, scale, zero_point)` or `DualQuantized`.

    Raises:
      ValueError: for shapes or axes that do not fit, or eps < 0.
      TypeError: for statistics that are None, or a `quant` that is none of the kinds.

    Source: Ioffe and Szegedy 2015, algorithm 2.

    >>> batch_norm_inference(jnp.ones((2, 3)), jnp.ones(3), jnp.ones(3)).tolist()[0]
    [0.0, 0.0, 0.0]
    """
    x = check.array(x)
    channels = check.axes(axis, x.ndim)
    dtype = check.result_dtype(out_dtype, x.dtype)
    given = quantize.out_dtype(quant, dtype)
    y = stored_normalized(
        x, mean, var, scale, bias, channels=channels, eps=eps, scale_offset=scale_offset, out_dtype=given
    )  # fmt: skip
    return quantize.finish(y, quant, dtype, axes=channels, norm_round_first=norm_round_first)
