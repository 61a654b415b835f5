"""Flax linen layers: `flax.linen`'s normalization layers by name, argument, parameter and collection, computed here.

Changing `from flax import linen as nn` for these classes is enough: parameters, running statistics and initial values
stay the same, and checkpoints load in both directions. Arguments that Flax does not have come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, Initializer
from jax.nn import initializers

from normlib import _layers
from normlib._layers import Axes


def _affine(module: Any, x: jax.Array, features: tuple[int, ...]) -> tuple[jax.Array | None, jax.Array | None]:
    """The layer's scale and bias, created if they are not there: scale first, as Flax draws its keys."""
    shape = tuple(x.shape[axis] for axis in features)
    scale = bias = None
    if module.use_scale:
        scale = module.param("scale", module.scale_init, shape, module.param_dtype)
    if getattr(module, "use_bias", False):
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    return scale, bias


def _read(stored: dict[str, nn.Variable]) -> _layers.Running | None:
    return _layers.Running(**{name: variable.value for name, variable in stored.items()}) if stored else None


def _write(stored: dict[str, nn.Variable], new: _layers.Running | None) -> None:
    if new is not None:
        for name, variable in stored.items():
            variable.value = getattr(new, name)


class BatchNorm(nn.Module):
    """Batch norm, synchronised, in virtual batches or frozen as its arguments say.

    y = scale * (x - mean) / sqrt(var + epsilon) + bias, with mean and biased variance per feature of the batch (of the
    whole scope of devices with `axis_name`), or the running ones with `use_running_average`. They are kept in the
    collection `batch_stats` as `mean` and `var`: new = momentum * old + (1 - momentum) * batch (PyTorch's momentum is
    one minus this), never differentiated, untouched by an empty or fully masked batch and during `init`.

    Statistics are computed in float32 (float64 for float64 x) whatever the dtypes, accurately at any mean; y has
    Flax's promoted dtype of x, scale and bias, or `dtype`, and is rounded once.

    Attributes:
      use_running_average: normalise by the running statistics; here or in the call.
      axis: feature axis or axes of x, negative ones counted from the end. Parameters have one entry per feature.
      momentum: weight of the old running value; None for the average over all batches (one more leaf, `num_batches`).
      epsilon: added to the variance inside the root, in units of x squared.
      dtype: dtype of y; None for the promoted dtype of x, scale and bias.
      param_dtype: dtype in which scale and bias are created.
      use_bias, use_scale: whether y is shifted and scaled by parameters of these names.
      bias_init, scale_init: their initialisers.
      axis_name: mapped axis or axes over whose devices statistics are shared; not needed by `init` or in evaluation.
      axis_index_groups: groups of indices along that axis that share among themselves.
      use_fast_variance: accepted for Flax's sake and ignored; the variance is always accurate.
      force_float32_reductions: False stores the running statistics in `param_dtype`; they are computed as ever.
      virtual_batch_size: rows that share statistics (ghost batch norm), inside a device or across neighbours.
      ragged: allow a smaller last virtual batch.
      frozen: always use the running statistics and write none; scale and bias get zero gradients, x its own. With
        "statistics" only these are frozen: scale and bias train.
      unbiased: store the variance times n / (n - 1), as PyTorch does.
      zero_debias: remove from the moving average the weight of its start (one more leaf, `num_batches`).
      skip_nonfinite_update: leave the running statistics alone after a batch whose statistics are not finite.
      track_running_stats: False keeps no running statistics and uses the batch's in evaluation too.
      scale_offset: y is scaled by scale_offset + scale; with 1, give `scale_init` zeros.
      method, rule, running, rescale: how statistics are shared, differentiated, merged and guarded against overflow:
        see `normlib.batch.batch_norm`.
      quant: quantise y where the running statistics are used: a `normlib.Static`, `Dual`, `Dynamic`, `Asymmetric` or
        `MX`; the call then returns codes with their scale.
      norm_round_first: round y to its dtype before quantising.

    >>> x = jnp.arange(6.0).reshape(3, 2)
    >>> layer = BatchNorm(use_running_average=False)
    >>> variables = layer.init(jax.random.key(0), x)
    >>> y, updates = layer.apply(variables, x, mutable=["batch_stats"])
    >>> updates["batch_stats"]["mean"]
    Array([0.02, 0.03], dtype=float32)
    """

    use_running_average: bool | None = None
    axis: Axes = -1
    momentum: float | None = 0.99
    epsilon: float = 1e-5
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    axis_name: str | Sequence[str] | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True
    virtual_batch_size: int | None = None
    ragged: bool = False
    frozen: bool | str = False
    unbiased: bool = False
    zero_debias: bool = False
    skip_nonfinite_update: bool = False
    track_running_stats: bool = True
    scale_offset: float = 0.0
    method: str = "auto"
    rule: str = "reverse"
    running: str = "merged"
    rescale: bool = False
    quant: Any = None
    norm_round_first: bool = False

    @nn.compact
    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Normalise x.

        Args:
          x: any shape and dtype, features along `axis`.
          use_running_average: normalise by the running statistics; here or in the layer, not in both.
          mask: bool, broadcastable to x: the entries that are measured. All are normalised.

        Returns:
          x's shape, in `dtype` or the promoted dtype of x, scale and bias.

        Raises:
          ValueError: for settings that contradict one another or do not fit x.
        """
        x = jnp.asarray(x)
        stored, evaluating = self._statistics(x, use_running_average)
        features = _layers.sorted_axes(self.axis, x.ndim, "axis")
        y, new = _layers.batch_norm(
            self,
            x,
            *_affine(self, x, features),
            mask,
            _read(stored),
            use_running_average=evaluating,
            initializing=self.is_initializing(),
        )
        _write(stored, new)
        return y

    def _statistics(self, x: jax.Array, use_running_average: bool | None) -> tuple[dict[str, nn.Variable], bool]:
        """The variables of the running statistics by name, and whether they are what x is normalised by."""
        _layers.check_batch_norm(self)
        features = _layers.sorted_axes(self.axis, x.ndim, "axis")
        stored = self._stored(tuple(x.shape[axis] for axis in features))
        evaluating = bool(self.frozen)
        if not self.frozen and self.track_running_stats:
            evaluating = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
        if _layers.counts_batches(self) and (not evaluating or self.is_initializing()):
            stored["num_batches"] = self.variable("batch_stats", "num_batches", jnp.zeros, (), jnp.int32)
        return stored, evaluating

    def _stored(self, shape: tuple[int, ...]) -> dict[str, nn.Variable]:
        if not self.track_running_stats:
            return {}
        dtype = jnp.float32 if self.force_float32_reductions else self.param_dtype
        return {
            "mean": self.variable("batch_stats", "mean", jnp.zeros, shape, dtype),
            "var": self.variable("batch_stats", "var", jnp.ones, shape, dtype),
        }

    def bn_span(self, rows: int, devices: int = 1) -> int:
        """Rows that share a statistic in training, for logs.

        Args:
          rows: rows on one device (under jit with a globally sharded batch: in the whole batch).
          devices: devices along `axis_name`.

        Returns:
          Rows per statistics group.

        Raises:
          ValueError: if `virtual_batch_size` does not fit.

        >>> BatchNorm(axis_name="data").bn_span(2, devices=8)
        16
        """
        return _layers.bn_span(self, rows, devices)


class LayerNorm(nn.Module):
    """Layer norm: y = scale * (x - mean) / sqrt(var + epsilon) + bias, statistics over `reduction_axes` of each entry.

    Statistics in float32 (float64 for float64 x); y in Flax's promoted dtype or `dtype`, rounded once. Attributes that
    BatchNorm has too mean the same.

    Attributes:
      reduction_axes: axes measured together.
      feature_axes: axes along which scale and bias have entries of their own.
      axis_name: mapped axes over which the reduced axes are split (a sharded feature axis).
      batch_invariant: y of a row does not change by a bit with the rows beside it, at a stated cost.
      quant, norm_round_first: return codes with their scale, of y or of the rounded y.

    >>> layer = LayerNorm()
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.array([[1.0, 3.0]]))
    >>> y
    Array([[-0.9999995,  0.9999995]], dtype=float32)
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    reduction_axes: Axes = -1
    feature_axes: Axes = -1
    axis_name: str | Sequence[str] | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True
    scale_offset: float = 0.0
    method: str = "auto"
    rule: str = "reverse"
    rescale: bool = False
    batch_invariant: bool = False
    quant: Any = None
    norm_round_first: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise x `[...]`, measuring where `mask` (bool, broadcastable to x) holds; y has x's shape."""
        x = jnp.asarray(x)
        parameters = _affine(self, x, _layers.sorted_axes(self.feature_axes, x.ndim, "feature_axes"))
        return _layers.layer_norm(self, x, *parameters, mask, initializing=self.is_initializing())


class RMSNorm(nn.Module):
    """RMS norm: y = scale * x / sqrt(mean(x**2) + epsilon), the mean over `reduction_axes` of each entry.

    Statistics in float32 (float64 for float64 x); y in Flax's promoted dtype or `dtype`, rounded once. Attributes as
    LayerNorm's; with scale_offset=1 and scale_init zeros it is Gemma's.

    >>> layer = RMSNorm()
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.array([[3.0, 3.0]]))
    >>> y.round(3)
    Array([[1., 1.]], dtype=float32)
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_scale: bool = True
    scale_init: Initializer = initializers.ones
    reduction_axes: Axes = -1
    feature_axes: Axes = -1
    axis_name: str | Sequence[str] | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True
    scale_offset: float = 0.0
    method: str = "auto"
    rule: str = "reverse"
    rescale: bool = False
    batch_invariant: bool = False
    quant: Any = None
    norm_round_first: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise x `[...]`, measuring where `mask` (bool, broadcastable to x) holds; y has x's shape."""
        x = jnp.asarray(x)
        parameters = _affine(self, x, _layers.sorted_axes(self.feature_axes, x.ndim, "feature_axes"))
        return _layers.layer_norm(self, x, *parameters, mask, centered=False, initializing=self.is_initializing())


class GroupNorm(nn.Module):
    """Group norm: layer norm over the other reduced axes and each of `num_groups` groups of the channels (last axis).

    Statistics in float32 (float64 for float64 x); y in Flax's promoted dtype or `dtype`, rounded once. Attributes that
    BatchNorm has too mean the same.

    Attributes:
      num_groups: how many groups; None beside `group_size`.
      group_size: channels per group, instead of `num_groups`.
      reduction_axes: axes measured together, the last among them; None for all but the leading one.

    >>> layer = GroupNorm(num_groups=2)
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.array([[1.0, 3.0, 5.0, 5.0]]))
    >>> y
    Array([[-0.9999995,  0.9999995,  0.       ,  0.       ]], dtype=float32)
    """

    num_groups: int | None = 32
    group_size: int | None = None
    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    reduction_axes: Axes | None = None
    axis_name: str | Sequence[str] | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True
    scale_offset: float = 0.0
    method: str = "auto"
    rule: str = "reverse"
    rescale: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise x `[..., C]`, measuring where `mask` (bool, broadcastable to x) holds; y has x's shape."""
        x = jnp.asarray(x)
        groups = _layers.number_of_groups(x.shape[-1], self.num_groups, self.group_size)
        parameters = _affine(self, x, (x.ndim - 1,))
        return _layers.group_norm(self, x, *parameters, mask, num_groups=groups, initializing=self.is_initializing())


class InstanceNorm(nn.Module):
    """Instance norm: layer norm over all axes but the leading one and the features, for each sample and feature.

    Statistics in float32 (float64 for float64 x); y in Flax's promoted dtype or `dtype`, rounded once. Attributes that
    BatchNorm has too mean the same.

    Attributes:
      feature_axes: axes with statistics, scale and bias of their own; not the leading one.

    >>> layer = InstanceNorm()
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.array([[[1.0], [3.0]]]))
    >>> y.ravel()
    Array([-0.9999995,  0.9999995], dtype=float32)
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    feature_axes: Axes = -1
    axis_name: str | Sequence[str] | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True
    scale_offset: float = 0.0
    method: str = "auto"
    rule: str = "reverse"
    rescale: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise x `[N, ...]`, measuring where `mask` (bool, broadcastable to x) holds; y has x's shape."""
        x = jnp.asarray(x)
        parameters = _affine(self, x, _layers.instance_features(self, x))
        return _layers.instance_norm(self, x, *parameters, mask, initializing=self.is_initializing())
