"""Running statistics of several populations: mixed into one, or kept per domain beside one scale and bias."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from normlib._statistics import Tree, each_layer


def mix_batch_stats(stats: Sequence[Tree], weights: Sequence[float] | Float[Array, " K"]) -> Tree:
    """Statistics of a mixture of populations: source and target, or devices that each kept their own.

        mean = sum_k w_k mean_k      var = sum_k w_k (var_k + (mean_k - mean)**2)

    Args:
      stats: K trees of one structure, each `[C]` per leaf, of biased variances.
      weights: `[K]`, shares of the populations (entry counts, for devices' local statistics); scaled to sum 1.

    Returns:
      The first tree's structure and dtypes; leaves other than `mean` and `var` are the first's.

    Raises:
      ValueError: if there are no trees, another number of weights, negative weights or only zeros.

    >>> a, b = ({"mean": jnp.full(1, m), "var": jnp.ones(1)} for m in (0.0, 2.0))
    >>> mixed = mix_batch_stats([a, b], [0.5, 0.5])
    >>> mixed["mean"].tolist(), mixed["var"].tolist()
    ([1.0], [2.0])
    """
    stats, w = list(stats), jnp.asarray(weights, jnp.float32)
    if not stats or w.shape != (len(stats),):
        raise ValueError(f"`weights` must have one entry for each of the {len(stats)} `stats`; got shape {w.shape}.")
    if not isinstance(w, jax.core.Tracer) and not (np.all(np.asarray(w) >= 0) and 0 < float(w.sum()) < np.inf):
        raise ValueError(f"`weights` must not be negative and have a finite positive sum; got {np.asarray(w)}.")
    w = w / jnp.sum(w)

    def mixed(_, *layers):
        means, variances = (jnp.stack([jnp.asarray(pair[i]) for pair in layers]) for i in (0, 1))
        share = w.astype(jnp.promote_types(means.dtype, jnp.float32)).reshape(-1, *(1,) * (means.ndim - 1))
        # about the first mean: equal means stay equal to the bit
        mean = means[0] + jnp.sum(share * (means - means[0]), 0)
        return mean, jnp.sum(share * (variances + jnp.square(means - mean)), 0)

    return each_layer(stats[0], mixed, *stats[1:])


def domain_batch_stats(batch_stats: Tree, num_domains: int) -> Tree:
    """Statistics for each of K domains, beside one shared scale and bias: every leaf `[...]` becomes `[K, ...]`.

    Normalise with `take_domain(stats, k)` and write the updated ones back with `put_domain(stats, k, new)`.

    Args:
      batch_stats: the statistics that every domain starts from.
      num_domains: K, at least 1.

    Returns:
      The stacked tree.

    Raises:
      ValueError: if `num_domains` is not a positive integer.

    Source: Chang et al. 2019, "Domain-specific batch normalization"; with a shared affine as in Wu and Johnson 2021.

    >>> domain_batch_stats({"mean": jnp.zeros(5)}, 3)["mean"].shape
    (3, 5)
    """
    if not isinstance(num_domains, int) or num_domains < 1:
        raise ValueError(f"`num_domains` must be a positive integer; got {num_domains!r}.")
    return jax.tree.map(lambda t: jnp.broadcast_to(t, (num_domains, *jnp.shape(t))), batch_stats)


def take_domain(stats: Tree, domain: int | Int[Array, ""]) -> Tree:
    """The statistics of one domain out of `domain_batch_stats`: leaves `[K, ...]` become `[...]`.

    Args:
      stats: the stacked tree.
      domain: 0 to K - 1; may be traced, and floating statistics of a traced domain out of range are NaN.

    Raises:
      ValueError: for a Python integer out of range.

    >>> take_domain({"mean": jnp.arange(6.0).reshape(3, 2)}, 1)["mean"].tolist()
    [2.0, 3.0]
    """
    _check_domain(stats, domain)
    return jax.tree.map(lambda t: jnp.asarray(t).at[domain].get(mode="fill", wrap_negative_indices=False), stats)


def put_domain(stats: Tree, domain: int | Int[Array, ""], new: Tree) -> Tree:
    """`stats` with those of one domain replaced by `new` (leaves `[...]`); a traced domain out of range writes nothing.

    Raises:
      ValueError: for a Python integer out of range.

    >>> put_domain({"mean": jnp.zeros((2, 1))}, 1, {"mean": jnp.ones(1)})["mean"].tolist()
    [[0.0], [1.0]]
    """
    _check_domain(stats, domain)
    write = lambda t, n: jnp.asarray(t).at[domain].set(n, mode="drop", wrap_negative_indices=False)  # noqa: E731
    return jax.tree.map(write, stats, new)


def _check_domain(stats: Tree, domain) -> None:
    sizes = {jnp.shape(t)[0] for t in jax.tree.leaves(stats)}
    if isinstance(domain, int | np.integer) and not all(0 <= domain < k for k in sizes):
        raise ValueError(f"`domain` must be between 0 and {min(sizes) - 1}; got {domain}.")
