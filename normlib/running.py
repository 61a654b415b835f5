"""Running statistics of one layer, as pure functions."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from normlib import _arguments as check
from normlib.moments import Moments


def update_running(
    mean: Float[Array, ...],
    var: Float[Array, ...],
    moments: Moments,
    *,
    momentum: float | Float[Array, ""] = 0.99,
    weight: Float[Array, ""] | None = None,
    unbiased: bool = False,
    skip_nonfinite: bool = False,
) -> tuple[Array, Array]:
    """Move running statistics towards those of a batch.

        new = momentum * old + (1 - momentum) * batch

    Args:
      mean: `[C]`, running mean.
      var: `[C]`, running variance.
      moments: the batch's, of the same shape, as `batch_norm` returns them.
      momentum: weight of the OLD value, Flax's convention; PyTorch's is `momentum_torch = 1 - momentum`.
      weight: weight of the batch, in place of `momentum`: that of `running_weight` for a cumulative average or a
        zero-debiased one.
      unbiased: store m2 / (n - 1), as PyTorch and ops-nn do, instead of m2 / n, as Flax does. One entry falls back to
        the biased value.
      skip_nonfinite: leave both untouched where the batch's mean or variance is not finite.

    Returns:
      (mean, var) in the dtypes given. Where nothing was counted both are untouched.

    Raises:
      TypeError: if `momentum` is neither a number nor a scalar array.
      ValueError: if a `momentum` that is a number lies outside [0, 1].

    Source: Ioffe and Szegedy 2015; conventions of Flax and PyTorch as above.

    >>> mean, var = update_running(jnp.zeros(1), jnp.ones(1), Moments.of(jnp.arange(4.0)[:, None], 0), momentum=0.0)
    >>> mean.tolist(), var.tolist()
    ([1.5], [1.25])
    """
    momentum = check.momentum(momentum)
    batch_mean, batch_var = moments.mean, moments.unbiased_var if unbiased else moments.var
    if mean.shape != batch_mean.shape or var.shape != batch_var.shape:
        raise ValueError(f"`mean` {mean.shape} and `var` {var.shape} must have the moments' shape {batch_mean.shape}.")
    keep, share = (momentum, 1 - momentum) if weight is None else (1 - weight, weight)
    take = moments.count > 0
    if skip_nonfinite:
        take &= jnp.isfinite(batch_mean) & jnp.isfinite(batch_var)

    def moved(old, batch):
        # not old + share * (batch - old): a variance far below the old one would be lost where its weight is 1
        new = keep * old + share * batch
        return jnp.where(take, new, old).astype(old.dtype)

    return moved(mean, batch_mean), moved(var, batch_var)


def running_weight(num_batches: Int[Array, ""] | int, momentum: float | None = None) -> Float[Array, ""]:
    """Weight of the newest batch in an average without a start of its own.

        momentum None:  1 / t                              the plain average of t batches
        otherwise:      (1 - momentum) / (1 - momentum**t)   the moving average, zero-debiased

    The debiased average h_t / (1 - momentum**t), h the moving average that starts from zero, obeys the recurrence
    new = old + weight * (batch - old) itself, so the stored value needs no correction when it is used.

    Args:
      num_batches: t, batches averaged including the newest; 0 counts as 1.
      momentum: weight of the OLD value in [0, 1), Flax's convention, or None for the cumulative average (PyTorch's
        `momentum=None`).

    Returns:
      A float32 scalar for `update_running(weight=...)`; exactly 1 at t = 1, so that the (finite)
      values stored before leave no trace.

    Raises:
      ValueError: if `momentum` lies outside [0, 1).

    Source: cumulative average: PyTorch's BatchNorm; debiasing: Kingma and Ba 2015, section 3.

    >>> [round(float(running_weight(t)), 3) for t in (1, 2, 4)]
    [1.0, 0.5, 0.25]
    >>> [round(float(running_weight(t, 0.9)), 3) for t in (1, 2, 1000)]
    [1.0, 0.526, 0.1]
    """
    if momentum is not None and not 0 <= momentum < 1:
        raise ValueError(f"`momentum` of a debiased average must lie in [0, 1), or be None; got {momentum}.")
    t = jnp.maximum(jnp.asarray(num_batches), 1).astype(jnp.float32)
    if momentum is None:
        return 1 / t
    weight = (1 - momentum) / -jnp.expm1(t * jnp.log(jnp.float32(momentum)))
    return jnp.where(t == 1, 1, weight)  # not within rounding of 1, which would keep a trace of the start
