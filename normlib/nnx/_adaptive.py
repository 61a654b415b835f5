"""nnx layers whose scale and shift come from a condition, or that adapt to x without or between statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax.nn import initializers
from jaxtyping import Array

from normlib import _layers, _layers_more
from normlib._layers import Axes
from normlib.adaptive import AdaNormZeroOutput
from normlib.nnx._base import NOTHING, _Norm, _parameter, _store, _value, chosen_statistics
from normlib.nnx._norms import BatchNorm
from normlib.nnx._residual import plain


class AdaLayerNorm(_Norm):
    """Layer norm modulated by a condition c: y = LayerNorm(x) * (scale_offset + scale(c)) + shift(c).

    shift and scale are the halves of Linear(SiLU(c)), the attribute `projection`, which starts at zero: the layer
    starts as a plain layer norm. y has the promoted dtype of x, modulation and parameters, or `dtype`, rounded once.

    Args:
      num_features: H, of x.
      cond_features: D, of c.
      epsilon: added to the variance inside the root.
      dtype: dtype of y and of the projection; None for the promoted ones.
      param_dtype: dtype in which parameters are created.
      use_bias, use_scale: whether the norm has a scale and bias of its own besides; off, as the projection has both.
      bias_init, scale_init, kernel_init: initialisers of these and of the projection's kernel.
      scale_offset: 1 for the usual form, 0 where the projection gives the whole factor.
      rule, rescale, batch_invariant: as LayerNorm's.
      quant, norm_round_first: return codes with their scale, of y or of the rounded y.
      rngs: source of the keys.

    Source: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers".

    >>> layer = AdaLayerNorm(2, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.array([[[1.0, 3.0]]]), jnp.ones((1, 4))).round(2).tolist(), layer.projection.kernel.shape
    ([[[-1.0, 1.0]]], (4, 4))
    """

    parts = 2  # of the projection's output, H entries each

    def __init__(
        self,
        num_features: int,
        cond_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = False,
        use_scale: bool = False,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        kernel_init: Initializer = initializers.zeros,
        scale_offset: float = 1.0,
        rule: str = "reverse",
        rescale: bool = False,
        batch_invariant: bool = False,
        quant: Any = None,
        norm_round_first: bool = False,
        rngs: nnx.Rngs,
    ):
        self._keep({name: value for name, value in locals().items() if name != "kernel_init"})
        self.scale = _parameter(use_scale, scale_init, num_features, param_dtype, rngs, NOTHING)
        self.bias = _parameter(use_bias, bias_init, num_features, param_dtype, rngs, NOTHING)
        self.projection = nnx.Linear(
            cond_features, self.parts * num_features, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init,
            rngs=rngs,
        )  # fmt: skip

    def __call__(self, x: Array, c: Array, *, mask: Array | None = None) -> Array:
        """Normalise x `[B..., S, H]`, and modulate it by c.

        Args:
          x: `[B..., S, H]`.
          c: `[B..., D]`, a condition for each sample, or `[B..., S, D]`, for each token.
          mask: bool, broadcastable to x: the entries that are measured.

        Returns:
          x's shape, in `dtype` or the promoted dtype.
        """
        return _layers_more.ada_layer_norm(self, x, *self._parameters(c), mask)

    def _parameters(self, c: Array) -> tuple[Array, Array | None, Array | None]:
        return self.projection(nnx.silu(c)), _value(self.scale), _value(self.bias)


class AdaLayerNormZero(AdaLayerNorm):
    """adaLN-Zero: AdaLayerNorm with a gate for the branch behind it; the block starts as the identity.

    `y, gate = layer(x, c)`, then `normlib.gate_residual(x, branch(y), gate)`: the projection, which gives shift, scale
    and gate in this order, starts at zero. A block with two branches, which has six chunks in one projection elsewhere,
    has two of these layers here: their kernels are the halves of that projection's. Arguments as AdaLayerNorm's.

    >>> y, gate = AdaLayerNormZero(2, 4, rngs=nnx.Rngs(0))(jnp.array([[[1.0, 3.0]]]), jnp.ones((1, 4)))
    >>> y.round(2).tolist(), gate.tolist()
    ([[[-1.0, 1.0]]], [[[0.0, 0.0]]])
    """

    parts = 3

    def __call__(  # type: ignore[override]
        self, x: Array, c: Array, *, mask: Array | None = None
    ) -> AdaNormZeroOutput:
        """Normalise x `[B..., S, H]`, modulate it by c `[B..., D]` or `[B..., S, D]`: (y, gate `[B..., 1 or S, H]`)."""
        return _layers_more.ada_layer_norm_zero(self, x, *self._parameters(c), mask)


class ConditionalBatchNorm(BatchNorm):
    """Batch norm whose scale and bias belong to the sample: y = norm(x) * (scale_offset + scale[n]) + bias[n].

    With `num_classes` the parameters `scale` and `bias` are tables `[classes, features]` and the condition is a class
    label; with `cond_features` they are the halves of Linear(condition), the attribute `projection`. Both start at
    zero, where the layer is a plain batch norm. Running statistics as BatchNorm's.

    Args:
      num_features, rngs: as BatchNorm's.
      num_classes: rows of the tables.
      cond_features: features of the condition, in place of `num_classes`.
      kernel_init: initialiser of the projection's kernel.
      scale_init, bias_init: initialisers of the tables.
      scale_offset: added to the scale in float32.
      settings: BatchNorm's other arguments (`axis_name`, `virtual_batch_size` and `frozen` among them) but
        `promote_dtype`.

    Raises:
      TypeError: for `promote_dtype`.
      ValueError: if not exactly one of `num_classes` and `cond_features` is given, or settings contradict one another.

    Source: de Vries et al. 2017, "Modulating early visual processing by language".

    >>> layer = ConditionalBatchNorm(1, num_classes=10, rngs=nnx.Rngs(0))
    >>> layer(jnp.array([[-1.0], [1.0]]), jnp.array([3, 7])).round(3).tolist(), layer.scale.shape
    ([[-1.0], [1.0]], (10, 1))
    """

    num_classes: int | None
    use_scale: bool
    use_bias: bool
    param_dtype: Any

    def __init__(
        self,
        num_features: int,
        *,
        num_classes: int | None = None,
        cond_features: int | None = None,
        kernel_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.zeros,
        bias_init: Initializer = initializers.zeros,
        scale_offset: float = 1.0,
        use_scale: bool = True,
        use_bias: bool = True,
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        if (num_classes is None) == (cond_features is None):
            raise ValueError(
                f"give exactly one of `num_classes` and `cond_features`; got {num_classes} and {cond_features}."
            )
        super().__init__(
            num_features, scale_offset=scale_offset, use_scale=False, use_bias=False, rngs=rngs, **plain(settings)
        )
        self._keep({"num_classes": num_classes, "use_scale": use_scale, "use_bias": use_bias})
        if num_classes is not None:
            for name, used, init in (("scale", use_scale, scale_init), ("bias", use_bias, bias_init)):
                shape = (num_classes, num_features)
                setattr(self, name, nnx.Param(init(rngs.params(), shape, self.param_dtype)) if used else None)
        if cond_features is not None:
            self.projection = nnx.Linear(
                cond_features, num_features * (use_scale + use_bias), dtype=self.dtype, param_dtype=self.param_dtype,
                kernel_init=kernel_init, rngs=rngs,
            )  # fmt: skip

    def __call__(  # type: ignore[override]
        self, x: Array, condition: Array, use_running_average: bool | None = None, *, mask: Array | None = None
    ) -> Array:
        """Normalise x by the batch, and give every sample its own scale and bias.

        Args:
          x: `[N, ...]`, any dtype, features along `axis`, which is not 0.
          condition: integer class labels `[N]`, or features `[N, D]`. A label out of range gives NaN.
          use_running_average: normalise by the running statistics; goes before the layer's own setting.
          mask: bool, broadcastable to x: the entries that are measured.

        Returns:
          x's shape, in `dtype` or the promoted dtype of x, scale and bias.

        Raises:
          ValueError: if it is nowhere said which statistics to use, or the settings or condition do not fit x.
          TypeError: for labels that are not integers.
        """
        _layers.instance_features(self, x, "axis")
        if self.num_classes is not None:
            scale, bias = _layers_more.class_rows(_value(self.scale), _value(self.bias), condition, x)
        else:
            _layers_more.check_condition(condition, x.shape[0])
            scale, bias = _layers_more.halves(self.projection(condition), self.use_scale, self.use_bias)
        y, new = _layers.batch_norm(
            self,
            x,
            scale,
            bias,
            mask,
            self._running(),
            use_running_average=self._evaluating(use_running_average),
            per_sample=True,
        )
        self._write(new)
        return y


class DynamicTanh(_Norm):
    """DyT: y = scale * tanh(alpha * x) + bias, in place of a norm and without its reduction.

    alpha is a parameter, one scalar. y has the promoted dtype of x and the parameters or `dtype`, rounded once from
    float32; the backward keeps x alone.

    Args:
      num_features: entries of scale and bias.
      alpha_init: where alpha starts.
      dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, feature_axes, rngs: as LayerNorm's.

    Source: Zhu et al. 2025, "Transformers without Normalization".

    >>> layer = DynamicTanh(2, rngs=nnx.Rngs(0))
    >>> layer(jnp.array([[0.0, 100.0]])).tolist(), float(layer.alpha[...])
    ([[0.0, 1.0]], 0.5)
    """

    def __init__(
        self,
        num_features: int,
        *,
        alpha_init: float = 0.5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        feature_axes: Axes = -1,
        rngs: nnx.Rngs,
    ):
        self._keep(locals())
        self.alpha = nnx.Param(jnp.asarray(alpha_init, param_dtype))
        self.scale = _parameter(use_scale, scale_init, num_features, param_dtype, rngs, NOTHING)
        self.bias = _parameter(use_bias, bias_init, num_features, param_dtype, rngs, NOTHING)

    def __call__(self, x: Array) -> Array:
        """scale * tanh(alpha * x) + bias for x `[...]`, of x's shape."""
        return _layers_more.dynamic_tanh(self, x, self.alpha[...], _value(self.scale), _value(self.bias))


class SwitchableNorm(_Norm):
    """A learned mix of instance, layer and batch statistics, weighed by two softmaxes.

    The parameters `mean_logits` and `var_logits`, `[3]` each, start at zero: equal weights. In evaluation the running
    statistics `mean` and `var`, kept as BatchNorm's, take the place of the batch's. Arguments as BatchNorm's.

    Source: Luo et al. 2019, "Differentiable Learning-to-Normalize via Switchable Normalization".

    >>> layer = SwitchableNorm(3, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 4, 3))).shape, layer.mean_logits[...].tolist()
    ((2, 4, 3), [0.0, 0.0, 0.0])
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        axis_name: str | Sequence[str] | None = None,
        unbiased: bool = False,
        skip_nonfinite_update: bool = False,
        rule: str = "reverse",
        rngs: nnx.Rngs,
    ):
        self._keep(locals())
        self.scale = _parameter(use_scale, scale_init, num_features, param_dtype, rngs, NOTHING)
        self.bias = _parameter(use_bias, bias_init, num_features, param_dtype, rngs, NOTHING)
        self.mean_logits = nnx.Param(jnp.zeros(3, param_dtype))
        self.var_logits = nnx.Param(jnp.zeros(3, param_dtype))
        self.mean = nnx.BatchStat(jnp.zeros(num_features, jnp.float32))
        self.var = nnx.BatchStat(jnp.ones(num_features, jnp.float32))

    def __call__(self, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None) -> Array:
        """Normalise x `[N, ..., C]`, channels along `axis`, measuring where `mask` (bool, broadcastable to x) holds.

        y has x's shape, in `dtype` or the promoted dtype.
        """
        chosen = chosen_statistics(self.use_running_average, use_running_average)
        y, new = _layers_more.switchable_norm(
            self,
            x,
            (self.mean_logits[...], self.var_logits[...]),
            _value(self.scale),
            _value(self.bias),
            _layers.Running(self.mean[...], self.var[...]),
            mask,
            use_running_average=chosen,
        )
        if new is not None:
            _store(self.mean, new.mean)
            _store(self.var, new.var)
        return y

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set `use_running_average` for `nnx.view`, unless it is None."""
        if use_running_average is not None:
            self.use_running_average = use_running_average
