"""Checkpoints and models from elsewhere: PyTorch state dicts, and Flax models with other batch norms.

Flax checkpoints need nothing: the layers of `normlib.linen` and `normlib.nnx` store what Flax's store. PyTorch itself
is not needed here: values are anything that NumPy can read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

NORMS = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")
KINDS = (*NORMS, "linear", "conv", "conv_transpose")
FLOAT32_EPS = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class TorchLayer:
    """One layer under both names.

    Attributes:
      torch: prefix of its entries in the state dict, such as "layer1.0.bn1"; "" for a bare layer.
      flax: path of its node in params, such as "Block_0/BatchNorm_0"; "" for a bare layer.
      kind: batch_norm, layer_norm, group_norm, instance_norm, rms_norm, linear, conv or conv_transpose.
      count_batches: batch norm only: carry `num_batches_tracked`, the leaf `num_batches` of a layer with a cumulative
        average (momentum None) or zero-debias. Other layers do not store it.

    Raises:
      ValueError: for an unknown `kind`.

    >>> TorchLayer("bn1", "BatchNorm_0", "batch_norm").torch
    'bn1'
    """

    torch: str
    flax: str
    kind: str
    count_batches: bool = False

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(KINDS)}; got {self.kind!r}.")
        if self.count_batches and self.kind not in ("batch_norm", "instance_norm"):
            raise ValueError(f"`count_batches` belongs to running statistics; {self.kind} has none.")

    def key(self, name: str) -> str:
        """The state dict's key of one entry."""
        return f"{self.torch}.{name}" if self.torch else name


def from_torch(state_dict: Mapping[str, Any], layers: Iterable[TorchLayer], *, strict: bool = True) -> dict[str, Any]:
    """Flax variables of a PyTorch state dict.

        weight, bias of a norm        ->  params scale, bias             as they are
        running_mean, running_var     ->  batch_stats mean, var          as they are
        linear weight [out, in]       ->  params kernel [in, out]
        conv weight [O, I/g, *k]      ->  params kernel [*k, I/g, O]
        transposed weight [I, O, *k]  ->  params kernel [*k, I, O], every k reversed (Flax's transpose_kernel=False)

    Flax layers have their channels last; between a convolution and a dense layer PyTorch flattens [C, H, W] and Flax
    [H, W, C], so permute that dense layer's inputs. PyTorch's running variance is the unbiased one: build the layers
    with `layer_arguments`, which also converts epsilon and momentum. A transposed convolution with padding p has
    p' = k - 1 - p on each side in Flax.

    Args:
      state_dict: name -> array or CPU tensor of any dtype, bfloat16 included.
      layers: which entries go where.
      strict: refuse entries that no layer uses.

    Returns:
      {"params": ..., "batch_stats": ...} of NumPy arrays, without the collections that stay empty.

    Raises:
      KeyError: if a layer's weight, or half of its statistics, is missing.
      ValueError: for entries left over, a path used twice, or a weight of a wrong rank.

    >>> state = {"bn.weight": np.ones(2), "bn.running_mean": np.zeros(2), "bn.running_var": np.ones(2)}
    >>> sorted(from_torch(state, [TorchLayer("bn", "BatchNorm_0", "batch_norm")]))
    ['batch_stats', 'params']
    """
    variables: dict[str, Any] = {}
    used: set[str] = set()
    for layer in layers:
        entries = {
            name: as_array(state_dict[layer.key(name)])
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
            if layer.key(name) in state_dict
        }
        used |= {layer.key(name) for name in entries}
        for collection, node in _to_flax(layer, entries).items():
            _insert(variables.setdefault(collection, {}), layer.flax, node)
    left = sorted(set(state_dict) - used)
    if strict and left:
        raise ValueError(f"`state_dict` has entries that no layer uses: {left}; name them, or pass strict=False.")
    return variables


def to_torch(variables: Mapping[str, Any], layers: Iterable[TorchLayer]) -> dict[str, np.ndarray]:
    """The PyTorch state dict of Flax variables: the inverse of `from_torch`, entry by entry.

    Args:
      variables: {"params": ..., "batch_stats": ...} of arrays.
      layers: which nodes go where.

    Returns:
      name -> NumPy array; `num_batches_tracked` is an int64 scalar, 0 where it is not stored. Load with
      `model.load_state_dict({k: torch.from_numpy(v) for k, v in ...})`.

    Raises:
      KeyError: if a layer has neither parameters nor statistics, or lacks a kernel.

    >>> flax = {"params": {"Dense_0": {"kernel": np.ones((3, 2))}}}
    >>> to_torch(flax, [TorchLayer("fc", "Dense_0", "linear")])["fc.weight"].shape
    (2, 3)
    """
    state: dict[str, np.ndarray] = {}
    for layer in layers:
        params, stats = (_find(variables.get(name, {}), layer.flax) for name in ("params", "batch_stats"))
        if not params and not stats:
            raise KeyError(f"`variables` has no parameters and no statistics at {layer.flax!r}.")
        for name, value in _to_torch(layer, params, stats).items():
            state[layer.key(name)] = value
    return state


def layer_arguments(kind: str, **arguments: Any) -> dict[str, Any]:
    """Arguments of a Flax layer that do what PyTorch's do.

        eps -> epsilon (RMSNorm's None is float32's 1.19e-7: that is what PyTorch uses for 16-bit input too)
        momentum m -> 1 - m (the weight of the OLD value); None stays None, the cumulative average
        affine or elementwise_affine False -> use_scale=False, use_bias=False; bias False -> use_bias=False

    Args:
      kind: batch_norm, layer_norm, group_norm, instance_norm or rms_norm.
      arguments: the PyTorch module's keyword arguments or attributes: eps, momentum, affine, track_running_stats,
        elementwise_affine, bias, num_groups; missing ones have PyTorch's defaults.

    Returns:
      Keyword arguments for the layer of that kind in `normlib.linen` or `normlib.nnx`; a batch norm gets
      unbiased=True, as PyTorch stores the variance of n - 1.

    Raises:
      ValueError: for an unknown `kind`, or running statistics of an instance norm, which Flax's layer does not keep.
      TypeError: for an argument that PyTorch's module does not have, or a missing `num_groups`.

    >>> sorted(layer_arguments("batch_norm", momentum=0.25).items())
    [('epsilon', 1e-05), ('momentum', 0.75), ('unbiased', True)]
    """
    if kind not in NORMS:
        raise ValueError(f"`kind` must be one of {', '.join(NORMS)}; got {kind!r}.")
    known = {
        "batch_norm": ("eps", "momentum", "affine", "track_running_stats"),
        "instance_norm": ("eps", "momentum", "affine", "track_running_stats"),
        "layer_norm": ("eps", "elementwise_affine", "bias"),
        "rms_norm": ("eps", "elementwise_affine"),
        "group_norm": ("num_groups", "eps", "affine"),
    }[kind]
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise TypeError(f"PyTorch's {kind} has no argument {unknown[0]!r}; known are {', '.join(known)}.")
    eps = arguments.get("eps", None if kind == "rms_norm" else 1e-5)
    found: dict[str, Any] = {"epsilon": FLOAT32_EPS if eps is None else eps}
    affine = arguments.get("affine", arguments.get("elementwise_affine", kind != "instance_norm"))
    if not affine:
        found["use_scale"] = False
    if kind != "rms_norm" and not (affine and arguments.get("bias", True)):
        found["use_bias"] = False
    if kind == "batch_norm":
        momentum = arguments.get("momentum", 0.1)
        found |= {"momentum": None if momentum is None else 1 - momentum, "unbiased": True}
        if not arguments.get("track_running_stats", True):
            found["track_running_stats"] = False
    if kind == "instance_norm" and arguments.get("track_running_stats", False):
        raise ValueError("`track_running_stats` of an instance norm has no counterpart: the layer keeps no statistics.")
    if kind == "group_norm":
        if "num_groups" not in arguments:
            raise TypeError("`num_groups` of the group norm is missing.")
        found["num_groups"] = arguments["num_groups"]
    return found


def convert_batch_norm(model: Any, **changes: Any) -> Any:
    """`model` with other arguments in every batch norm: SyncBN, Ghost BN, frozen; see the function of the same name in
    `normlib.linen_tools` and `normlib.nnx_tools`, of which this calls the one that fits.

    Args:
      model: a linen or an nnx module.
      changes: arguments of normlib's BatchNorm, such as axis_name="data" or virtual_batch_size=32.

    Returns:
      The converted model; parameters, statistics and every other argument stay.

    Raises:
      TypeError: if it is neither, and as the functions called.

    >>> from flax import nnx
    >>> convert_batch_norm(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), axis_name="data").axis_name
    'data'
    """
    # imported where needed: Flax takes longer to import than all of normlib, and state dicts do without
    from flax import linen, nnx

    if isinstance(model, linen.Module):
        from normlib import linen_tools

        return linen_tools.convert_batch_norm(model, **changes)
    if isinstance(model, nnx.Module):
        from normlib import nnx_tools

        return nnx_tools.convert_batch_norm(model, **changes)
    raise TypeError(f"`model` must be a linen or an nnx module; got {type(model).__name__}.")


def as_array(value: Any) -> np.ndarray:
    """An array or tensor as NumPy's; a bfloat16 tensor, which NumPy cannot read, by way of float32.

    >>> as_array([1, 2]).shape
    (2,)
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            import ml_dtypes

            return value.float().numpy().astype(ml_dtypes.bfloat16)
        return value.numpy().copy()
    return np.asarray(value)


def _to_flax(layer: TorchLayer, entries: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    params: dict[str, np.ndarray] = {}
    stats: dict[str, np.ndarray] = {}
    if layer.kind in NORMS:
        params |= {new: entries[old] for old, new in (("weight", "scale"), ("bias", "bias")) if old in entries}
        running = [name for name in ("running_mean", "running_var") if name in entries]
        if len(running) == 1 or (layer.count_batches and not running):
            missing = "running_var" if running == ["running_mean"] else "running_mean"
            raise KeyError(f"`state_dict` has no {layer.key(missing)!r}.")
        stats |= {name.removeprefix("running_"): entries[name] for name in running}
        if layer.count_batches:
            stats["num_batches"] = np.asarray(entries.get("num_batches_tracked", 0), np.int32)
        return {name: node for name, node in (("params", params), ("batch_stats", stats)) if node}
    if "weight" not in entries:
        raise KeyError(f"`state_dict` has no {layer.key('weight')!r}.")
    weight = entries["weight"]
    if (weight.ndim != 2) if layer.kind == "linear" else (weight.ndim < 3):
        raise ValueError(f"{layer.key('weight')!r} of kind {layer.kind} has shape {weight.shape}.")
    params["kernel"] = _kernel_to_flax(layer.kind, weight)
    if "bias" in entries:
        params["bias"] = entries["bias"]
    return {"params": params}


def _to_torch(layer: TorchLayer, params: Mapping[str, Any], stats: Mapping[str, Any]) -> dict[str, np.ndarray]:
    found = {"bias": np.asarray(params["bias"])} if "bias" in params else {}
    if layer.kind not in NORMS:
        if "kernel" not in params:
            raise KeyError(f"`variables` has no kernel at {layer.flax!r}.")
        return {"weight": _kernel_to_torch(layer.kind, np.asarray(params["kernel"])), **found}
    if "scale" in params:
        found["weight"] = np.asarray(params["scale"])
    if stats:
        found |= {f"running_{name}": np.asarray(stats[name]) for name in ("mean", "var")}
        found["num_batches_tracked"] = np.asarray(stats.get("num_batches", 0), np.int64)
    return found


def _kernel_to_flax(kind: str, weight: np.ndarray) -> np.ndarray:
    if kind == "linear":
        return weight.T
    spatial = tuple(range(2, weight.ndim))
    if kind == "conv":
        return weight.transpose(*spatial, 1, 0)
    return np.flip(weight.transpose(*spatial, 0, 1), tuple(range(len(spatial))))


def _kernel_to_torch(kind: str, kernel: np.ndarray) -> np.ndarray:
    if kind == "linear":
        return kernel.T
    rank = kernel.ndim
    spatial = tuple(range(rank - 2))
    if kind == "conv":
        return kernel.transpose(rank - 1, rank - 2, *spatial)
    return np.flip(kernel, spatial).transpose(rank - 2, rank - 1, *spatial).copy()


def _insert(tree: dict[str, Any], path: str, node: dict[str, Any]) -> None:
    for name in path.split("/") if path else ():
        tree = tree.setdefault(name, {})
    for name, value in node.items():
        if name in tree:
            raise ValueError(f"two layers go to {path!r}: `flax` paths must differ.")
        tree[name] = value


def _find(tree: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for name in path.split("/") if path else ():
        tree = tree.get(name, {})
    return tree
