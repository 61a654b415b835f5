"""Row kernels that the claims compare: alone and fused, made from the same pieces and tiled by the same rule.

Each takes `[N, D]` arrays (and `[D]` parameters), computes in float32 and rounds once. These stand in for
`normlib.kernels`: a kernel there takes the place of one here by one import in `fusion.py` or `work.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sim_npu import TilePlan

_UB = 150 * 1024  # bytes that a default plan fills


def _wide(ref: Any) -> jax.Array:
    return ref[...].astype(jnp.float32)


def _rms(v: jax.Array, d: int, eps: float = 1e-6) -> jax.Array:
    return v * (1.0 / jnp.sqrt(jnp.sum(v * v, axis=-1, keepdims=True) * (1.0 / d) + eps))


def _layer(v: jax.Array, d: int, eps: float = 1e-5) -> jax.Array:
    centred = v - jnp.sum(v, axis=-1, keepdims=True) * (1.0 / d)
    return _rms(centred, d, eps)


def _codes(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Dynamic int8: codes and the scale of each row."""
    scale = jnp.maximum(jnp.max(jnp.abs(v), axis=-1, keepdims=True) * (1 / 127), 1e-12)
    return jnp.clip(jnp.round(v * (1.0 / scale)), -127, 127).astype(jnp.int8), scale


def _call(
    name: str,
    body: Callable[..., Sequence[jax.Array]],
    arrays: Sequence[jax.Array],
    parameters: Sequence[jax.Array],
    outs: Sequence[tuple[int, Any]],
    plan: TilePlan | None,
    interpret: bool,
) -> list[jax.Array]:
    """One pass over blocks of rows: `body` maps the arrays' float32 tiles and the parameters' to the outputs' tiles."""
    n, d = arrays[0].shape
    moving = sum(a.dtype.itemsize for a in arrays) + sum(
        jnp.dtype(dtype).itemsize for width, dtype in outs if width > 1
    )
    fit = _UB // (d * (2 * moving + 12))  # two buffers each, three float32 temporaries
    rows = min(n, (plan.rows if plan and plan.rows else max(1, min(fit, pl.cdiv(n, 48)))))

    def kernel(*refs):
        inputs, outputs = refs[: -len(outs)], refs[-len(outs) :]
        for ref, value in zip(outputs, body(*map(_wide, inputs))):
            ref[...] = value.astype(ref.dtype)

    return pl.pallas_call(
        kernel,
        name=name,
        grid=(pl.cdiv(n, rows),),
        in_specs=[pl.BlockSpec((rows, d), lambda i: (i, 0)) for _ in arrays]
        + [pl.BlockSpec((1, d), lambda i: (0, 0)) for _ in parameters],
        out_specs=[pl.BlockSpec((rows, width), lambda i: (i, 0)) for width, _ in outs],
        out_shape=[jax.ShapeDtypeStruct((n, width), dtype) for width, dtype in outs],
        interpret=interpret,
    )(*arrays, *(p.reshape(1, d) for p in parameters))


def add(x, r, *, plan: TilePlan | None = None, interpret: bool = False):
    """s = x + r."""
    return _call("add", lambda x, r: [x + r], (x, r), (), [(x.shape[1], x.dtype)], plan, interpret)[0]


def rms_norm(x, scale, *, plan: TilePlan | None = None, interpret: bool = False):
    """y = x / sqrt(mean(x²) + eps) · scale."""
    d = x.shape[1]
    return _call("rms_norm", lambda v, g: [_rms(v, d) * g], (x,), (scale,), [(d, x.dtype)], plan, interpret)[0]


def layer_norm(x, scale, bias, *, plan: TilePlan | None = None, interpret: bool = False):
    """y = (x − mean) / sqrt(var + eps) · scale + bias."""
    d = x.shape[1]

    def body(v, g, b):
        return [_layer(v, d) * g + b]

    return _call("layer_norm", body, (x,), (scale, bias), [(d, x.dtype)], plan, interpret)[0]


def quantise(x, *, plan: TilePlan | None = None, interpret: bool = False):
    """int8 codes `[N, D]` and float32 scales `[N, 1]`, one per row."""
    outs = [(x.shape[1], jnp.int8), (1, jnp.float32)]
    return tuple(_call("quantise", _codes, (x,), (), outs, plan, interpret))


def add_rms_norm(x, r, scale, *, plan: TilePlan | None = None, interpret: bool = False):
    """s = x + r and y = rms_norm(s); returns y, s."""
    d = x.shape[1]

    def body(x, r, g):
        return [_rms(x + r, d) * g, x + r]

    return tuple(_call("add_rms_norm", body, (x, r), (scale,), [(d, x.dtype)] * 2, plan, interpret))


def add_layer_norm(x, r, scale, bias, *, plan: TilePlan | None = None, interpret: bool = False):
    """s = x + r and y = layer_norm(s); returns y, s."""
    d = x.shape[1]

    def body(x, r, g, b):
        return [_layer(x + r, d) * g + b, x + r]

    return tuple(_call("add_layer_norm", body, (x, r), (scale, bias), [(d, x.dtype)] * 2, plan, interpret))


def add_rms_norm_quant(x, r, scale, *, plan: TilePlan | None = None, interpret: bool = False):
    """s = x + r, its norm quantised; returns codes, scales, s."""
    d = x.shape[1]

    def body(x, r, g):
        return [*_codes(_rms(x + r, d) * g), x + r]

    outs = [(d, jnp.int8), (1, jnp.float32), (d, x.dtype)]
    return tuple(_call("add_rms_norm_quant", body, (x, r), (scale,), outs, plan, interpret))


def _plan_space(x: Any, *rest: Any) -> Iterator[TilePlan]:
    """Rows per block, powers of two."""
    yield from (TilePlan(rows=r) for r in (1, 2, 4, 8, 16, 32, 64, 128) if r <= x.shape[0])


for _fn in (add, rms_norm, layer_norm, quantise, add_rms_norm, add_layer_norm, add_rms_norm_quant):
    setattr(_fn, "plan_space", _plan_space)  # noqa: B010 - what `sim_npu.rank_plans` reads
