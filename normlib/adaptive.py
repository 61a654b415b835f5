"""Layer norms of tokens whose scale and shift come from a condition, per sample or per token.

Scales are deviations from 1 where `scale_offset` is 1 (the usual form); 1 + scale is formed in float32. Affine and
modulation are folded into one scale and one shift before the norm, which then rounds once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num

from normlib import _arguments as check
from normlib import quantize
from normlib._modulation import combined, factor
from normlib._row import RowNormOutput
from normlib.engine import normalize
from normlib.precision import output_dtype, wide
from normlib.quantize import DualQuantized, Quantized


class AdaNormZeroOutput(NamedTuple):
    """What `ada_layer_norm_zero` returns.

    Attributes:
      y: the modulated norm, the input of the branch, in x's shape and dtype.
      gate: `[B..., 1, H]` or `[B..., S, H]`, for `gate_residual(x, branch(y), gate)`.
    """

    y: Array
    gate: Array


def ada_layer_norm(
    x: Num[Array, "*b s h"],
    mod_scale: Float[Array, ...] | None = None,
    mod_shift: Float[Array, ...] | None = None,
    scale: Float[Array, " h"] | None = None,
    bias: Float[Array, " h"] | None = None,
    *,
    scale_offset: float = 1.0,
    eps: float = 1e-5,
    where: Bool[Array, ...] | None = None,
    rule: str = "reverse",
    rescale: bool = False,
    batch_invariant: bool = False,
    return_moments: bool = False,
    backend: str | None = None,
    quant=None,
    norm_round_first: bool = False,
    out_dtype: DTypeLike | None = None,
) -> Array | Quantized | DualQuantized | RowNormOutput:
    """Layer normalization modulated by a condition.

        y = (layer_norm(x) * scale + bias) * (scale_offset + mod_scale) + mod_shift

    Args:
      x: `[B..., S, H]`, normalised over H; computed in float32 (float64 for float64 x).
      mod_scale: `[B..., H]` (one per sample), `[B..., 1, H]` or `[B..., S, H]` (one per token), or None for zeros.
      mod_shift: likewise.
      scale: `[H]` of the norm itself, or None for ones.
      bias: `[H]`, or None for zeros.
      scale_offset: 1 as ops-nn and DiT, or 0 where `mod_scale` is the whole factor.
      eps: added to the variance inside the root, in units of x squared; with 0 a set of equal entries is NaN.
      where: bool, broadcastable to x: which entries are measured.
      rule, rescale, batch_invariant, backend: as `normlib.layer_norm`.
      return_moments: return `RowNormOutput(y, moments)` instead of y.
      quant: quantise y: one of the kinds that `normlib.layer_norm` takes.
      norm_round_first: round y to x's dtype before quantising; False quantises the float32 value.
      out_dtype: dtype of y, rounded once from float32; that of x where None.

    Returns:
      y in x's shape and dtype, rounded once, or codes with their scale with `quant`.

    Raises:
      ValueError: for shapes that do not fit, or eps < 0.

    Source: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers"; ops-nn's AdaLayerNorm and V2.

    >>> x = jnp.array([[[1.0, 3.0]], [[1.0, 3.0]]])
    >>> ada_layer_norm(x, jnp.array([[0.0, 0.0], [1.0, 1.0]])).round(2).tolist()
    [[[-1.0, 1.0]], [[-2.0, 2.0]]]
    """
    x = check.array(x)
    mod_scale, mod_shift = (_token(m, n, x) for m, n in ((mod_scale, "mod_scale"), (mod_shift, "mod_shift")))
    last = (x.ndim - 1,)
    scale, bias = (check.parameter(p, n, x, last) for p, n in ((scale, "scale"), (bias, "bias")))
    scale, bias, offset = combined(scale, bias, mod_scale, mod_shift, scale_offset, x)
    where = check.mask(where, x)
    dtype = check.result_dtype(out_dtype, x.dtype)
    out = normalize(
        x, scale, bias, axes=last, eps=check.epsilon(eps), where=where, scale_offset=offset, rule=rule,
        rescale=rescale, batch_invariant=batch_invariant, backend=backend, out_dtype=quantize.out_dtype(quant, dtype),
    )  # fmt: skip
    y = quantize.finish(out.y, quant, dtype, axes=last, where=where, norm_round_first=norm_round_first)
    return RowNormOutput(y, jax.tree.map(lambda t: jnp.squeeze(t, last), out.moments)) if return_moments else y


def ada_layer_norm_zero(
    x: Num[Array, "*b s h"], modulation: Float[Array, "*b three_h"], *, eps: float = 1e-5, rule: str = "reverse",
    backend: str | None = None,
) -> AdaNormZeroOutput:  # fmt: skip
    """Layer normalization before a branch, modulated, with the gate behind the branch (adaLN-Zero).

        shift, scale, gate = split(modulation);   y = layer_norm(x) * (1 + scale) + shift;   x + gate * branch(y)

    Args:
      x: `[B..., S, H]`.
      modulation: `[B..., 3 H]`, `[B..., 1, 3 H]` or `[B..., S, 3 H]`: shift, scale and gate side by side, the output
        of a projection that starts at zero, so that every block starts as the identity.
      eps: added to the variance inside the root, in units of x squared; with 0 a set of equal entries is NaN.
      rule, backend: as `normlib.layer_norm`.

    Returns:
      `AdaNormZeroOutput(y, gate)`.

    Raises:
      ValueError: for shapes that do not fit, or eps < 0.

    Source: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", section 3.2.

    >>> out = ada_layer_norm_zero(jnp.array([[[1.0, 3.0]]]), jnp.zeros((1, 6)))
    >>> out.y.round(2).tolist(), out.gate.tolist()
    ([[[-1.0, 1.0]]], [[[0.0, 0.0]]])
    """
    x, modulation = check.array(x), check.array(modulation, "modulation")
    if modulation.ndim == 0 or x.ndim == 0 or modulation.shape[-1] != 3 * x.shape[-1]:
        raise ValueError(
            f"`modulation` must have 3 H entries along its last axis, for x of shape {x.shape}: shift, scale and gate; "
            f"got {modulation.shape}."
        )
    shift, scale, gate = jnp.split(modulation, 3, axis=-1)
    y = ada_layer_norm(x, scale, shift, eps=eps, rule=rule, backend=backend)
    return AdaNormZeroOutput(y, _token(gate, "modulation", x))  # type: ignore[arg-type]


def gate_residual(
    x: Num[Array, "*b s h"], branch: Num[Array, "*b s h"], gate: Float[Array, ...]
) -> Array:  # fmt: skip
    """x + gate * branch, rounded once; exactly x where the gate is zero.

    Args:
      x: `[B..., S, H]`, the residual stream; computed in float32 (float64 for float64 x).
      branch: of x's shape.
      gate: `[B..., H]`, `[B..., 1, H]` or `[B..., S, H]`.

    Returns:
      `[B..., S, H]` in x's dtype. The backward keeps branch and gate as they are.

    Raises:
      ValueError: for shapes that do not fit.

    Source: Peebles and Xie 2023, section 3.2.

    >>> gate_residual(jnp.ones((1, 1, 2)), jnp.ones((1, 1, 2)), jnp.array([[0.0, 2.0]])).tolist()
    [[[1.0, 3.0]]]
    """
    x = check.array(x)
    branch, raised = check.same_shape(branch, "branch", x, "x"), _token(gate, "gate", x)
    dtype = output_dtype(x.dtype)
    # checkpoint: what is kept are the operands, not their widened copies
    return jax.checkpoint(lambda x, b, g: (wide(x) + wide(g) * wide(b)).astype(dtype))(x, branch, raised)


def modulate(
    x: Num[Array, "*b s h"],
    scale: Float[Array, ...] | None = None,
    shift: Float[Array, ...] | None = None,
    *,
    scale_offset: float = 1.0,
) -> Array:
    """x * (scale_offset + scale) + shift, rounded once.

    Args:
      x: `[B..., S, H]`; computed in float32 (float64 for float64 x).
      scale: `[B..., H]`, `[B..., 1, H]` or `[B..., S, H]`, or None for zeros.
      shift: likewise.
      scale_offset: added to `scale` in float32.

    Returns:
      `[B..., S, H]` in x's dtype (float32 for integers). The backward keeps x and scale as they are.

    Raises:
      ValueError: for shapes that do not fit.

    Source: Peebles and Xie 2023; ops-nn's Modulate.

    >>> modulate(jnp.ones((1, 2, 2)), jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.0]])).tolist()
    [[[1.5, 2.0], [1.5, 2.0]]]
    """
    x = check.array(x)
    dtype = output_dtype(x.dtype)
    scale, shift = (_token(m, n, x) for m, n in ((scale, "scale"), (shift, "shift")))

    def run(x, scale, shift):
        by = factor(scale, scale_offset, x)
        y = wide(x) if by is None else wide(x) * by
        return (y if shift is None else y + wide(shift)).astype(dtype)

    return jax.checkpoint(run)(x, scale, shift)


def _token(m, name: str, x: Array) -> Array | None:
    """A modulation [B..., H], [B..., 1, H] or [B..., S, H] in x's rank."""
    if m is None:
        return None
    m = check.array(m, name)
    raised = m.reshape(*m.shape[:-1], 1, m.shape[-1]) if 0 < m.ndim == x.ndim - 1 else m
    fits = raised.ndim == x.ndim > 0 and all(
        a == b or (a == 1 and i == x.ndim - 2) for i, (a, b) in enumerate(zip(raised.shape, x.shape))
    )
    if not fits:
        per_sample, one = (*x.shape[:-2], *x.shape[-1:]), (*x.shape[:-2], 1, *x.shape[-1:])
        raise ValueError(f"`{name}` must have shape {per_sample}, {one} or x's, {x.shape}; got {m.shape}.")
    return raised
