"""What the tools for linen and for nnx models share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from normlib._layers import broadcast_mask
from normlib.moments import Moments
from normlib.population import batch_moments

STRUCTURE = ("use_bias", "use_scale", "param_dtype", "zero_debias", "track_running_stats", "force_float32_reductions")


def check_changes(known: Any, changes: dict[str, Any]) -> None:
    """Check the arguments that a conversion of batch norms changes against those `known` to the layer.

    Raises:
      TypeError: if there are none, one that is not known, or one on which the layer's variables depend.
    """
    if not changes:
        raise TypeError('no argument to change is given: name some, such as axis_name="data".')
    not_changeable = (*STRUCTURE, "self", "rngs", "parent", "name", "axis", "num_features")
    for name, value in changes.items():
        if name not in known:
            raise TypeError(f"`{name}` is not an argument of BatchNorm.")
        if name in not_changeable or name.endswith(("_init", "_metadata")) or (name == "momentum" and value is None):
            raise TypeError(
                f"`{name}`={value!r} would change which variables a layer has, or is used up when it is built; "
                "build the model with it instead."
            )


def measured(layer: Any, x: Array, mask: Array | None) -> Moments:
    """Moments per channel of a batch norm's input x (any shape), where `mask` holds."""
    x = jnp.asarray(x)
    where = None if mask is None else broadcast_mask(mask, x)
    return batch_moments(x, axis=layer.axis, where=where)


def without_name(node: Any) -> Any:
    """A tree of recorded moments as batch statistics are laid out: {"bn": {"moments": m}} becomes {"bn": m}."""
    if isinstance(node, Moments):
        return node
    if set(node) == {"moments"} and isinstance(node["moments"], Moments):
        return node["moments"]
    return {name: without_name(child) for name, child in node.items()}
