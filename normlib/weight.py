"""Norms of weights: weight normalization and spectral normalization, as Flax's layers compute them."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from normlib import _arguments as check
from normlib.engine import normalize
from normlib.precision import output_dtype, statistics_dtype, wide


class SpectralNormOutput(NamedTuple):
    """What `spectral_norm` returns.

    Attributes:
      kernel: divided by sigma; of the kernel's shape and dtype.
      u: `[1, C]`, the left vector of the power iteration, for the next call.
      sigma: scalar, the estimate of the largest singular value.
    """

    kernel: Array
    u: Array
    sigma: Array


def weight_norm(
    kernel: Float[Array, "*inputs c"],
    scale: Float[Array, ...] | None = None,
    *,
    feature_axes: check.Axes | None = -1,
    eps: float = 1e-12,
    rule: str = "reverse",
    backend: str | None = None,
) -> Array:
    """Every feature's weights divided by their length, times a learned length.

        w = kernel / sqrt(sum(kernel**2) + eps) * scale

    Args:
      kernel: `[..., C]`, any float dtype; computed in float32 (float64 for float64 kernels).
      scale: the kernel's shape along `feature_axes` (`[C]`), or None for ones.
      feature_axes: axes that keep a length of their own; the others are summed over. None: one length for all.
      eps: added to the sum of squares inside the root, in units of the kernel squared.
      rule, backend: as `normlib.rms_norm`.

    Returns:
      w in the kernel's shape and dtype, rounded once. Flax's layer returns the promoted dtype of kernel and scale.

    Raises:
      ValueError: for axes or shapes that do not fit, or eps < 0.

    Source: Salimans and Kingma 2016; names and defaults of Flax's WeightNorm.

    >>> np.float64(weight_norm(jnp.array([[3.0], [4.0]]), jnp.array([10.0]))).round(3).tolist()
    [[6.0], [8.0]]
    """
    kernel = check.array(kernel, "kernel")
    features = () if feature_axes is None else check.axes(feature_axes, kernel.ndim, "feature_axes")
    axes = tuple(a for a in range(kernel.ndim) if a not in features)
    entries = max(math.prod(kernel.shape[a] for a in axes), 1)
    scale = check.parameter(scale, "scale", kernel, features)
    # sqrt(sum + eps) = sqrt(n) * sqrt(mean + eps / n): the engine's uncentred norm, with its backward
    root = jnp.asarray(1 / math.sqrt(entries), statistics_dtype(kernel))
    by = jnp.broadcast_to(root, (1,) * kernel.ndim) if scale is None else wide(scale) * root
    return normalize(
        kernel, by, axes=axes, eps=check.epsilon(eps) / entries, centered=False, rule=rule, backend=backend
    ).y


def spectral_norm(
    kernel: Float[Array, "*inputs c"],
    u: Float[Array, "1 c"],
    *,
    n_steps: int = 1,
    eps: float = 1e-12,
    error_on_non_matrix: bool = False,
) -> SpectralNormOutput:
    """The kernel divided by an estimate of its largest singular value.

        v = l2(u @ k.T);  u = l2(v @ k)   (n_steps times, no gradient);   sigma = v @ k @ u.T;   w = kernel / sigma

    Args:
      kernel: `[..., C]`; leading axes are flattened, scalars and vectors are returned as they are with sigma 1.
      u: `[1, C]`, from the last call; at first drawn from a normal distribution.
      n_steps: power iterations a call; 0 returns the kernel as it is.
      eps: added to the sum of squares of u and v inside the root.
      error_on_non_matrix: raise for a kernel of rank above 2 instead of flattening it.

    Returns:
      `SpectralNormOutput(kernel, u, sigma)`; store u and sigma where statistics are updated. A sigma of 0 divides by 1.

    Raises:
      ValueError: for shapes that do not fit, or a kernel that is no matrix where that is an error.

    Source: Miyato et al. 2018; iteration and state of Flax's SpectralNorm.

    >>> out = spectral_norm(jnp.diag(jnp.array([4.0, 1.0])), jnp.array([[1.0, 0.0]]))
    >>> float(out.sigma), out.kernel.tolist()
    (4.0, [[1.0, 0.0], [0.0, 0.25]])
    """
    kernel, u = check.array(kernel, "kernel"), check.array(u, "u")
    check.epsilon(eps)
    if not isinstance(n_steps, int) or n_steps < 0:
        raise ValueError(f"`n_steps` must be a number of iterations >= 0; got {n_steps!r}.")
    if kernel.ndim <= 1 or n_steps == 0:
        return SpectralNormOutput(kernel, u, jnp.ones((), statistics_dtype(kernel)))
    if kernel.ndim > 2 and error_on_non_matrix:
        raise ValueError(f"`kernel` of shape {kernel.shape} is no matrix, and `error_on_non_matrix` is set.")
    if u.shape != (1, kernel.shape[-1]):
        raise ValueError(f"`u` must have shape {(1, kernel.shape[-1])} for a kernel of {kernel.shape}; got {u.shape}.")
    matrix = wide(kernel).reshape(-1, kernel.shape[-1])
    left, right = wide(u), jnp.zeros(())
    for _ in range(n_steps):
        right = _unit(_dot(left, matrix.T), eps)
        left = _unit(_dot(right, matrix), eps)
    left, right = lax.stop_gradient(left), lax.stop_gradient(right)
    sigma = _dot(_dot(right, matrix), left.T)[0, 0]
    divided = matrix / jnp.where(sigma != 0, sigma, 1)
    return SpectralNormOutput(
        divided.reshape(kernel.shape).astype(output_dtype(kernel.dtype)), left.astype(u.dtype), sigma
    )


def _dot(a: Array, b: Array) -> Array:
    """A product in full float32, also where the default would use fewer bits (GPU, TPU)."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _unit(v: Array, eps: float) -> Array:
    return v * lax.rsqrt(jnp.sum(jax.numpy.square(v)) + jnp.asarray(eps, v.dtype))
