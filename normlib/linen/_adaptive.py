"""Linen layers whose scale and shift come from a condition, or that adapt to x without or between statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, Initializer
from jax.nn import initializers

from normlib import _layers, _layers_more
from normlib._layers import Axes
from normlib.adaptive import AdaNormZeroOutput
from normlib.linen._norms import BatchNorm, _affine, _read, _write


class AdaLayerNorm(nn.Module):
    """Layer norm modulated by a condition c: y = LayerNorm(x) * (scale_offset + scale(c)) + shift(c).

    shift and scale are the halves of Dense(SiLU(c)), the submodule `projection`, which starts at zero: the layer starts
    as a plain layer norm. y has Flax's promoted dtype of x, modulation and parameters, or `dtype`, rounded once.

    Attributes:
      epsilon: added to the variance inside the root.
      dtype: dtype of y and of the projection; None for the promoted ones.
      param_dtype: dtype in which parameters are created.
      use_bias, use_scale: whether the norm has a scale and bias of its own besides; off, as the projection has both.
      bias_init, scale_init, kernel_init: initialisers of these and of the projection's kernel.
      scale_offset: 1 for the usual form, 0 where the projection gives the whole factor.
      rule, rescale, batch_invariant: as LayerNorm's.
      quant, norm_round_first: return codes with their scale, of y or of the rounded y.

    Source: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers".

    >>> x, c = jnp.array([[[1.0, 3.0]]]), jnp.ones((1, 4))
    >>> y, variables = AdaLayerNorm().init_with_output(jax.random.key(0), x, c)
    >>> y.round(2).tolist(), variables["params"]["projection"]["kernel"].shape
    ([[[-1.0, 1.0]]], (4, 4))
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = False
    use_scale: bool = False
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    kernel_init: Initializer = initializers.zeros
    scale_offset: float = 1.0
    rule: str = "reverse"
    rescale: bool = False
    batch_invariant: bool = False
    quant: Any = None
    norm_round_first: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, c: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise x `[B..., S, H]`, and modulate it by c.

        Args:
          x: `[B..., S, H]`.
          c: `[B..., D]`, a condition for each sample, or `[B..., S, D]`, for each token.
          mask: bool, broadcastable to x: the entries that are measured.

        Returns:
          x's shape, in `dtype` or the promoted dtype.
        """
        x = jnp.asarray(x)
        modulation = self._modulation(c, 2 * x.shape[-1])
        return _layers_more.ada_layer_norm(self, x, modulation, *_affine(self, x, (x.ndim - 1,)), mask)

    def _modulation(self, c: jax.Array, features: int) -> jax.Array:
        projection = nn.Dense(
            features, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=self.kernel_init, name="projection"
        )
        return projection(nn.silu(jnp.asarray(c)))


class AdaLayerNormZero(AdaLayerNorm):
    """adaLN-Zero: AdaLayerNorm with a gate for the branch behind it; the block starts as the identity.

    `y, gate = layer(x, c)`, then `normlib.gate_residual(x, branch(y), gate)`: the projection, which gives shift, scale
    and gate in this order, starts at zero. A block with two branches, which has six chunks in one projection elsewhere,
    has two of these layers here: their kernels are the halves of that projection's. Attributes as AdaLayerNorm's.

    >>> x, c = jnp.array([[[1.0, 3.0]]]), jnp.ones((1, 4))
    >>> (y, gate), _ = AdaLayerNormZero().init_with_output(jax.random.key(0), x, c)
    >>> y.round(2).tolist(), gate.tolist()
    ([[[-1.0, 1.0]]], [[[0.0, 0.0]]])
    """

    @nn.compact
    def __call__(  # type: ignore[override]
        self, x: jax.Array, c: jax.Array, *, mask: jax.Array | None = None
    ) -> AdaNormZeroOutput:
        """Normalise x `[B..., S, H]`, modulate it by c `[B..., D]` or `[B..., S, D]`: (y, gate `[B..., 1 or S, H]`)."""
        x = jnp.asarray(x)
        modulation = self._modulation(c, 3 * x.shape[-1])
        return _layers_more.ada_layer_norm_zero(self, x, modulation, *_affine(self, x, (x.ndim - 1,)), mask)


class ConditionalBatchNorm(BatchNorm):
    """Batch norm whose scale and bias belong to the sample: y = norm(x) * (scale_offset + scale[n]) + bias[n].

    With `num_classes` the parameters `scale` and `bias` are tables `[classes, features]` and the condition is a class
    label; without, they are the halves of Dense(condition), the submodule `projection`. Both start at zero, where the
    layer is a plain batch norm. Running statistics and attributes as BatchNorm's (`axis_name`, `virtual_batch_size`
    and `frozen` among them).

    Attributes:
      num_classes: rows of the tables; None for a condition of features.
      kernel_init: initialiser of the projection's kernel.

    Source: de Vries et al. 2017, "Modulating early visual processing by language".

    >>> layer = ConditionalBatchNorm(use_running_average=False, num_classes=10)
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.array([[-1.0], [1.0]]), jnp.array([3, 7]))
    >>> y.round(3).tolist(), variables["params"]["scale"].shape
    ([[-1.0], [1.0]], (10, 1))
    """

    scale_init: Initializer = initializers.zeros
    scale_offset: float = 1.0
    num_classes: int | None = None
    kernel_init: Initializer = initializers.zeros

    @nn.compact
    def __call__(  # type: ignore[override]
        self,
        x: jax.Array,
        condition: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalise x by the batch, and give every sample its own scale and bias.

        Args:
          x: `[N, ...]`, any dtype, features along `axis`, which is not 0.
          condition: integer class labels `[N]`, or features `[N, D]`. A label out of range gives NaN.
          use_running_average: normalise by the running statistics; here or in the layer, not in both.
          mask: bool, broadcastable to x: the entries that are measured.

        Returns:
          x's shape, in `dtype` or the promoted dtype of x, scale and bias.

        Raises:
          ValueError: for settings that contradict one another or do not fit x, or a condition of another shape.
          TypeError: for labels that are not integers.
        """
        x, condition = jnp.asarray(x), jnp.asarray(condition)
        features = _layers.instance_features(self, x, "axis")
        stored, evaluating = self._statistics(x, use_running_average)
        y, new = _layers.batch_norm(
            self,
            x,
            *self._rows(condition, x, features),
            mask,
            _read(stored),
            use_running_average=evaluating,
            initializing=self.is_initializing(),
            per_sample=True,
        )
        _write(stored, new)
        return y

    def _rows(self, condition, x, features) -> tuple[jax.Array | None, jax.Array | None]:
        size = _layers_more.size_of(x, features)
        used = (("scale", self.use_scale, self.scale_init), ("bias", self.use_bias, self.bias_init))
        if self.num_classes is not None:
            shape = (self.num_classes, size)
            tables = [self.param(n, init, shape, self.param_dtype) if wanted else None for n, wanted, init in used]
            return _layers_more.class_rows(tables[0], tables[1], condition, x)
        _layers_more.check_condition(condition, x.shape[0])
        projection = nn.Dense(
            size * (self.use_scale + self.use_bias), dtype=self.dtype, param_dtype=self.param_dtype,
            kernel_init=self.kernel_init, name="projection",
        )  # fmt: skip
        return _layers_more.halves(projection(condition), self.use_scale, self.use_bias)


class DynamicTanh(nn.Module):
    """DyT: y = scale * tanh(alpha * x) + bias, in place of a norm and without its reduction.

    alpha is a parameter, one scalar. y has Flax's promoted dtype or `dtype`, rounded once from float32; the backward
    keeps x alone.

    Attributes:
      alpha_init: where alpha starts.
      dtype: dtype of y; None for the promoted dtype of x and the parameters.
      param_dtype: dtype in which the parameters are created.
      use_bias, use_scale, bias_init, scale_init, feature_axes: as LayerNorm's.

    Source: Zhu et al. 2025, "Transformers without Normalization".

    >>> y, variables = DynamicTanh().init_with_output(jax.random.key(0), jnp.array([[0.0, 100.0]]))
    >>> y.tolist(), float(variables["params"]["alpha"])
    ([[0.0, 1.0]], 0.5)
    """

    alpha_init: float = 0.5
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    feature_axes: Axes = -1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """scale * tanh(alpha * x) + bias for x `[...]`, of x's shape."""
        x = jnp.asarray(x)
        alpha = self.param("alpha", initializers.constant(self.alpha_init), (), self.param_dtype)
        parameters = _affine(self, x, _layers.sorted_axes(self.feature_axes, x.ndim, "feature_axes"))
        return _layers_more.dynamic_tanh(self, x, alpha, *parameters)


class SwitchableNorm(nn.Module):
    """A learned mix of instance, layer and batch statistics, weighed by two softmaxes.

    The parameters `mean_logits` and `var_logits`, `[3]` each, start at zero: equal weights. In evaluation running
    statistics, kept in `batch_stats` as BatchNorm's, take the place of the batch's. Attributes as BatchNorm's.

    Source: Luo et al. 2019, "Differentiable Learning-to-Normalize via Switchable Normalization".

    >>> layer = SwitchableNorm(use_running_average=False)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 4, 3)))
    >>> variables["params"]["mean_logits"].tolist(), variables["batch_stats"]["mean"].shape
    ([0.0, 0.0, 0.0], (3,))
    """

    use_running_average: bool | None = None
    axis: int = -1
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    axis_name: str | Sequence[str] | None = None
    unbiased: bool = False
    skip_nonfinite_update: bool = False
    rule: str = "reverse"

    @nn.compact
    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Normalise x `[N, ..., C]`, channels along `axis`, measuring where `mask` (bool, broadcastable to x) holds.

        y has x's shape, in `dtype` or the promoted dtype.
        """
        x = jnp.asarray(x)
        evaluating = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
        features = _layers.sorted_axes(self.axis, x.ndim, "axis")
        shape = tuple(x.shape[axis] for axis in features)
        stored = {
            "mean": self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32),
            "var": self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32),
        }
        logits = tuple(
            self.param(name, initializers.zeros, (3,), self.param_dtype) for name in ("mean_logits", "var_logits")
        )
        y, new = _layers_more.switchable_norm(
            self,
            x,
            logits,  # type: ignore[arg-type]
            *_affine(self, x, features),
            _layers.Running(stored["mean"].value, stored["var"].value),
            mask,
            use_running_average=evaluating,
            initializing=self.is_initializing(),
        )
        _write(stored, new)
        return y
