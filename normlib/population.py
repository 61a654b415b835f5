"""Running statistics of a whole model: exact over a stream of batches, adapted to another, committed once.

A model's statistics are a tree (Flax's `batch_stats` collection, an nnx state of `BatchStat`s, or nested dicts) in
which every batch norm is a node with leaves `mean` and `var`. A tree of `Moments` has the same nodes with one
`Moments` in place of the leaves, as `normlib.linen_tools` and `normlib.nnx_tools` measure them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib._statistics import Tree, each_layer, is_moments, with_moments
from normlib.moments import Moments
from normlib.running import update_running
from normlib.scope import axis_size, cast, gather, pack_counts, unpack_counts


def batch_moments(x: Num[Array, ...], *, axis: check.Axes = -1, where: Bool[Array, ...] | None = None) -> Moments:
    """Moments of a batch norm's input, per channel, of this device's entries alone.

    Args:
      x: `[..., C]`, or any shape with `axis` naming the channels; computed in float32 (float64 for float64 x).
      axis: channel axis or axes; every other axis is reduced.
      where: bool, broadcastable to x: which entries are measured. A mask of lower rank stands for x's first axes.

    Returns:
      Moments of the channels' shape.

    Raises:
      ValueError: for an axis or a mask that does not fit.
      TypeError: for a mask that is not boolean.

    >>> batch_moments(jnp.array([[1.0, 2.0], [3.0, 6.0]])).mean.tolist()
    [2.0, 4.0]
    """
    x = check.array(x)
    channels = check.axes(axis, x.ndim)
    where = check.mask(where, x)
    return Moments.of(x, tuple(a for a in range(x.ndim) if a not in channels), where=where)


def merge_moments(moments: Tree, other: Tree) -> Tree:
    """The moments of both sets, layer by layer (Chan et al. 1979).

    k micro-batches of b rows merged so are one batch of k * b rows. `jax.tree.map(jnp.zeros_like, moments)` is the
    empty set to start a scan from.

    Args:
      moments: tree of Moments (or one), of any shapes.
      other: a tree of the same structure and shapes.

    Returns:
      The same tree. Counts are int32: from 2**31 entries on the count is -1 and mean and m2 are NaN, which
      `commit_moments` and `precise_batch_stats` refuse.

    >>> both = merge_moments({"bn": batch_moments(jnp.ones((2, 1)))}, {"bn": batch_moments(3 * jnp.ones((2, 1)))})
    >>> both["bn"].mean.tolist(), both["bn"].var.tolist()
    ([2.0], [1.0])
    """
    return jax.tree.map(_merged, moments, other, is_leaf=is_moments)


def merge_devices(moments: Tree, axis_name: str | Sequence[str]) -> Tree:
    """The moments of all devices together, weighted by true counts: one all-gather for the whole tree.

    Args:
      moments: tree of Moments of each device's own entries, of any shapes; an empty device weighs nothing.
      axis_name: mesh axis or axes, bound by jax.shard_map, jax.pmap or jax.vmap.

    Returns:
      The same tree in the same shapes, equal to the bit on every device.

    Raises:
      NameError: if `axis_name` is not bound here.

    >>> f = jax.vmap(lambda x: merge_devices(batch_moments(x), "d").mean, axis_name="d")
    >>> f(jnp.array([[[1.0]], [[3.0]]])).tolist()
    [[2.0], [2.0]]
    """
    names = check.names(axis_name)
    devices = axis_size(names)
    leaves, structure = jax.tree.flatten(moments, is_leaf=is_moments)
    if not leaves:
        return moments
    flat = [jax.tree.map(jnp.ravel, m) for m in leaves]
    count, mean, low, m2 = (jnp.concatenate(parts) for parts in zip(*flat))
    words = [*pack_counts(count), mean, low, m2]
    table = gather(jnp.stack(words), names, devices)
    whole = Moments(*unpack_counts([cast(table[:, i], w.dtype) for i, w in enumerate(words)])).merge_axis(0)
    whole = _guarded(whole, jnp.sum(unpack_counts(list(table[:, :2].swapaxes(0, 1)))[0].astype(jnp.float32), 0))
    ends = np.cumsum([m.mean.size for m in leaves])[:-1]
    parts = [jnp.split(t, ends) for t in whole]
    pieces = [
        Moments(*(part.reshape(t.shape).astype(t.dtype) for part, t in zip(piece, m)))
        for m, piece in zip(leaves, zip(*parts))
    ]
    return jax.tree.unflatten(structure, pieces)


def commit_moments(
    batch_stats: Tree,
    moments: Tree,
    *,
    momentum: float = 0.99,
    weight: Float[Array, ""] | None = None,
    unbiased: bool = False,
    skip_nonfinite: bool = False,
) -> Tree:
    """One running update of every layer, with moments gathered over micro-batches: new = old + (1 - m)(batch - old).

    Args:
      batch_stats: the statistics as stored, `[C]` each.
      moments: tree of Moments for the same layers, accumulated by `merge_moments`.
      momentum: weight of the OLD value (Flax's convention; PyTorch's is one minus this).
      weight: weight of the batch in place of `momentum`; see `running_weight`.
      unbiased: store m2 / (n - 1) instead of m2 / n.
      skip_nonfinite: leave a channel alone whose moments are not finite.

    Returns:
      `batch_stats` updated, in its structure and dtypes. A layer that counted nothing stays as it is.

    Raises:
      ValueError: if a layer with statistics has no moments or moments of another size, if counts overflowed, or for
        a `momentum` outside [0, 1].

    >>> stats = {"bn": {"mean": jnp.zeros(1), "var": jnp.ones(1)}}
    >>> commit_moments(stats, {"bn": batch_moments(jnp.ones((4, 1)))}, momentum=0.5)["bn"]["mean"].tolist()
    [0.5]
    """

    def moved(mean, var, m):
        return update_running(
            mean, var, m, momentum=momentum, weight=weight, unbiased=unbiased, skip_nonfinite=skip_nonfinite
        )

    return with_moments(batch_stats, moments, moved)


def precise_batch_stats(
    measure: Callable[[Any], Tree],
    batches: Iterable[Any],
    batch_stats: Tree,
    *,
    axis_name: str | Sequence[str] | None = None,
    unbiased: bool = False,
) -> Tree:
    """Statistics of a whole population of batches, exactly: every entry weighs the same, whatever the batch sizes.

        mean = sum(x) / n      var = sum((x - mean)**2) / n      over all entries of all batches of all devices

    merged batch by batch by Chan's formula, and across devices by a single collective at the end.

    Args:
      measure: batch -> tree of Moments, one node per batch norm: this device's own entries. Compile it (jax.jit):

            jax.jit(lambda batch: linen_tools.apply_with_moments(model, variables, batch)[1])

        Layers see what the network feeds them in the mode in which `measure` runs it, training mode as a rule.
      batches: the stream, read once. Inside jax.shard_map a list (or array, along its first axis) of local batches.
      batch_stats: the statistics to replace, in the shapes of the moments: [C] for a norm over C channels.
      axis_name: mesh axis or axes to merge over, when called inside jax.shard_map or jax.pmap. Under jit with a
        globally sharded batch leave it None: moments are global there.
      unbiased: store m2 / (n - 1), PyTorch's convention, instead of m2 / n.

    Returns:
      `batch_stats` with the population's, equal on all devices; a layer that counted nothing stays as it is.

    Raises:
      ValueError: if `batches` is empty, a layer has no moments, or a channel has 2**31 entries or more.

    Source: Wu and Johnson 2021, "Rethinking 'Batch' in BatchNorm", section 3, with the exact merge in place of the
    mean of batch variances.

    >>> stats = {"mean": jnp.zeros(1), "var": jnp.ones(1)}
    >>> precise_batch_stats(batch_moments, [jnp.array([[1.0]]), jnp.array([[2.0], [6.0]])], stats)["mean"].tolist()
    [3.0]
    """
    return _replaced(batch_stats, _measured(measure, batches, axis_name), unbiased)


def adapt_batch_stats(
    measure: Callable[[Any], Tree],
    batches: Iterable[Any],
    batch_stats: Tree,
    *,
    source_weight: float = 0.0,
    axis_name: str | Sequence[str] | None = None,
    unbiased: bool = False,
) -> Tree:
    """Statistics of a target domain in place of the source's (AdaBN), parameters untouched.

        mean = w * mean_source + (1 - w) * mean_target      var likewise

    With few target samples a `source_weight` w > 0 keeps part of the source: N / (N + n) for n samples and a prior
    worth N. Here the variances are averaged as in the source below; `mix_batch_stats` adds what the distance of the
    means contributes.

    Args:
      measure: batch -> tree of Moments; see `precise_batch_stats`.
      batches: unlabelled target data.
      batch_stats: the source's statistics, in the shapes of the moments.
      source_weight: w in [0, 1].
      axis_name: mesh axis or axes to merge over, inside jax.shard_map or jax.pmap.
      unbiased: take the target's m2 / (n - 1) instead of m2 / n.

    Returns:
      The adapted statistics, in the structure and dtypes of `batch_stats`.

    Raises:
      ValueError: for a `source_weight` outside [0, 1], and as `precise_batch_stats`.

    Source: Li et al. 2016, "Revisiting batch normalization for practical domain adaptation"; the weight: Schneider et
    al. 2020, "Improving robustness against common corruptions by covariate shift adaptation", eq. 2.

    >>> stats = {"mean": jnp.zeros(1), "var": jnp.ones(1)}
    >>> adapt_batch_stats(batch_moments, [jnp.array([[2.0], [6.0]])], stats, source_weight=0.5)["mean"].tolist()
    [2.0]
    """
    if not 0 <= source_weight <= 1:
        raise ValueError(f"`source_weight` is the weight of the source and must lie in [0, 1]; got {source_weight}.")
    target = _replaced(batch_stats, _measured(measure, batches, axis_name), unbiased)
    if source_weight == 0:
        return target
    w = source_weight
    return each_layer(batch_stats, lambda _, s, t: tuple(w * a + (1 - w) * b for a, b in zip(s, t)), target)


def _guarded(moments: Moments, entries: Array) -> Moments:
    """`moments`, marked where `entries`, the count in floating point, shows that the int32 count overflowed."""
    over = entries >= 2.0**31
    nan = lambda t: jnp.where(over, jnp.nan, t)  # noqa: E731
    return Moments(jnp.where(over, -1, moments.count), nan(moments.mean), moments.low, nan(moments.m2))


def _merged(a: Moments, b: Moments) -> Moments:
    spoilt = (a.count < 0) | (b.count < 0)
    entries = a.count.astype(jnp.float32) + b.count.astype(jnp.float32)
    return _guarded(a.merge(b), jnp.where(spoilt, jnp.inf, entries))


_merge_compiled = jax.jit(merge_moments)


def _measured(measure, batches, axis_name) -> Tree:
    total = None
    for batch in batches:
        moments = measure(batch)
        total = moments if total is None else _merge_compiled(total, moments)
    if total is None:
        raise ValueError("`batches` is empty: there is nothing to measure.")
    return total if axis_name is None else merge_devices(total, axis_name)


def _replaced(batch_stats: Tree, moments: Tree, unbiased: bool) -> Tree:
    def population(mean, var, m):
        known = m.count != 0
        value = m.unbiased_var if unbiased else m.var
        return jnp.where(known, m.mean, mean), jnp.where(known, value, var)

    return with_moments(batch_stats, moments, population)
