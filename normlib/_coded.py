"""Norms with quantised outputs, in one kernel where the backend has one for them."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from normlib import passes
from normlib._forward import effective, wide_or_none
from normlib.kernels.codes import Coder
from normlib.moments import Moments
from normlib.precision import output_dtype, wide_dtype
from normlib.quantize import Dual, DualQuantized, Dynamic, Quantized, Static
from normlib.quantize._apply import _encoded, _fitted
from normlib.quantize._formats import to_integers
from normlib.scope import Scope

FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2")


def coded(
    terms: list[Array], scale: Array | None, bias: Array | None, quant: Any, *, axes: tuple[int, ...], eps,
    centered: bool, where: Array | None, scale_offset: float, scope: Scope, backend, rescale: bool,
    norm_round_first: bool, weights: tuple[float, ...] | None = None, residual_dtype: Any = None,
    round_first: bool = False,
) -> tuple[Quantized | DualQuantized, Array | None, Moments] | None:  # fmt: skip
    """(codes with scales, the sum or None, moments) of a row norm of a sum; None where one kernel does not do it.

    Arguments as `normlib._composed.composed`; the codes are those of `normlib.quantize.finish`.
    """
    kinds = (quant.first, quant.second) if isinstance(quant, Dual) else (quant,)
    run = passes.current_backend() if backend is None else passes.checked(backend)
    plain = where is None and not rescale and not norm_round_first and scope.is_local and scope.channels is None
    whole = getattr(run, "coded", None)
    if whole is None or not plain or not isinstance(eps, int | float):
        return None
    bare = run.machine.name == "gpu"  # Triton has no instruction that rounds
    if not all(_is_plain(kind, bare) for kind in kinds):
        return None
    terms = [t.astype(output_dtype(t.dtype)) for t in terms]
    if any(wide_dtype(t.dtype) != jnp.float32 for t in terms):
        return None
    coders, steps = zip(*(_coder(kind, terms[0], axes, bare) for kind in kinds))
    found = whole(
        terms, effective(scale, scale_offset), wide_or_none(bias), coders, axes=axes, eps=float(eps),
        centered=centered, weights=weights, residual_dtype=residual_dtype, round_first=round_first,
    )  # fmt: skip
    if found is None:
        return None
    scales = list(found.scales)
    out = [
        Quantized(codes, scales.pop(0) if step is None else step, coder.zero_point)
        for codes, step, coder in zip(found.codes, steps, coders)
    ]
    y = DualQuantized(*out[0], *out[1]) if isinstance(quant, Dual) else out[0]
    return y, found.residual, found.moments


def _is_plain(kind: Any, bare: bool) -> bool:
    if not isinstance(kind, Static | Dynamic) or kind.key is not None or kind.format.name not in FORMATS:
        return False
    if bare and kind.rounding not in ("rint", "floor", "ceil"):
        return False
    return isinstance(kind, Static) or kind.group is None


def _coder(kind: Static | Dynamic, x: Array, axes: tuple[int, ...], bare: bool):
    """(coder, its step where that is known); see `normlib.quantize._apply`."""
    form = kind.format
    if isinstance(kind, Dynamic):
        smooth = None if kind.smooth is None else _fitted(kind.smooth, "smooth", x, axes, jnp.float32)
        encode = functools.partial(_encode, kind, bare, -form.largest)
        return Coder(form.dtype, encode, smooth, None, form.largest, kind.floor), None
    scale = _fitted(kind.scale, "scale", x, axes, jnp.float32)
    inverse = 1 / scale
    factor, step = (scale, inverse) if kind.multiply else (inverse, scale)
    zero_point = None if kind.zero_point is None else _fitted(kind.zero_point, "zero_point", x, axes, jnp.int32)
    return Coder(form.dtype, functools.partial(_encode, kind, bare, kind.smallest_code), factor, zero_point), step


def _encode(kind: Static | Dynamic, bare: bool, lowest: float, v: Array, zero_point: Array | None) -> Array:
    if bare and kind.format.is_integer and kind.rounding == "rint":
        return to_integers(_half_even(v), kind.format, zero_point, lowest, "floor", None)
    return _encoded(kind, v, zero_point, lowest, in_kernel=True)


def _half_even(v: Array) -> Array:
    """jnp.rint without that instruction, float32 of any shape.

    v is a product, and nothing is added to it: contracted to one operation, that would see the unrounded product.
    """
    below = jnp.floor(v)
    middle = below + 0.5
    odd = below - 2 * jnp.floor(below * 0.5) == 1
    return below + jnp.where((v > middle) | ((v == middle) & odd), 1.0, 0.0)
