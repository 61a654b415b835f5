"""Linen layers around a sum or an activation: the norms of a residual stream, and norms with an activation behind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from normlib import _layers, _layers_more
from normlib.linen._norms import BatchNorm, GroupNorm, LayerNorm, RMSNorm, _affine, _read, _write


class AddLayerNorm(LayerNorm):
    """Layer norm of a residual stream: s = x + residual, y = LayerNorm(s); returns y and s.

    The sum is formed in float32 and measured there; y is rounded once to Flax's promoted dtype or `dtype`, s to the
    common dtype of x and residual. Attributes as LayerNorm's, which `quant` makes return codes for y.

    Attributes:
      residual_round_first: round s to its dtype before it is measured, as an unfused sum would be.

    >>> x = jnp.array([[1.0, 2.0]])
    >>> (y, residual), _ = AddLayerNorm().init_with_output(jax.random.key(0), x, jnp.array([[0.0, 1.0]]))
    >>> y.round(2).tolist(), residual.tolist()
    ([[-1.0, 1.0]], [[1.0, 3.0]])
    """

    residual_round_first: bool = False

    @nn.compact
    def __call__(  # type: ignore[override]
        self, x: jax.Array, residual: jax.Array, *, mask: jax.Array | None = None
    ) -> _layers_more.AddNorm:
        """Add x and residual `[...]`, and normalise the sum, measuring where `mask` holds; `(y, residual)`."""
        x = jnp.asarray(x)
        parameters = _affine(self, x, _layers.sorted_axes(self.feature_axes, x.ndim, "feature_axes"))
        return _layers_more.add_norm(self, x, residual, *parameters, mask, initializing=self.is_initializing())


class AddRMSNorm(RMSNorm):
    """RMS norm of a residual stream: s = x + residual, y = RMSNorm(s); returns y and s.

    Dtypes and attributes as AddLayerNorm's.

    >>> x = jnp.array([[1.0, 2.0]])
    >>> (y, residual), _ = AddRMSNorm().init_with_output(jax.random.key(0), x, jnp.array([[1.0, 0.0]]))
    >>> y.round(2).tolist(), residual.tolist()
    ([[1.0, 1.0]], [[2.0, 2.0]])
    """

    residual_round_first: bool = False

    @nn.compact
    def __call__(  # type: ignore[override]
        self, x: jax.Array, residual: jax.Array, *, mask: jax.Array | None = None
    ) -> _layers_more.AddNorm:
        """Add x and residual `[...]`, and normalise the sum, measuring where `mask` holds; `(y, residual)`."""
        x = jnp.asarray(x)
        parameters = _affine(self, x, _layers.sorted_axes(self.feature_axes, x.ndim, "feature_axes"))
        return _layers_more.add_norm(
            self, x, residual, *parameters, mask, centered=False, initializing=self.is_initializing()
        )


class GroupNormSiLU(GroupNorm):
    """Group norm followed by SiLU, rounded once: y = z * sigmoid(beta * z), z = GroupNorm(x).

    Attributes as GroupNorm's. The backward keeps x and the statistics, not z.

    Attributes:
      beta: slope inside the sigmoid.
      quant: quantise y: a `normlib.Static`, `Dual`, `Dynamic`, `Asymmetric` or `MX`; the call then returns codes with
        their scale. The channels of a position are a row.
      norm_round_first: round y to its dtype before quantising.

    >>> layer = GroupNormSiLU(num_groups=1)
    >>> y, _ = layer.init_with_output(jax.random.key(0), jnp.array([[1.0, 3.0]]))
    >>> [round(float(v), 3) for v in y[0]]
    [-0.269, 0.731]
    """

    beta: float = 1.0
    quant: Any = None
    norm_round_first: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise and activate x `[..., C]`, measuring where `mask` (bool, broadcastable to x) holds."""
        x = jnp.asarray(x)
        groups = _layers.number_of_groups(x.shape[-1], self.num_groups, self.group_size)
        parameters = _affine(self, x, (x.ndim - 1,))
        return _layers_more.group_norm_silu(
            self, x, *parameters, mask, num_groups=groups, initializing=self.is_initializing()
        )


class BatchNormAct(BatchNorm):
    """Batch norm, a residual and an activation with one rounding: y = activation(BatchNorm(x) + residual).

    Attributes as BatchNorm's (`axis_name`, `virtual_batch_size` and `frozen` among them). The backward keeps x, the
    residual and the statistics, not what the activation is applied to. y has Flax's promoted dtype of x, residual,
    scale and bias, or `dtype`.

    Attributes:
      activation: "relu", "silu" ("swish"), an element-wise function, or None.

    >>> layer = BatchNormAct(use_running_average=False)
    >>> x = jnp.array([[1.0], [3.0]])
    >>> y, _ = layer.init_with_output(jax.random.key(0), x, residual=jnp.full((2, 1), 0.5))
    >>> y.round(2).tolist()
    [[0.0], [1.5]]
    """

    activation: Any = "relu"

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        residual: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalise x, add the residual, activate.

        Args:
          x: any shape and dtype, features along `axis`.
          use_running_average: normalise by the running statistics; here or in the layer, not in both.
          residual: of x's shape, added before the activation; or None. It is not measured.
          mask: bool, broadcastable to x: the entries that are measured.

        Returns:
          x's shape, in `dtype` or the promoted dtype of x, residual, scale and bias.

        Raises:
          ValueError: for settings that contradict one another or do not fit x.
        """
        x = jnp.asarray(x)
        stored, evaluating = self._statistics(x, use_running_average)
        y, new = _layers.batch_norm(
            self,
            x,
            *_affine(self, x, _layers.sorted_axes(self.axis, x.ndim, "axis")),
            mask,
            _read(stored),
            use_running_average=evaluating,
            initializing=self.is_initializing(),
            residual=residual,
        )
        _write(stored, new)
        return y
