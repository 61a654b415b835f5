"""Folding a whole Flax network, given which norm belongs to which layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from normlib.folding import fold_batch_norm_conv, fold_conv_batch_norm

Tree = Any


@dataclass(frozen=True)
class FoldPair:
    """A batch norm and the convolution or dense layer that takes over its work.

    Attributes:
      layer: path of the layer's node in params, such as "Block_0/Conv_0".
      norm: path of the norm's node, in params and batch_stats alike.
      eps: of the norm.
      norm_first: the norm stands before the layer. Needs `padding` unless the layer is dense.
      padding: of a convolution after its norm: "VALID" or zeros, nothing else folds.
      layout: a letter per axis of the kernel; see `fold_conv_batch_norm`. None: the last two are "IO", as Flax has them
        but for ConvTranspose(transpose_kernel=True), whose are "OI" ("HWOI").
      groups: `feature_group_count`.
      transposed: the layer is a transposed convolution.
      scale_offset: of the norm.

    Raises:
      ValueError: for a transposed convolution after its norm.

    >>> FoldPair("Conv_0", "BatchNorm_0").eps
    1e-05
    """

    layer: str
    norm: str
    eps: float = 1e-5
    norm_first: bool = False
    padding: str | Sequence[tuple[int, int]] | None = None
    layout: str | None = None
    groups: int = 1
    transposed: bool = False
    scale_offset: float = 0.0

    def __post_init__(self):
        if self.norm_first and self.transposed:
            raise ValueError(
                "`norm_first` with `transposed`: a transposed convolution pads between its entries, so a norm before "
                "it cannot be folded; keep the norm."
            )


class FoldedNetwork(NamedTuple):
    """What `fold` returns.

    Attributes:
      params: nested dicts.
      batch_stats: nested dicts.
    """

    params: dict
    batch_stats: dict


def fold(
    params: Mapping,
    batch_stats: Mapping,
    pairs: Iterable[FoldPair | tuple[str, str]],
    *,
    remove_norms: bool = False,
    check: tuple | None = None,
    tolerance: float = 1e-4,
) -> FoldedNetwork:
    """Fold batch norms of a Flax network into the layers beside them, for inference.

    Nothing but the norm may read a folded layer's result (nothing but the layer a folded norm's, with `norm_first`).
    No tree of parameters says whether that holds, so give `check`: it evaluates both networks and raises where they
    differ.

    Args:
      params: nested dicts of arrays: linen's collection, or `nnx.to_pure_dict(nnx.state(model, nnx.Param))`.
      batch_stats: the running statistics, likewise, of shape [C] for a norm over C channels.
      pairs: `FoldPair`s, or ("Conv_0", "BatchNorm_0") for one with Flax's layout and eps 1e-5.
      remove_norms: False keeps the tree's structure, so that the same model runs it: folded norms become the identity
        (mean 0, var 1 - eps, scale 1), and where the layer has no bias the norm holds it. True takes the norms out
        and gives every layer a bias, for a model built without them.
      check: (apply, x), or (apply, folded_apply, x) where another model runs the folded network: functions of
        ({"params": ..., "batch_stats": ...}, x), such as `model.apply` of a model in evaluation mode.
      tolerance: largest |difference| of a result that `check` lets pass, as a share of its largest entry.

    Returns:
      `FoldedNetwork(params, batch_stats)`, in the dtypes given. The trees passed in stay as they are.

    Raises:
      ValueError: for a path that is not there, a norm in two pairs, a layer without bias after its norm (unless
        `remove_norms`), a network that `check` finds changed, and as the folding of the single layers.

    >>> params = {"fc": {"kernel": jnp.ones((2, 1))}, "bn": {"scale": jnp.full(1, 3.0), "bias": jnp.ones(1)}}
    >>> stats = {"bn": {"mean": jnp.zeros(1), "var": jnp.full(1, 4.0)}}
    >>> fold(params, stats, [FoldPair("fc", "bn", eps=0.0)], remove_norms=True).params["fc"]["kernel"].tolist()
    [[1.5], [1.5]]
    """
    chosen = [pair if isinstance(pair, FoldPair) else FoldPair(*pair) for pair in pairs]
    norms = [pair.norm for pair in chosen]
    if len(set(norms)) != len(norms):
        raise ValueError(f"`pairs` names the norm {max(norms, key=norms.count)!r} twice; it folds into one layer.")
    new = FoldedNetwork(_copied(params), _copied(batch_stats))
    for pair in chosen:
        _fold_pair(new, pair, remove_norms)
    if remove_norms:
        for pair in chosen:
            _remove(new.params, pair.norm)
            _remove(new.batch_stats, pair.norm)
    if check is not None:
        _compare({"params": params, "batch_stats": batch_stats}, new._asdict(), check, tolerance)
    return new


def _fold_pair(network: FoldedNetwork, pair: FoldPair, remove_norms: bool) -> None:
    layer = _node(network.params, pair.layer, "params")
    if "kernel" not in layer:
        raise ValueError(f"`pairs`: {pair.layer!r} has no kernel; it has {sorted(layer)}.")
    stats = _node(network.batch_stats, pair.norm, "batch_stats")
    affine = _node(network.params, pair.norm, "params", missing={})
    kernel, bias = layer["kernel"], layer.get("bias")
    values = (kernel, bias, stats["mean"], stats["var"], affine.get("scale"), affine.get("bias"))
    if not pair.norm_first:
        folded = fold_conv_batch_norm(
            *values, eps=pair.eps, scale_offset=pair.scale_offset, layout=pair.layout, groups=pair.groups,
            transposed=pair.transposed,
        )  # fmt: skip
    else:
        padding = "VALID" if pair.padding is None and jnp.ndim(kernel) == 2 else pair.padding
        if padding is None:
            raise ValueError(f"`padding` of {pair.layer!r}, a convolution after its norm, must be given.")
        if bias is None and not remove_norms:
            raise ValueError(
                f"{pair.layer!r} has no bias to take up that of the norm before it; build it with use_bias=True, or "
                "fold with remove_norms=True for a model that has one."
            )
        folded = fold_batch_norm_conv(
            *values, padding=padding, eps=pair.eps, scale_offset=pair.scale_offset, layout=pair.layout,
            groups=pair.groups,
        )  # fmt: skip
    layer["kernel"] = folded.kernel
    if bias is not None or remove_norms:
        layer["bias"] = folded.bias
    if not remove_norms:
        _make_identity(pair, stats, affine, values, keep_bias=bias is None)


def _make_identity(pair: FoldPair, stats: dict, affine: dict, values: tuple, *, keep_bias: bool) -> None:
    """The norm as the identity; with `keep_bias` it adds what the layer has no bias for."""
    mean, var = (jnp.asarray(t) for t in values[2:4])
    # recomputed with float32 zeros for a kernel, so that the norm's own dtypes round it and not the kernel's
    shift = jnp.zeros(mean.shape)
    if keep_bias:
        shift = fold_conv_batch_norm(
            jnp.zeros((1, mean.size)), None, *values[2:], eps=pair.eps, scale_offset=pair.scale_offset
        ).bias
    stats["mean"], stats["var"] = jnp.zeros_like(mean), jnp.full_like(var, 1 - pair.eps)
    if "scale" in affine:
        affine["scale"] = jnp.full_like(affine["scale"], 1 - pair.scale_offset)
    if "bias" in affine:
        affine["bias"] = shift.astype(jnp.asarray(affine["bias"]).dtype)
    else:
        stats["mean"] = (-shift).astype(mean.dtype)


def _compare(old: Tree, new: Tree, check: tuple, tolerance: float) -> None:
    if len(check) not in (2, 3):
        raise ValueError(f"`check` must be (apply, x) or (apply, folded_apply, x); got {len(check)} entries.")
    before, after = jax.tree.leaves(check[0](old, check[-1])), jax.tree.leaves(check[-2](new, check[-1]))
    if [jnp.shape(a) for a in before] != [jnp.shape(b) for b in after]:
        raise ValueError("`check`: the folded network's results have other shapes.")
    for a, b in zip(before, after):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error, size = np.max(abs(a - b), initial=0.0), np.max(abs(a), initial=0.0)
        if not error <= tolerance * size:
            raise ValueError(
                f"`check`: the folded network differs by {error:.3g} where results reach {size:.3g} (tolerance "
                f"{tolerance:g} of that). Is each layer's result read by its norm alone, with nothing in between, and "
                "are eps, layout and padding right?"
            )


def _copied(tree: Tree) -> Any:
    return {key: _copied(child) for key, child in tree.items()} if isinstance(tree, Mapping) else tree


def _key(tree: Mapping, name: str) -> Any:
    """The key that reads `name`: lists of nnx layers have integer keys."""
    return next((key for key in tree if str(key) == name), None)


def _node(tree: dict, path: str, which: str, missing: dict | None = None) -> dict:
    node: Any = tree
    for name in path.split("/") if path else ():
        key = _key(node, name) if isinstance(node, Mapping) else None
        if key is None:
            if missing is not None:
                return missing
            raise ValueError(f"`pairs`: {path!r} is not in {which}, which has no {name!r} there.")
        node = node[key]
    return node


def _remove(tree: dict, path: str) -> None:
    *parents, last = path.split("/")
    node = _node(tree, "/".join(parents), "params", missing={})
    node.pop(_key(node, last), None)
