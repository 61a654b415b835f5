"""Folding at inference: a norm with known statistics is an affine map, and a linear layer beside it can hold it.

    norm after the layer:   y = (W x + c - mean) * a + bias,   a = (scale + scale_offset) / sqrt(var + eps)
    norm before the layer:  y = W (x * a + b) + c,             b = bias - mean * a

Everything is computed in float32 (float64 for float64 kernels) and rounded once to the kernel's dtype. Statistics and
kernels are inputs, never changed in place. Whole networks: `normlib.fold`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from normlib import _arguments as check
from normlib.moments import reciprocal_root


class Folded(NamedTuple):
    """A linear layer that does its norm's work too.

    Attributes:
      kernel: the layer's kernel, in its shape and dtype.
      bias: `[C_out]`, in the kernel's dtype (the old bias's, where there was one).
    """

    kernel: Array
    bias: Array


class FoldedAffine(NamedTuple):
    """A norm's scale and bias after folding.

    Attributes:
      scale: `[C]`.
      bias: `[C]`.
    """

    scale: Array
    bias: Array


def fold_conv_batch_norm(
    kernel: Float[Array, ...],
    bias: Float[Array, " C"] | None,
    mean: Float[Array, " C"],
    var: Float[Array, " C"],
    scale: Float[Array, " C"] | None = None,
    norm_bias: Float[Array, " C"] | None = None,
    *,
    eps: float = 1e-5,
    scale_offset: float = 0.0,
    layout: str | None = None,
    groups: int = 1,
    transposed: bool = False,
) -> Folded:
    """A convolution followed by batch norm as one convolution: kernel * a, (bias - mean) * a + norm_bias.

        a = (scale + scale_offset) / sqrt(var + eps), per output channel

    Right for every stride, dilation, padding and group count, as long as nothing but the norm reads the convolution's
    result.

    Args:
      kernel: any rank; computed in float32 (float64 for float64), returned in its dtype.
      bias: `[C]`, of the convolution, or None for zeros.
      mean, var: `[C]`, the norm's statistics, as many as the convolution has output channels C.
      scale, norm_bias: `[C]`, the norm's parameters, or None for ones and zeros.
      eps: of the norm, in units of its input squared.
      scale_offset: added to `scale` in float32.
      layout: a letter per axis of `kernel`: I for input channels, O for output channels, others for space. None: the
        last two are "IO" (Flax). PyTorch: "OIHW", transposed "IOHW".
      groups: feature groups. They matter for a transposed convolution in PyTorch's layout, whose O axis holds the
        C / groups channels of a group and whose I axis holds the groups one after the other. Elsewhere the O axis
        holds all C channels (depthwise: I axis 1) and `groups` is ignored.
      transposed: whether the convolution is a transposed one.

    Returns:
      `Folded(kernel, bias)`: use it with the same arguments.

    Raises:
      ValueError: for a negative variance, var + eps = 0, statistics of another size, a layout that does not fit, a
        `groups` that does not divide the input channels, or eps < 0. Of traced statistics a negative variance gives
        NaN.

    Source: Jacob et al. 2018, "Quantization and training of neural networks", section 3.2.

    >>> fold_conv_batch_norm(jnp.ones((3, 3, 1, 2)), None, jnp.zeros(2), jnp.full(2, 4.0), eps=0.0).kernel[0, 0, 0]
    Array([0.5, 0.5], dtype=float32)
    """
    kernel = check.array(kernel, "kernel")
    inputs, outputs = _axes(layout, kernel.ndim)
    split = groups if transposed else 1
    _check_groups(split, kernel, inputs)
    channels = kernel.shape[outputs] * split
    a, shift = _affine(mean, var, scale, norm_bias, channels, eps, scale_offset, kernel)
    old = jnp.zeros(channels, a.dtype) if bias is None else _vector(bias, "bias", channels).astype(a.dtype)
    factor = a.reshape(split, 1, -1)  # [groups, I / groups, O]
    factor = jnp.broadcast_to(factor, (split, kernel.shape[inputs] // split, kernel.shape[outputs]))
    factor = _spread(factor.reshape(-1, kernel.shape[outputs]), kernel, inputs, outputs)
    new = old * a + shift
    return Folded((kernel.astype(a.dtype) * factor).astype(kernel.dtype), new.astype(_bias_dtype(bias, kernel)))


def fold_batch_norm_conv(
    kernel: Float[Array, ...],
    bias: Float[Array, " O"] | None,
    mean: Float[Array, " C"],
    var: Float[Array, " C"],
    scale: Float[Array, " C"] | None = None,
    norm_bias: Float[Array, " C"] | None = None,
    *,
    padding: str | Sequence[tuple[int, int]],
    eps: float = 1e-5,
    scale_offset: float = 0.0,
    layout: str | None = None,
    groups: int = 1,
) -> Folded:
    """Batch norm followed by a convolution without padding as one convolution.

        kernel[..., i, o] * a[i],   bias[o] + sum over space and i of kernel[..., i, o] * b[i]

    With padding there is no such convolution: the zeros around stand for x = 0 after the norm, not for -b / a before
    it. A transposed convolution pads between its entries, so it cannot be folded this way either.

    Args:
      kernel: any rank; computed in float32 (float64 for float64), returned in its dtype.
      bias: of the convolution, of shape [O] for O output channels, or None for zeros.
      mean, var: the norm's statistics, of shape [C]: as many as the convolution has input channels.
      scale, norm_bias: the norm's parameters, of shape [C], or None for ones and zeros.
      padding: the convolution's: "VALID", or (0, 0) for every axis.
      eps: of the norm, in units of its input squared.
      scale_offset: added to `scale` in float32.
      layout: a letter per axis of `kernel`; see `fold_conv_batch_norm`.
      groups: feature groups; the I axis holds the C / groups channels of a group.

    Returns:
      `Folded(kernel, bias)`.

    Raises:
      ValueError: for any padding, and as `fold_conv_batch_norm`.

    >>> kernel, mean, var = jnp.ones((2, 1, 3)), jnp.ones(1), jnp.ones(1)
    >>> fold_batch_norm_conv(kernel, None, mean, var, padding="VALID", eps=0.0).bias
    Array([-2., -2., -2.], dtype=float32)
    """
    none = padding == "VALID" if isinstance(padding, str) else all(tuple(p) == (0, 0) for p in padding)
    if not none:
        raise ValueError(
            f"`padding` must be 'VALID' (or zeros) to fold a norm into the convolution after it; got {padding!r}. The "
            "padded zeros are zeros after the norm, which no constant bias can make up for: keep the norm."
        )
    kernel = check.array(kernel, "kernel")
    inputs, outputs = _axes(layout, kernel.ndim)
    _check_groups(groups, kernel, outputs)
    channels, size = kernel.shape[inputs] * groups, kernel.shape[outputs]
    a, shift = _affine(mean, var, scale, norm_bias, channels, eps, scale_offset, kernel)
    old = jnp.zeros(size, a.dtype) if bias is None else _vector(bias, "bias", size).astype(a.dtype)

    def table(per_channel):
        """[C] -> kernel's shape: entry (i, o) belongs to channel i of o's group."""
        rows = jnp.repeat(per_channel.reshape(groups, -1), size // groups, 0).T  # [I, O]
        return _spread(rows, kernel, inputs, outputs)

    wide = kernel.astype(a.dtype)
    rest = tuple(axis for axis in range(kernel.ndim) if axis != outputs)
    new = old + jnp.sum(wide * table(shift), rest)
    return Folded((wide * table(a)).astype(kernel.dtype), new.astype(_bias_dtype(bias, kernel)))


def fold_dense_batch_norm(
    kernel: Float[Array, "I O"],
    bias: Float[Array, " O"] | None,
    mean: Float[Array, " O"],
    var: Float[Array, " O"],
    scale: Float[Array, " O"] | None = None,
    norm_bias: Float[Array, " O"] | None = None,
    *,
    eps: float = 1e-5,
    scale_offset: float = 0.0,
    layout: str = "IO",
) -> Folded:
    """A dense layer followed by batch norm as one dense layer: kernel * a, (bias - mean) * a + norm_bias.

    Args, returns, raises: as `fold_conv_batch_norm`, for a kernel of shape [I, O] (layout "IO", Flax) or [O, I] ("OI",
    PyTorch); everything else has shape [O].

    >>> fold_dense_batch_norm(jnp.ones((3, 1)), None, jnp.ones(1), jnp.full(1, 4.0), eps=0.0).bias
    Array([-0.5], dtype=float32)
    """
    return fold_conv_batch_norm(
        kernel, bias, mean, var, scale, norm_bias, eps=eps, scale_offset=scale_offset, layout=layout
    )


def fold_batch_norm_dense(
    kernel: Float[Array, "I O"],
    bias: Float[Array, " O"] | None,
    mean: Float[Array, " I"],
    var: Float[Array, " I"],
    scale: Float[Array, " I"] | None = None,
    norm_bias: Float[Array, " I"] | None = None,
    *,
    eps: float = 1e-5,
    scale_offset: float = 0.0,
    layout: str = "IO",
) -> Folded:
    """Batch norm followed by a dense layer as one dense layer: a[:, None] * kernel, bias + b @ kernel.

    Args, returns, raises: as `fold_batch_norm_conv`, for a kernel of shape [I, O] (layout "IO", Flax) or [O, I] ("OI",
    PyTorch); the layer's bias has shape [O], everything of the norm [I].

    >>> fold_batch_norm_dense(jnp.ones((1, 2)), None, jnp.ones(1), jnp.full(1, 4.0), eps=0.0).bias
    Array([-0.5, -0.5], dtype=float32)
    """
    return fold_batch_norm_conv(
        kernel, bias, mean, var, scale, norm_bias, padding="VALID", eps=eps, scale_offset=scale_offset, layout=layout
    )


def fold_rms_norm_dense(
    kernel: Float[Array, "I O"],
    bias: Float[Array, " O"] | None,
    scale: Float[Array, " I"] | None,
    norm_bias: Float[Array, " I"] | None = None,
    *,
    scale_offset: float = 0.0,
    layout: str = "IO",
) -> Folded:
    """The scale (and bias) of an RMS norm or layer norm moved into the dense layer after it.

        (n * (scale + scale_offset) + norm_bias) @ kernel + bias  =  n @ kernel' + bias'
        kernel' = (scale + scale_offset)[:, None] * kernel        bias' = bias + norm_bias @ kernel

    The norm itself stays, without scale and bias. Where several layers read the norm (query, key, value), fold each.

    Args:
      kernel: shape [I, O], or [O, I] by `layout`; computed in float32 (float64 for float64), returned in its dtype.
      bias: of the dense layer, shape [O], or None for zeros.
      scale: of the norm, shape [I], or None for ones.
      norm_bias: of the norm, shape [I], or None for zeros.
      scale_offset: added to `scale` in float32: 1 for Gemma's (1 + scale).
      layout: "IO" (Flax) or "OI" (PyTorch).

    Returns:
      `Folded(kernel, bias)`; the bias is zeros where there was none on either side.

    Raises:
      ValueError: for sizes or a layout that do not fit.

    >>> fold_rms_norm_dense(jnp.ones((2, 1)), None, jnp.array([0.0, 1.0]), scale_offset=1.0).kernel.tolist()
    [[1.0], [2.0]]
    """
    size = check.array(kernel, "kernel").shape[_axes(layout, 2)[0]]
    zeros, ones = jnp.zeros(size), jnp.ones(size)
    return fold_batch_norm_dense(
        kernel, bias, zeros, ones, scale, norm_bias, eps=0.0, scale_offset=scale_offset, layout=layout
    )


def fold_affine(
    scale: Float[Array, " C"] | None,
    bias: Float[Array, " C"] | None,
    outer_scale: Float[Array, " C"] | None,
    outer_bias: Float[Array, " C"] | None,
    *,
    scale_offset: float = 0.0,
) -> FoldedAffine:
    """A Scale/Bias pair after a norm merged into the norm's own.

        (n * (scale + scale_offset) + bias) * outer_scale + outer_bias
        scale' = (scale + scale_offset) * outer_scale - scale_offset      bias' = bias * outer_scale + outer_bias

    Args:
      scale, bias: the norm's, or None for ones and zeros.
      outer_scale, outer_bias: what follows, or None. Computed in float32 (float64 where one is).
      scale_offset: of the norm, before and after.

    Returns:
      `FoldedAffine(scale, bias)` in the dtype of `scale` (of `bias`, then of the outer ones, where that is None).

    Raises:
      ValueError: if all are None, the shapes differ, or there is a `scale_offset` without `scale`.

    >>> fold_affine(jnp.full(1, 2.0), jnp.ones(1), jnp.full(1, 3.0), None).scale.tolist()
    [6.0]
    """
    given = {"scale": scale, "bias": bias, "outer_scale": outer_scale, "outer_bias": outer_bias}
    arrays = {name: check.array(t, name) for name, t in given.items() if t is not None}
    if len({t.shape for t in arrays.values()}) != 1:
        raise ValueError(f"give arrays of one shape; got { {name: t.shape for name, t in arrays.items()} }.")
    _check_offset(scale, scale_offset)
    first = next(iter(arrays.values()))
    dtype = jnp.result_type(jnp.float32, *arrays.values())
    one, zero = jnp.ones(first.shape, dtype), jnp.zeros(first.shape, dtype)
    inner = (arrays["scale"].astype(dtype) if scale is not None else one) + scale_offset
    outer = arrays["outer_scale"].astype(dtype) if outer_scale is not None else one
    new = (arrays["bias"].astype(dtype) if bias is not None else zero) * outer
    new = new + (arrays["outer_bias"].astype(dtype) if outer_bias is not None else zero)
    return FoldedAffine((inner * outer - scale_offset).astype(first.dtype), new.astype(first.dtype))


def _axes(layout: str | None, rank: int) -> tuple[int, int]:
    """(input axis, output axis) of a kernel."""
    if rank < 2:
        raise ValueError(f"`kernel` must have an input and an output axis; got rank {rank}.")
    if layout is None:
        return rank - 2, rank - 1
    if len(layout) != rank or layout.count("I") != 1 or layout.count("O") != 1:
        raise ValueError(f"`layout` must name the {rank} axes of the kernel, I and O once each; got {layout!r}.")
    return layout.index("I"), layout.index("O")


def _check_groups(groups: int, kernel: Array, axis: int) -> None:
    if not isinstance(groups, int) or groups < 1 or kernel.shape[axis] % groups:
        raise ValueError(
            f"`groups` must divide the {kernel.shape[axis]} channels along axis {axis} of the kernel, shape "
            f"{kernel.shape}; got {groups!r}."
        )


def _vector(t, name: str, channels: int) -> Array:
    t = check.array(t, name)
    if t.shape != (channels,):
        raise ValueError(f"`{name}` must have shape ({channels},), one entry per channel; got {t.shape}.")
    return t


def _affine(mean, var, scale, bias, channels, eps, scale_offset, kernel) -> tuple[Array, Array]:
    """(a, bias - mean * a) in the dtype of the computation."""
    eps, scale_offset = check.epsilon(eps), check.number(scale_offset, "scale_offset")
    mean, var = _vector(mean, "mean", channels), _vector(var, "var", channels)
    if not isinstance(var, jax.core.Tracer):
        _check_variance(np.asarray(var), eps)
    dtype = jnp.promote_types(jnp.float32, kernel.dtype)
    # a traced variance cannot be refused: NaN shows, where the root of a small negative one plus eps would not
    spread = jnp.where(var < 0, jnp.nan, var.astype(dtype)) + jnp.asarray(eps, dtype)
    a = reciprocal_root(spread)
    if scale is not None:
        a = a * (_vector(scale, "scale", channels).astype(dtype) + scale_offset)
    _check_offset(scale, scale_offset)
    shift = -mean.astype(dtype) * a
    return a, shift if bias is None else shift + _vector(bias, "norm_bias", channels).astype(dtype)


def _check_offset(scale, scale_offset: float) -> None:
    if scale is None and scale_offset:
        raise ValueError(f"`scale_offset` {scale_offset} is added to `scale`, which is None: give both or neither.")


def _check_variance(var: np.ndarray, eps: float) -> None:
    wide = var.astype(np.float64)
    bad = np.flatnonzero(~((wide >= 0) & (wide + eps > 0)))
    if bad.size:
        raise ValueError(
            f"`var` must not be negative, nor zero without eps; channel {bad[0]} has {wide[bad[0]]} with eps {eps}. "
            "A variance that underflowed or was written to is wrong in evaluation too: measure it again with "
            "normlib.precise_batch_stats."
        )


def _spread(table: Array, kernel: Array, inputs: int, outputs: int) -> Array:
    """[I, O] -> the kernel's rank, its axes in their places."""
    if inputs > outputs:
        table = table.T
    sizes = {inputs: kernel.shape[inputs], outputs: kernel.shape[outputs]}
    return table.reshape([sizes.get(axis, 1) for axis in range(kernel.ndim)])


def _bias_dtype(bias, kernel: Array):
    return kernel.dtype if bias is None else jnp.asarray(bias).dtype
