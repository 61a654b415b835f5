"""The normalization family of ops-nn: every operator, our counterpart and how to call it.

The operators' names, attributes and defaults are those of Huawei CANN's ops-nn (the norm folder of its repository);
an expression is Python over the arrays of `examples()`. `tools/ops_nn_coverage.py` makes docs/ops_nn.md of it.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One operator: its ops-nn name, the function that answers for it, a call that runs, what to know."""

    name: str
    function: str | None
    call: str | None
    note: str


def vjp(call: str, *arguments: str, cotangent: str = "dy") -> str:
    """The expression of a gradient operator: the cotangents of `arguments` by JAX."""
    names = ", ".join(arguments)
    return f"jax.vjp(lambda {names}: {call}, {names})[1]({cotangent})"


NCHW = "channels first: `axis=1`"
BN = "normlib.batch_norm(image, weight, offset, axis=1, eps=1e-4)"
STATIC = "normlib.Static(s1, z1)"
STATIC2 = "normlib.Dual(normlib.Static(s1, z1), normlib.Static(s2, z2))"
DYNAMIC2 = "normlib.Dual(normlib.Dynamic(smooth1), normlib.Dynamic(smooth2))"
DIV = "`div_mode=False` is `Static(..., multiply=True)`"
SAVED = "mean and rstd: `moments.mean`, `moments.rstd(eps)`"
RECOMPUTED = "the saved mean and rstd are residuals of the rule, not arguments"

ROWS = [
    Row("AdaLayerNorm", "ada_layer_norm", "normlib.ada_layer_norm(tokens, shift_s, shift_b, gamma, beta, eps=1e-5)", "scale and shift per sample; `1 + scale` as in ops-nn"),
    Row("AdaLayerNormGrad", "ada_layer_norm", vjp("normlib.ada_layer_norm(tokens, shift_s, shift_b, gamma, beta)", "tokens", "shift_s", "shift_b", "gamma", "beta", cotangent="dtokens"), RECOMPUTED),
    Row("AdaLayerNormQuant", "ada_layer_norm", "normlib.ada_layer_norm(tokens, shift_s, shift_b, gamma, beta, quant=normlib.Dynamic(smooth1))", "codes and one scale per row"),
    Row("AdaLayerNormV2", "ada_layer_norm", "normlib.ada_layer_norm(tokens, shift_s, shift_b, gamma, beta, return_moments=True)", SAVED),
    Row("AddLayerNorm", "add_layer_norm", "normlib.add_layer_norm(x1, x2, gamma, beta, sum_bias=bias, eps=1e-5)", "`x` is the field `residual`; " + SAVED),
    Row("AddLayerNormGrad", "add_layer_norm", vjp("normlib.add_layer_norm(x1, x2, gamma, beta)[:2]", "x1", "x2", "gamma", "beta", cotangent="(dy, dsum)"), "`dsum` is the residual output's cotangent"),
    Row("AddLayerNormQuant", "add_layer_norm", f"normlib.add_layer_norm(x1, x2, gamma, beta, sum_bias=bias, quant={DYNAMIC2})", "quant_mode \"static\": " + STATIC2 + "; " + DIV),
    Row("AddLayerNormQuantV2", "add_layer_norm", f"normlib.add_layer_norm(x1, x2, gamma, beta, sum_bias=bias, quant={STATIC2})", "the unquantised `layernorm_res`: a call without `quant`, merged by XLA"),
    Row("AddRmsNorm", "add_rms_norm", "normlib.add_rms_norm(x1, x2, gamma, eps=1e-6)", "rstd: `moments.rstd(eps)`"),
    Row("AddRmsNormCast", "add_rms_norm_cast", "normlib.add_rms_norm_cast(x1, x2, gamma, eps=1e-6)", "y1 is `y_wide`"),
    Row("AddRmsNormDynamicMxQuant", "add_rms_norm", "normlib.add_rms_norm(x1, x2, gamma, beta, quant=normlib.MX(jnp.float4_e2m1fn))", "dst_type by the kind's dtype; `scale_alg=1` for fp8"),
    Row("AddRmsNormDynamicQuant", "add_rms_norm", f"normlib.add_rms_norm(x1, x2, gamma, beta, quant={DYNAMIC2})", "output_mask: leave out what is not used"),
    Row("AddRmsNormDynamicQuantV2", "add_rms_norm", f"normlib.add_rms_norm(x1, x2, gamma, beta, quant={DYNAMIC2})", "y3, y4 (the unquantised y, wide and narrow): `add_rms_norm_cast`"),
    Row("AddRmsNormQuant", "add_rms_norm", f"normlib.add_rms_norm(x1, x2, gamma, beta, quant={STATIC2})", DIV),
    Row("AddRmsNormQuantV2", "add_rms_norm", f"normlib.add_rms_norm(x1, x2, gamma, sum_bias=bias, quant={STATIC2})", "resOut: a call without `quant`"),
    Row("BN3DTrainingReduce", "Moments", "normlib.Moments.of(video, (0, 1, 2, 3)).sums_about(0.0)", "Σx and Σx²; moments about the mean are what to keep"),
    Row("BNInferGrad", "batch_norm_inference", vjp("normlib.batch_norm_inference(image, mean, variance, weight, offset, axis=1, eps=1e-4)", "image", cotangent="dimage"), "dx = dy·scale·rstd"),
    Row("BNTrainingReduce", "Moments", "normlib.Moments.of(image, (0, 2, 3)).sums_about(0.0)", "Σx and Σx²"),
    Row("BNTrainingUpdateV2", "affine", "normlib.affine(image, channel(moments.mean), channel(moments.rstd(1e-4)), channel(weight), channel(offset), low=channel(moments.low))", "the second half: y from given moments"),
    Row("BNTrainingUpdateV3", "affine", "normlib.affine(image, channel(moments.mean), channel(moments.rstd(1e-4)), channel(weight), channel(offset), low=channel(moments.low))", "the reserves are the moments themselves"),
    Row("BatchNorm", "batch_norm", BN, "default ε 1e-5 here, 1e-4 there; is_training=False: `batch_norm_inference`; exponential_avg_factor: `update_running(momentum=1 - factor)`; an Add and a Relu node behind it, which ops-nn has apart: `batch_norm_act`"),
    Row("BatchNormGrad", "batch_norm", vjp(BN + ".y", "image", "weight", "offset", cotangent="dimage"), RECOMPUTED),
    Row("BatchNormGradV3", "batch_norm", vjp(BN + ".y", "image", "weight", "offset", cotangent="dimage"), "is_training=False: the vjp of `batch_norm_inference`"),
    Row("BatchNormV3", "batch_norm", "normlib.update_running(mean, variance, normlib.batch_norm(image, weight, offset, axis=1).moments, momentum=1 - 0.1, unbiased=True)", "running statistics are a value, not a side effect; ops-nn stores the unbiased variance"),
    Row("DeepNorm", "deep_norm", "normlib.deep_norm(x1, x2, gamma, beta, alpha=0.3, eps=1e-6)", "x·alpha + gx"),
    Row("DeepNormGrad", "deep_norm", vjp("normlib.deep_norm(x1, x2, gamma, beta)", "x1", "x2", "gamma", "beta"), RECOMPUTED),
    Row("DuaQuantizeAddLayerNorm", "add_layer_norm", f"normlib.add_layer_norm(x1, x2, gamma, beta, sum_bias=bias, quant={STATIC2})", "two static outputs"),
    Row("EuclideanNorm", "euclidean_norm", "normlib.euclidean_norm(x, axis=(0, 1), keepdims=False)", "integer input allowed"),
    Row("FusedAddRmsNorm", "add_rms_norm", "normlib.add_rms_norm(x1, x2, gamma, eps=1e-6)", "`scale` other than 1: multiply `gamma`"),
    Row("GemmaRmsNorm", "rms_norm", "normlib.rms_norm(x, gamma, scale_offset=1.0, eps=1e-6)", "1 + scale in float32"),
    Row("GroupNorm", "group_norm", "normlib.group_norm(image, weight, offset, num_groups=3, axis=1, eps=1e-4)", NCHW),
    Row("GroupNormGrad", "group_norm", vjp("normlib.group_norm(image, weight, offset, num_groups=3, axis=1)", "image", "weight", "offset", cotangent="dimage"), RECOMPUTED),
    Row("GroupNormSilu", "group_norm_silu", "normlib.group_norm_silu(image, weight, offset, num_groups=3, axis=1, eps=1e-5)", "activate_silu=False: `group_norm`"),
    Row("GroupNormSiluQuant", "group_norm_silu", "normlib.group_norm_silu(image, weight, offset, num_groups=3, axis=1, quant=normlib.Static(s1))", "a scale per tensor or per channel"),
    Row("GroupNormSwish", "group_norm_silu", "normlib.group_norm_silu(image, weight, offset, num_groups=3, axis=1, beta=1.0)", "swish_scale is `beta`"),
    Row("GroupNormSwishGrad", "group_norm_silu", vjp("normlib.group_norm_silu(image, weight, offset, num_groups=3, axis=1)", "image", "weight", "offset", cotangent="dimage"), RECOMPUTED),
    Row("GroupNormV2", "group_norm", "normlib.group_norm(image, weight, offset, num_groups=3, axis=1, eps=1e-5)", "is_training=False makes no difference to a group norm"),
    Row("INInferV2", "affine", "normlib.affine(image, channel(mean), channel(variance + 1e-5) ** -0.5, channel(weight), channel(offset))", "instance norm with given statistics"),
    Row("INTrainingReduceV2", "Moments", "normlib.Moments.of(image, (2, 3)).sums_about(0.0)", "Σx and Σx² per sample and channel"),
    Row("INTrainingUpdateGrad", "instance_norm", vjp("normlib.instance_norm(image, weight, offset, axis=1)", "weight", "offset", cotangent="dimage"), "dscale and dbias"),
    Row("InplaceAddLayerNorm", "add_layer_norm", "jax.jit(normlib.add_layer_norm, donate_argnums=(0, 1))(x1 + 0, x2 + 0, gamma, beta)", "in place by donation: XLA reuses the buffers"),
    Row("InplaceAddRmsNorm", "add_rms_norm", "jax.jit(normlib.add_rms_norm, donate_argnums=(0, 1))(x1 + 0, x2 + 0, gamma)", "in place by donation"),
    Row("InstanceNorm", "instance_norm", "normlib.instance_norm(video, gamma, beta, eps=1e-6)", "NDHWC as it is; `axis=1` for NCDHW"),
    Row("InstanceNormGrad", "instance_norm", vjp("normlib.instance_norm(video, gamma, beta)", "video", "gamma", "beta", cotangent="dvideo"), RECOMPUTED),
    Row("L2NormalizeGrad", "l2_normalize", vjp("normlib.l2_normalize(x, axis=1, eps=1e-4)", "x"), ""),
    Row("LayerNorm", "layer_norm", "normlib.layer_norm(x, gamma, beta, axis=-1, eps=1e-7, return_moments=True)", "begin_norm_axis b: `axis=tuple(range(b, x.ndim))`; begin_params_axis by the parameter's shape"),
    Row("LayerNormGrad", "layer_norm", vjp("normlib.layer_norm(x, gamma, beta)", "x", "gamma", "beta"), RECOMPUTED),
    Row("LayerNormGradV3", "layer_norm", vjp("normlib.layer_norm(x, gamma, beta)", "x", "gamma", "beta"), "output_mask: leave out what is not used"),
    Row("LayerNormQuant", "layer_norm", f"normlib.layer_norm(x, gamma, beta, quant={STATIC})", "quant_mode 1: `Dynamic()`"),
    Row("LayerNormV3", "layer_norm", "normlib.layer_norm(x, gamma, beta, eps=1e-5, return_moments=True)", SAVED),
    Row("LayerNormV4", "layer_norm", "normlib.layer_norm(x, gamma, beta, axis=(-1,), eps=1e-5, return_moments=True)", "normalized_shape of k axes: `axis=tuple(range(-k, 0))`"),
    Row("LpNormUpdate", "lp_norm", "normlib.lp_norm(x, p=2, eps=1e-12)", "the second half, Σ^(1/p), of `lp_norm`"),
    Row("LpNormUpdateV2", "lp_norm", "normlib.lp_norm(x, p=2.0, eps=1e-12)", "the second half, Σ^(1/p), of `lp_norm`"),
    Row("LpNormV2", "lp_norm", "normlib.lp_norm(x, p=2.0, axis=(0, 1), keepdims=False, eps=1e-12)", "p = ±inf and 0 too"),
    Row("MVNV2", "mean_variance_norm", "normlib.mean_variance_norm(image, axis=(0, 2, 3), eps=1e-9)", "ε outside the root"),
    Row("MaskedSoftmaxWithRelPosBias", None, None, "a softmax of attention: not a norm; `jax.nn.softmax(x * scale + bias, where=mask)`"),
    Row("Modulate", "modulate", "normlib.modulate(tokens, shift_s, shift_b)", "x·(1 + scale) + shift"),
    Row("ModulateGrad", "modulate", vjp("normlib.modulate(tokens, shift_s, shift_b)", "tokens", "shift_s", "shift_b", cotangent="dtokens"), ""),
    Row("MultiAddRmsNormDynamicQuant", "multi_add_rms_norm", f"normlib.multi_add_rms_norm([x1, x2], x, gamma, quant={DYNAMIC2})", "1 to 5 arrays x1; the unquantised y: a call without `quant`"),
    Row("QuantizeAddLayerNorm", "add_layer_norm", f"normlib.add_layer_norm(x1, x2, gamma, beta, sum_bias=bias, quant={STATIC})", "one static output"),
    Row("QuantizedBatchNorm", "batch_norm_inference", "normlib.batch_norm_inference(normlib.dequantize(codes), mean, variance, weight, offset, axis=1, eps=1e-5, quant=normlib.Static(0.05, 3))", "x dequantised, y quantised"),
    Row("Renorm", "renorm", "normlib.renorm(x, p=2.0, axis=0, maxnorm=1.0)", "dim is `axis`"),
    Row("RmsNorm", "rms_norm", "normlib.rms_norm(x, gamma, eps=1e-6, return_moments=True)", "rstd: `moments.rstd(eps)`"),
    Row("RmsNormDynamicMxQuant", "rms_norm", "normlib.rms_norm(x, gamma, beta, quant=normlib.MX(jnp.float4_e2m1fn))", "dst_type by the kind's dtype; `scale_alg=1` for fp8"),
    Row("RmsNormDynamicQuant", "rms_norm", "normlib.rms_norm(x, gamma, beta, quant=normlib.Dynamic(smooth1))", "one scale per row"),
    Row("RmsNormGrad", "rms_norm", vjp("normlib.rms_norm(x, gamma)", "x", "gamma"), RECOMPUTED),
    Row("RmsNormGradQuant", "rms_norm_backward", "normlib.rms_norm_backward(dy, x, normlib.rms_norm(x, return_moments=True).moments.rstd(1e-6), gamma, quant=normlib.Static(s1))", "dx quantised; " + DIV),
    Row("RmsNormQuant", "rms_norm", f"normlib.rms_norm(x, gamma, beta, quant={STATIC})", "gemma_mode: `scale_offset=1.0`"),
    Row("RmsNormQuantV2", "rms_norm", f"normlib.rms_norm(x, gamma, beta, quant={STATIC2})", DIV),
    Row("RmsNormQuantV3", "rms_norm", f"normlib.rms_norm(x, gamma, beta, quant={STATIC2}, return_moments=True)", "rstd: `moments.rstd(eps)`"),
    Row("SyncBNTrainingUpdate", "update_running", "normlib.update_running(mean, variance, moments, momentum=1 - 0.1)", "running = old + 0.1·(batch − old)"),
    Row("SyncBatchNormBackwardElemt", "batch_norm", "data_parallel(lambda t, d: jax.vjp(lambda t: normlib.batch_norm(t, weight, offset, axis=1, axis_name=\"data\").y, t)[1](d)[0], image, dimage)", "reduce and element-wise step are one rule"),
    Row("SyncBatchNormBackwardReduce", "batch_norm", "data_parallel(lambda t, d: jax.vjp(lambda t: normlib.batch_norm(t, weight, offset, axis=1, axis_name=\"data\").y, t)[1](d)[0], image, dimage)", "the two sums of the same rule; one collective"),
    Row("SyncBatchNormGatherStats", "Moments", "jax.tree.map(lambda a, b: jnp.stack([a, b]), moments, moments).merge_axis(0)", "a table of moments merged by count; then `update_running`"),
    Row("SyncBatchNormGatherStatsFused", "Moments", "normlib.update_running(mean, variance, jax.tree.map(lambda a, b: jnp.stack([a, b]), moments, moments).merge_axis(0), momentum=1 - 0.01)", "merge and running update"),
]  # fmt: skip
