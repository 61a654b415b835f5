"""Batch normalization, a residual and an activation in one operator with one rounding: the end of a residual block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib import quantize
from normlib._batch import batch_normalized, stored_normalized
from normlib._composed import Activation, Relu, Swish
from normlib.moments import Moments
from normlib.precision import wide, wide_dtype

NAMED: dict[str, Activation] = {"relu": Relu(), "silu": Swish(), "swish": Swish()}


class BatchNormActOutput(NamedTuple):
    """What `batch_norm_act` returns: y in x's shape and dtype, and moments `[C]` of the whole scope."""

    y: Array
    moments: Moments


@dataclass(frozen=True)
class Elementwise:
    """Any element-wise function, differentiated by JAX."""

    function: Callable[[Array], Array]

    def __call__(self, z: Array) -> Array:
        return self.function(z)

    def pull(self, dy: Array, z: Array, one: Array) -> Array:
        """dy times the function's derivative at z."""
        return jax.vjp(self.function, z)[1](dy.astype(z.dtype))[0]


def activation_of(activation) -> Activation | None:
    """The activation of a name or a function; None for none.

    Raises:
      ValueError: for an unknown name.
      TypeError: for what is neither.
    """
    if activation is None:
        return None
    if isinstance(activation, str):
        check.one_of(activation, tuple(NAMED), "activation")
        return NAMED[activation]
    if not callable(activation):
        raise TypeError(f"`activation` must be {', '.join(NAMED)}, a function or None; got {activation!r}.")
    return Elementwise(activation)


def batch_norm_act(
    x: Num[Array, ...],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    residual: Num[Array, ...] | None = None,
    activation: str | Callable[[Array], Array] | None = "relu",
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
) -> BatchNormActOutput:
    """Batch normalization by the batch's own statistics, plus a residual, through an activation; rounded once.

        z = (x - mean) / sqrt(var + eps) * (scale + scale_offset) + bias + residual;   y = activation(z)

    Args:
      x: `[..., C]`, or any shape with `axis` naming the channels; computed in float32 (float64 for float64 x).
      scale: `[C]` (the shape of x along `axis`), or of x's rank and broadcastable to it, or None for ones.
      bias: likewise, or None for zeros.
      residual: of x's shape, in any float dtype, or None: the skip connection, which is not measured.
      activation: "relu", "silu" ("swish"), any element-wise function of a float32 array, or None.
      axis, eps, where, scale_offset, axis_name, axis_index_groups, virtual_batch_size, ragged, running, shift, method,
        on_single, rule, rescale, backend: as `normlib.batch_norm`.
      out_dtype: dtype of y, rounded once from float32; that of x where None.

    Returns:
      `BatchNormActOutput(y, moments)`. The backward keeps x, the residual and the statistics, not z; the activation's
      derivative is formed again.

    Raises:
      ValueError: for an unknown activation, or as `normlib.batch_norm`.
      TypeError: as `normlib.batch_norm`, or for an activation that is neither name nor function.
      NameError: if `axis_name` is not bound here.

    Source: Ioffe and Szegedy 2015; the order norm, sum, activation: He et al. 2016, "Deep Residual Learning".

    >>> x = jnp.array([[1.0], [3.0]])
    >>> batch_norm_act(x, residual=jnp.array([[0.5], [0.5]])).y.round(2).tolist()
    [[0.0], [1.5]]
    """
    x = check.array(x)
    channels = check.axes(axis, x.ndim)
    scale, bias = (check.parameter(p, n, x, channels) for p, n in ((scale, "scale"), (bias, "bias")))
    y, moments = batch_normalized(
        x, scale, bias, channels=channels, eps=eps, where=where, operator="batch_norm_act", scale_offset=scale_offset,
        axis_name=axis_name, axis_index_groups=axis_index_groups, virtual_batch_size=virtual_batch_size, ragged=ragged,
        running=running, shift=shift, method=method, on_single=on_single, rule=rule, rescale=rescale, backend=backend,
        out_dtype=out_dtype, added=_residual(residual, x), activation=activation_of(activation),
    )  # fmt: skip
    return BatchNormActOutput(y, moments)


def batch_norm_act_inference(
    x: Num[Array, ...],
    mean: Float[Array, ...],
    var: Float[Array, ...],
    scale: Float[Array, ...] | None = None,
    bias: Float[Array, ...] | None = None,
    *,
    residual: Num[Array, ...] | None = None,
    activation: str | Callable[[Array], Array] | None = "relu",
    axis: check.Axes = -1,
    eps: float = 1e-5,
    scale_offset: float = 0.0,
    out_dtype: DTypeLike | None = None,
    quant=None,
    norm_round_first: bool = False,
):
    """`batch_norm_act` with given statistics: an affine map of x, plus a residual, through an activation.

    Args:
      x, mean, var, scale, bias, axis, eps, scale_offset, out_dtype: as `normlib.batch_norm_inference`.
      residual, activation: as `batch_norm_act`.
      quant: quantise the activation's output: one of the kinds that `normlib.batch_norm_inference` takes.
      norm_round_first: round y to its dtype before quantising; False quantises the float32 value.

    Returns:
      The array y in x's shape and dtype (or `out_dtype`), rounded once, or codes with their scale with `quant`. The
      backward keeps the arguments, not z.

    Raises:
      ValueError, TypeError: as `normlib.batch_norm_inference` and `batch_norm_act`.

    >>> x = jnp.array([[1.0], [3.0]])
    >>> batch_norm_act_inference(x, jnp.array([2.0]), jnp.array([1.0])).round(2).tolist()
    [[0.0], [1.0]]
    """
    x = check.array(x)
    channels = check.axes(axis, x.ndim)
    residual, act = _residual(residual, x), activation_of(activation)
    dtype = check.result_dtype(out_dtype, x.dtype)
    given = quantize.out_dtype(quant, dtype)
    raw = wide_dtype(x.dtype)

    def run(x, mean, var, scale, bias, residual):
        z = stored_normalized(
            x, mean, var, scale, bias, channels=channels, eps=eps, scale_offset=scale_offset, out_dtype=raw
        )  # fmt: skip
        z = z if residual is None else z + wide(residual)
        return (z if act is None else act(z)).astype(given)

    # checkpoint: what is kept are the operands, not z
    y = jax.checkpoint(run)(x, mean, var, scale, bias, residual)
    return quantize.finish(y, quant, dtype, axes=channels, norm_round_first=norm_round_first)


def _residual(residual, x: Array) -> Array | None:
    return None if residual is None else check.same_shape(residual, "residual", x, "x")
