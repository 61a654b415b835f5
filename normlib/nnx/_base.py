"""What every nnx layer here has: its settings, its parameters, and how values go into its variables."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer
from jaxtyping import Array

from normlib import _layers

NOTHING: Mapping[str, Any] = MappingProxyType({})


class _Norm(nnx.Module):
    """What every layer here has, and how an `__init__` sets it up."""

    scale: Any
    bias: Any
    dtype: Any
    promote_dtype: Any

    def _keep(self, arguments: Mapping[str, Any]) -> None:
        """Store an `__init__`'s arguments under their names, as Flax's layers do, but for those used up by it."""
        used_up = ("self", "rngs", "bias_init", "scale_init", "bias_metadata", "scale_metadata")
        for name, value in arguments.items():
            if name == "quant" and value is not None:
                value = nnx.data(value)  # it may hold arrays
            if name not in used_up:
                setattr(self, name, value)
        _layers.check_settings(self)

    def _promoted(self, *arrays: Array | None) -> Any:
        """The arrays by a `promote_dtype` of the user's own; Flax's would only widen x before it is kept.

        With Flax's the operators find the same dtype for y, compute in float32 and round once.
        """
        if self.promote_dtype is dtypes.promote_dtype:
            return jax.tree.map(jnp.asarray, arrays)
        return self.promote_dtype(arrays, dtype=self.dtype)


def _parameter(
    used: bool, init: Initializer, features: int, dtype: Dtype, rngs: nnx.Rngs, metadata: Mapping[str, Any]
) -> Any:
    """A parameter `[features]`, its key drawn only when it is used, as Flax does."""
    return nnx.Param(init(rngs.params(), (features,), dtype), **metadata) if used else nnx.data(None)


def _value(parameter: Any) -> Array | None:
    return None if parameter is None else parameter[...]


def _store(leaf: Any, value: Array) -> None:
    """Write into a variable, which an indexed write would keep real where the value has become complex."""
    if value.dtype == leaf.dtype:
        leaf[...] = value
    else:
        leaf.set_value(value)


def chosen_statistics(own: bool | None, given: bool | None) -> bool:
    """Whether running statistics are used, by the layer's setting and the call's, which goes before it.

    Raises:
      ValueError: if neither says.
    """
    chosen = own if given is None else given
    if chosen is None:
        raise ValueError(
            "`use_running_average` is None in the layer and in the call; give it in one of them, or call "
            "`train()` or `eval()` on the model."
        )
    return chosen
