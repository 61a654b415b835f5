"""A row norm and its quantisation in one kernel: y is never written, only its codes and scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from normlib.kernels.codes import Coder
from normlib.kernels.rows import row_norm
from normlib.kernels.tile import weighted
from normlib.kernels.view import rows_of
from normlib.moments import Moments, count_entries
from normlib.passes import xla
from normlib.passes.placement import Split
from normlib.precision import rounded, wide


class Coded(NamedTuple):
    """What `coded` gives: codes per coder, the scales of those that look for one, the sum or None, and moments."""

    codes: list[Array]
    scales: list[Array]
    residual: Array | None
    moments: Moments


def coded(
    run, terms: Sequence[Array], scale, bias, coders: Sequence[Coder], *, axes, eps: float, centered, weights=None,
    residual_dtype=None, round_first=False,
) -> Coded | None:  # fmt: skip
    """See `normlib.kernels.rows.row_norm`; None where one kernel does not do it. Codes carry no gradient, moments and
    the sum do."""
    x = terms[0]
    weights = tuple(weights or (1.0,) * len(terms))
    given = [t for t in (*terms, scale, bias) if t is not None]
    if not axes or not all(run.computes(t) for t in given):
        return None
    extra = [t for c in coders for t in c.arrays]
    view = rows_of(x.shape, axes, [t.shape for t in (*given, *extra)])
    if view is None:
        return None
    number, searching = len(terms), sum(c.by_row for c in coders)

    def kernel(*arrays):
        left = list(arrays[number + 2 :])
        here = rows_of(arrays[0].shape, axes, [t.shape for t in arrays if t is not None])
        assert here is not None  # the whole has been seen so
        filled = [
            replace(c, **{k: left.pop(0) for k in ("factor", "zero_point") if getattr(c, k) is not None})
            for c in coders
        ]  # fmt: skip
        out = row_norm(
            arrays[:number], *arrays[number : number + 2], view=here, eps=eps, machine=run.machine, centered=centered,
            weights=weights, residual_dtype=residual_dtype, round_first=round_first, coders=filled,
            name=("add_" if number > 1 else "") + ("layer_norm" if centered else "rms_norm") + "_quant",
        )  # fmt: skip
        columns = [*out.scales, out.m2, *((out.mean, out.low) if centered else ())]
        full = [*out.codes, *([] if out.residual is None else [out.residual])]
        return [here.back(t) for t in (*full, *columns)]

    def formula(*arrays):
        s = weighted([wide(t) for t in arrays[:number]], weights)
        s = rounded(s, residual_dtype) if round_first else s
        if centered:
            own = xla.moments(s, axes=axes, where=None)[1:]
        else:
            own = (None, None, xla.sums(s, None, axes=axes, where=None)[1])
        full = [jnp.zeros(s.shape, c.dtype) for c in coders]
        full += [] if residual_dtype is None else [s.astype(residual_dtype)]
        none = [jnp.zeros_like(jax.lax.stop_gradient(own[2])) for _ in range(searching)]
        return [*full, *none, own[2], *(own[:2] if centered else ())]

    operands = [*terms, scale, bias, *extra]
    found = list(run.call(kernel, formula, operands, statistics=(), split=Split(whole=tuple(axes))))
    codes = [found.pop(0) for _ in coders]
    residual = found.pop(0) if residual_dtype is not None else None
    scales = [found.pop(0) for _ in range(searching)]
    m2, *centre = found
    count = jnp.broadcast_to(count_entries(x.shape, axes, None), m2.shape)
    mean, low = centre or (jnp.zeros_like(m2), jnp.zeros_like(m2))
    return Coded(codes, scales, residual, Moments(count, mean, low, m2))
