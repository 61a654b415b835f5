"""Flax nnx layers: `flax.nnx`'s normalization layers by name, argument, attribute and state, computed here.

Changing `from flax import nnx` for these classes is enough: they draw the same keys from `rngs.params` in the same
order, so a whole model starts from the same parameters, and states load in both directions (exchange `nnx.state`, not
graphdefs). Arguments that Flax does not have come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer, PromoteDtypeFn
from jax.nn import initializers
from jaxtyping import Array

from normlib import _layers
from normlib._layers import Axes
from normlib.nnx._base import NOTHING, _Norm, _parameter, _store, _value, chosen_statistics


class BatchNorm(_Norm):
    """Batch norm, synchronised, in virtual batches or frozen as its arguments say.

    y = scale * (x - mean) / sqrt(var + epsilon) + bias, with mean and biased variance per feature of the batch (of the
    whole scope of devices with `axis_name`), or the running ones with `use_running_average`, which `train()` and
    `eval()` set. The running ones are `nnx.BatchStat`s called `mean` and `var`:
    new = momentum * old + (1 - momentum) * batch (PyTorch's momentum is one minus this), never differentiated,
    untouched by an empty or fully masked batch.

    Statistics are computed in float32 (float64 for float64 x) whatever the dtypes, accurately at any mean; y has the
    dtype that `promote_dtype` gives, and is rounded once.

    Args:
      num_features: entries of scale, bias, mean and var.
      use_running_average: normalise by the running statistics; the call's argument goes before.
      axis: feature axis or axes of x, negative ones counted from the end.
      momentum: weight of the old running value; None for the average over all batches (one more leaf, `num_batches`).
      epsilon: added to the variance inside the root, in units of x squared.
      dtype: dtype of y; None for the promoted dtype of x, mean, var, scale and bias.
      param_dtype: dtype in which scale and bias are created.
      use_bias, use_scale: whether y is shifted and scaled by parameters of these names.
      bias_init, scale_init: their initialisers.
      axis_name: mapped axis or axes over whose devices statistics are shared; not needed in evaluation.
      axis_index_groups: groups of indices along that axis that share among themselves.
      use_fast_variance: accepted for Flax's sake and ignored; the variance is always accurate.
      promote_dtype: function of the tuple (x, mean, var, scale, bias) and `dtype`. What it returns for x, scale and
        bias is used; the running statistics stay as they are stored, so that a 16-bit `dtype` does not round them.
      rngs: source of the keys, two from `params`, one for each parameter used.
      bias_metadata, scale_metadata: metadata of the parameters, such as their sharding.
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

    Raises:
      ValueError: for settings that contradict one another.

    >>> layer = BatchNorm(2, rngs=nnx.Rngs(0))
    >>> y = layer(jnp.arange(6.0).reshape(3, 2))
    >>> layer.mean[...]
    Array([0.02, 0.03], dtype=float32)
    """

    use_running_average: bool | None
    frozen: bool | str
    track_running_stats: bool

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: Axes = -1,
        momentum: float | None = 0.99,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        axis_name: str | Sequence[str] | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = NOTHING,
        scale_metadata: Mapping[str, Any] = NOTHING,
        virtual_batch_size: int | None = None,
        ragged: bool = False,
        frozen: bool | str = False,
        unbiased: bool = False,
        zero_debias: bool = False,
        skip_nonfinite_update: bool = False,
        track_running_stats: bool = True,
        scale_offset: float = 0.0,
        method: str = "auto",
        rule: str = "reverse",
        running: str = "merged",
        rescale: bool = False,
        quant: Any = None,
        norm_round_first: bool = False,
    ):
        self._keep(locals())
        self.scale = _parameter(use_scale, scale_init, num_features, param_dtype, rngs, scale_metadata)
        self.bias = _parameter(use_bias, bias_init, num_features, param_dtype, rngs, bias_metadata)
        _layers.check_batch_norm(self)
        if track_running_stats:
            self.mean = nnx.BatchStat(jnp.zeros((num_features,), jnp.float32))
            self.var = nnx.BatchStat(jnp.ones((num_features,), jnp.float32))
        if _layers.counts_batches(self):
            self.num_batches = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None) -> Array:
        """Normalise x, and update the running statistics unless they are what is used.

        Args:
          x: any shape and dtype, features along `axis`.
          use_running_average: normalise by the running statistics; goes before the layer's own setting.
          mask: bool, broadcastable to x: the entries that are measured. All are normalised.

        Returns:
          x's shape, in `dtype` or the promoted dtype.

        Raises:
          ValueError: if it is nowhere said which statistics to use, or the settings do not fit x.
        """
        evaluating = self._evaluating(use_running_average)
        running = self._running()
        stored = (None, None) if running is None else running[:2]
        x, *stored, scale, bias = self._promoted(x, *stored, _value(self.scale), _value(self.bias))
        y, new = _layers.batch_norm(
            self, x, scale, bias, mask, running, use_running_average=evaluating, promoted_with=tuple(stored)
        )  # fmt: skip
        self._write(new)
        return y

    def _running(self) -> _layers.Running | None:
        leaves = {name: getattr(self, name)[...] for name in self._stored()}
        return _layers.Running(**leaves) if leaves else None

    def _stored(self) -> tuple[str, ...]:
        names = ("mean", "var") if self.track_running_stats else ()
        return (*names, "num_batches") if _layers.counts_batches(self) else names

    def _write(self, new: _layers.Running | None) -> None:
        if new is not None:
            for name in self._stored():
                _store(getattr(self, name), getattr(new, name))

    def _evaluating(self, given: bool | None) -> bool:
        if self.frozen or not self.track_running_stats:
            return bool(self.frozen)
        return chosen_statistics(self.use_running_average, given)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set `use_running_average` for `nnx.view`, unless it is None."""
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def bn_span(self, rows: int, devices: int = 1) -> int:
        """Rows that share a statistic in training, for logs.

        Args:
          rows: rows on one device (under jit with a globally sharded batch: in the whole batch).
          devices: devices along `axis_name`.

        Returns:
          Rows per statistics group.

        Raises:
          ValueError: if `virtual_batch_size` does not fit.

        >>> BatchNorm(4, axis_name="data", rngs=nnx.Rngs(0)).bn_span(2, devices=8)
        16
        """
        return _layers.bn_span(self, rows, devices)


class LayerNorm(_Norm):
    """Layer norm: y = scale * (x - mean) / sqrt(var + epsilon) + bias, statistics over `reduction_axes` of each entry.

    Statistics in float32 (float64 for float64 x); y in the dtype that `promote_dtype` gives, rounded once. Arguments
    that BatchNorm has too mean the same.

    Args:
      num_features: entries of scale and bias.
      reduction_axes: axes measured together.
      feature_axes: axes along which scale and bias have entries of their own.
      axis_name: mapped axes over which the reduced axes are split (a sharded feature axis).
      promote_dtype: function of the tuple (x, scale, bias) and `dtype`, returning the promoted arrays.
      batch_invariant: y of a row does not change by a bit with the rows beside it, at a stated cost.
      quant, norm_round_first: return codes with their scale, of y or of the rounded y.

    >>> LayerNorm(2, rngs=nnx.Rngs(0))(jnp.array([[1.0, 3.0]]))
    Array([[-0.9999995,  0.9999995]], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | Sequence[str] | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = NOTHING,
        scale_metadata: Mapping[str, Any] = NOTHING,
        scale_offset: float = 0.0,
        method: str = "auto",
        rule: str = "reverse",
        rescale: bool = False,
        batch_invariant: bool = False,
        quant: Any = None,
        norm_round_first: bool = False,
    ):
        self._keep(locals())
        self.scale = _parameter(use_scale, scale_init, num_features, param_dtype, rngs, scale_metadata)
        self.bias = _parameter(use_bias, bias_init, num_features, param_dtype, rngs, bias_metadata)

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalise x `[...]`, measuring where `mask` (bool, broadcastable to x) holds; y has x's shape."""
        x, scale, bias = self._promoted(x, _value(self.scale), _value(self.bias))
        return _layers.layer_norm(self, x, scale, bias, mask)


class RMSNorm(_Norm):
    """RMS norm: y = scale * x / sqrt(mean(x**2) + epsilon), the mean over `reduction_axes` of each entry.

    Statistics in float32 (float64 for float64 x); y in the dtype that `promote_dtype` gives, rounded once. Arguments as
    LayerNorm's, with `promote_dtype` of the tuple (x, scale); with scale_offset=1 and scale_init zeros it is Gemma's.

    >>> RMSNorm(2, rngs=nnx.Rngs(0))(jnp.array([[3.0, 3.0]])).round(3)
    Array([[1., 1.]], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | Sequence[str] | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        scale_metadata: Mapping[str, Any] = NOTHING,
        scale_offset: float = 0.0,
        method: str = "auto",
        rule: str = "reverse",
        rescale: bool = False,
        batch_invariant: bool = False,
        quant: Any = None,
        norm_round_first: bool = False,
    ):
        self._keep(locals())
        self.scale = _parameter(use_scale, scale_init, num_features, param_dtype, rngs, scale_metadata)

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Normalise x `[...]`, measuring where `mask` (bool, broadcastable to x) holds; y has x's shape."""
        x, scale = self._promoted(x, _value(self.scale))
        return _layers.layer_norm(self, x, scale, None, mask, centered=False)


class GroupNorm(_Norm):
    """Group norm: layer norm over the other reduced axes and each of `num_groups` groups of the channels (last axis).

    Statistics in float32 (float64 for float64 x); y in the dtype that `promote_dtype` gives, rounded once. Arguments
    that BatchNorm and LayerNorm have too mean the same.

    Args:
      num_features: number of channels.
      num_groups: how many groups; None beside `group_size`.
      group_size: channels per group, instead of `num_groups`.
      reduction_axes: axes measured together, the last among them; None for all but the leading one.

    Raises:
      ValueError: if not exactly one of `num_groups` and `group_size` is given, or it does not divide the channels.

    >>> GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))(jnp.array([[1.0, 3.0, 5.0, 5.0]]))
    Array([[-0.9999995,  0.9999995,  0.       ,  0.       ]], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes | None = None,
        axis_name: str | Sequence[str] | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = NOTHING,
        scale_metadata: Mapping[str, Any] = NOTHING,
        scale_offset: float = 0.0,
        method: str = "auto",
        rule: str = "reverse",
        rescale: bool = False,
    ):
        self._keep(locals())
        self.feature_axis = -1
        self.num_groups = _layers.number_of_groups(num_features, num_groups, group_size)
        self.group_size = num_features // self.num_groups
        self.scale = _parameter(use_scale, scale_init, num_features, param_dtype, rngs, scale_metadata)
        self.bias = _parameter(use_bias, bias_init, num_features, param_dtype, rngs, bias_metadata)

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalise x `[..., C]`, measuring where `mask` (bool, broadcastable to x) holds; y has x's shape."""
        x, scale, bias = self._promoted(x, _value(self.scale), _value(self.bias))
        return _layers.group_norm(self, x, scale, bias, mask, num_groups=self.num_groups)


class InstanceNorm(_Norm):
    """Instance norm: layer norm over all axes but the leading one and the features, for each sample and feature.

    Statistics in float32 (float64 for float64 x); y in the dtype that `promote_dtype` gives, rounded once. Arguments
    that BatchNorm and LayerNorm have too mean the same.

    Args:
      num_features: entries of scale and bias.
      feature_axes: axes with statistics, scale and bias of their own; not the leading one.

    >>> InstanceNorm(1, rngs=nnx.Rngs(0))(jnp.array([[[1.0], [3.0]]])).ravel()
    Array([-0.9999995,  0.9999995], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        feature_axes: Axes = -1,
        axis_name: str | Sequence[str] | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = NOTHING,
        scale_metadata: Mapping[str, Any] = NOTHING,
        scale_offset: float = 0.0,
        method: str = "auto",
        rule: str = "reverse",
        rescale: bool = False,
    ):
        self._keep(locals())
        self.scale = _parameter(use_scale, scale_init, num_features, param_dtype, rngs, scale_metadata)
        self.bias = _parameter(use_bias, bias_init, num_features, param_dtype, rngs, bias_metadata)

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalise x `[N, ...]`, measuring where `mask` (bool, broadcastable to x) holds; y has x's shape."""
        x, scale, bias = self._promoted(x, _value(self.scale), _value(self.bias))
        return _layers.instance_norm(self, x, scale, bias, mask)
