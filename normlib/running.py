"""Running statistics as pure functions."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from normlib.moments import Moments


def update_running(
    mean: Float[Array, ...],
    var: Float[Array, ...],
    moments: Moments,
    *,
    momentum: float | Float[Array, ""] = 0.99,
    unbiased: bool = False,
    skip_nonfinite: bool = False,
) -> tuple[Array, Array]:
    """Move running statistics towards those of a batch.

        new = old + (1 - momentum) * (batch - old)

    Args:
      mean: `[C]`, running mean.
      var: `[C]`, running variance.
      moments: the batch's, of the same shape, as `batch_norm` returns them.
      momentum: weight of the OLD value, Flax's convention; PyTorch's is `momentum_torch = 1 - momentum`.
      unbiased: store m2 / (n - 1), as PyTorch and ops-nn do, instead of m2 / n, as Flax does. One entry falls back to
        the biased value.
      skip_nonfinite: leave both untouched where the batch's mean or variance is not finite.

    Returns:
      (mean, var) in the dtypes given. Where nothing was counted both are untouched.

    Raises:
      ValueError: if a Python-number `momentum` lies outside [0, 1].

    Source: Ioffe and Szegedy 2015; conventions of Flax and PyTorch as above.

    >>> mean, var = update_running(jnp.zeros(1), jnp.ones(1), Moments.of(jnp.arange(4.0)[:, None], 0), momentum=0.0)
    >>> mean.tolist(), var.tolist()
    ([1.5], [1.25])
    """
    if isinstance(momentum, int | float) and not 0 <= momentum <= 1:
        raise ValueError(f"`momentum` is the weight of the old value and must lie in [0, 1]; got {momentum}.")
    batch_mean, batch_var = moments.mean, moments.unbiased_var if unbiased else moments.var
    take = moments.count > 0
    if skip_nonfinite:
        take &= jnp.isfinite(batch_mean) & jnp.isfinite(batch_var)

    def moved(old, batch):
        new = old + (1 - momentum) * (batch - old)
        return jnp.where(take, new, old).astype(old.dtype)

    return moved(mean, batch_mean), moved(var, batch_var)
