"""nnx layers around a sum or an activation: the norms of a residual stream, and norms with an activation behind."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jaxtyping import Array

from normlib import _layers, _layers_more, batch_act
from normlib.nnx._base import _value
from normlib.nnx._norms import BatchNorm, GroupNorm, LayerNorm, RMSNorm


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a layer that promotes as linen does, for the layer of Flax's that it extends.

    Raises:
      TypeError: for `promote_dtype`, which would widen a 16-bit x before it is kept for the backward.
    """
    if "promote_dtype" in settings:
        raise TypeError("`promote_dtype` is not an argument of this layer: y has the promoted dtype, or `dtype`.")
    return settings


class AddLayerNorm(LayerNorm):
    """Layer norm of a residual stream: s = x + residual, y = LayerNorm(s); returns y and s.

    The sum is formed in float32 and measured there; y is rounded once to the promoted dtype of x, residual and
    parameters or to `dtype`, s to the common dtype of x and residual.

    Args:
      num_features: entries of scale and bias.
      residual_round_first: round s to its dtype before it is measured, as an unfused sum would be.
      rngs: source of the keys, as for LayerNorm.
      settings: LayerNorm's other arguments but `promote_dtype`; with `quant` y is codes with their scale.

    Raises:
      TypeError: for `promote_dtype`.

    >>> layer = AddLayerNorm(2, rngs=nnx.Rngs(0))
    >>> y, residual = layer(jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 1.0]]))
    >>> y.round(2).tolist(), residual.tolist()
    ([[-1.0, 1.0]], [[1.0, 3.0]])
    """

    def __init__(self, num_features: int, *, residual_round_first: bool = False, rngs: nnx.Rngs, **settings: Any):
        super().__init__(num_features, rngs=rngs, **plain(settings))
        self.residual_round_first = residual_round_first

    def __call__(  # type: ignore[override]
        self, x: Array, residual: Array, *, mask: Array | None = None
    ) -> _layers_more.AddNorm:
        """Add x and residual `[...]`, and normalise the sum, measuring where `mask` holds; `(y, residual)`."""
        return _layers_more.add_norm(self, x, residual, _value(self.scale), _value(self.bias), mask)


class AddRMSNorm(RMSNorm):
    """RMS norm of a residual stream: s = x + residual, y = RMSNorm(s); returns y and s.

    Dtypes and arguments as AddLayerNorm's.

    >>> layer = AddRMSNorm(2, rngs=nnx.Rngs(0))
    >>> y, residual = layer(jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 0.0]]))
    >>> y.round(2).tolist(), residual.tolist()
    ([[1.0, 1.0]], [[2.0, 2.0]])
    """

    def __init__(self, num_features: int, *, residual_round_first: bool = False, rngs: nnx.Rngs, **settings: Any):
        super().__init__(num_features, rngs=rngs, **plain(settings))
        self.residual_round_first = residual_round_first

    def __call__(  # type: ignore[override]
        self, x: Array, residual: Array, mask: Array | None = None
    ) -> _layers_more.AddNorm:
        """Add x and residual `[...]`, and normalise the sum, measuring where `mask` holds; `(y, residual)`."""
        return _layers_more.add_norm(self, x, residual, _value(self.scale), None, mask, centered=False)


class GroupNormSiLU(GroupNorm):
    """Group norm followed by SiLU, rounded once: y = z * sigmoid(beta * z), z = GroupNorm(x).

    The backward keeps x and the statistics, not z.

    Args:
      num_features, num_groups, group_size, rngs: as GroupNorm's.
      beta: slope inside the sigmoid.
      quant: quantise y: a `normlib.Static`, `Dual`, `Dynamic`, `Asymmetric` or `MX`; the call then returns codes with
        their scale. The channels of a position are a row.
      norm_round_first: round y to its dtype before quantising.
      settings: GroupNorm's other arguments but `promote_dtype`.

    Raises:
      TypeError: for `promote_dtype`.

    >>> y = GroupNormSiLU(2, num_groups=1, rngs=nnx.Rngs(0))(jnp.array([[1.0, 3.0]]))
    >>> [round(float(v), 3) for v in y[0]]
    [-0.269, 0.731]
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        beta: float = 1.0,
        quant: Any = None,
        norm_round_first: bool = False,
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        super().__init__(num_features, num_groups, group_size, rngs=rngs, **plain(settings))
        self._keep({"beta": beta, "quant": quant, "norm_round_first": norm_round_first})

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalise and activate x `[..., C]`, measuring where `mask` (bool, broadcastable to x) holds."""
        scale, bias = _value(self.scale), _value(self.bias)
        return _layers_more.group_norm_silu(self, x, scale, bias, mask, num_groups=self.num_groups)


class BatchNormAct(BatchNorm):
    """Batch norm, a residual and an activation with one rounding: y = activation(BatchNorm(x) + residual).

    The backward keeps x, the residual and the statistics, not what the activation is applied to. y has the promoted
    dtype of x, residual, scale and bias, or `dtype`.

    Args:
      num_features, rngs: as BatchNorm's.
      activation: "relu", "silu" ("swish"), an element-wise function, or None.
      settings: BatchNorm's other arguments (`axis_name`, `virtual_batch_size` and `frozen` among them) but
        `promote_dtype`.

    Raises:
      TypeError: for `promote_dtype`, or an activation that is neither name nor function.
      ValueError: for an unknown activation, or settings that contradict one another.

    >>> layer = BatchNormAct(1, rngs=nnx.Rngs(0))
    >>> layer(jnp.array([[1.0], [3.0]]), residual=jnp.full((2, 1), 0.5)).round(2).tolist()
    [[0.0], [1.5]]
    """

    def __init__(self, num_features: int, *, activation: Any = "relu", rngs: nnx.Rngs, **settings: Any):
        super().__init__(num_features, rngs=rngs, **plain(settings))
        batch_act.activation_of(activation)
        self.activation = activation

    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        residual: Array | None = None,
        mask: Array | None = None,
    ) -> Array:
        """Normalise x, add the residual, activate.

        Args:
          x: any shape and dtype, features along `axis`.
          use_running_average: normalise by the running statistics; goes before the layer's own setting.
          residual: of x's shape, added before the activation; or None. It is not measured.
          mask: bool, broadcastable to x: the entries that are measured.

        Returns:
          x's shape, in `dtype` or the promoted dtype of x, residual, scale and bias.

        Raises:
          ValueError: if it is nowhere said which statistics to use, or the settings do not fit x.
        """
        y, new = _layers.batch_norm(
            self,
            x,
            _value(self.scale),
            _value(self.bias),
            mask,
            self._running(),
            use_running_average=self._evaluating(use_running_average),
            residual=residual,
        )
        self._write(new)
        return y
