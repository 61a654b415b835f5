"""Claims about the arithmetic that a norm needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import normlib
from benchmarks.claims.fusion import best
from benchmarks.claims.registry import Figure, Outcome, claim, less
from normlib.kernels import layer_norm, rms_norm

ROWS, D = 4096, 4096


def flops(fn: Callable, *args: Any) -> float:
    """Floating-point operations of the compiled `fn(*args)`, by XLA's count."""
    counted: Any = jax.jit(fn).lower(*args).compile().cost_analysis()
    return float(counted["flops"])


@claim("rms-vs-layer", "RMS norm needs about 30 % less work than layer norm", basis="model", seconds=1)
def rms_vs_layer() -> Outcome:
    x, vector = ((ROWS, D), "bfloat16"), ((D,), "float32")
    layer, rms = best(layer_norm, x, vector, vector).kernels[0], best(rms_norm, x, vector).kernels[0]
    array, one = jax.ShapeDtypeStruct((256, D), jnp.float32), jax.ShapeDtypeStruct((D,), jnp.float32)
    counted = flops(normlib.layer_norm, array, one, one), flops(normlib.rms_norm, array, one)
    return Outcome(
        f"normlib's kernels over {ROWS} × {D} bfloat16 at their fastest plans: busy time of the vector unit, and the "
        "time of the kernel; beside it XLA's count of floating-point operations of normlib's functions, float32.",
        (
            Figure("less vector time", less(layer.busy_us["V"], rms.busy_us["V"]), asked=30),
            Figure("less time", less(layer.total_us, rms.total_us)),
            Figure("fewer operations", less(*counted)),
        ),
        note="normlib's layer norm takes its variance about the mean and keeps the part of the mean below its "
        "rounding: accurate at any mean, and more work than the textbook's.",
    )


@claim("sparse", "normalising the non-zero half only: 30–50 % less work", basis="count", seconds=2)
def sparse() -> Outcome:
    rows, d = 256, 512
    stored = np.indices((rows, d)).sum(0) % 2 == 0
    row_ids, columns = (jnp.asarray(t, jnp.int32) for t in np.nonzero(stored))
    values, vector = jnp.ones(len(row_ids)), jnp.ones(d)
    dense = jnp.asarray(stored, jnp.float32)
    figures = []
    for name, norm, plain in (
        ("layer", normlib.sparse_layer_norm, normlib.layer_norm),
        ("RMS", normlib.sparse_rms_norm, normlib.rms_norm),
    ):
        # The ids are arguments: as constants, XLA would do a part of the work while compiling.
        def packed(values, scale, bias, row_ids, columns, norm=norm):
            return norm(values, scale, bias, segment_ids=row_ids, num_segments=rows, feature_ids=columns)

        work = flops(packed, values, vector, vector, row_ids, columns)
        affine = (vector, vector) if name == "layer" else (vector,)
        masked, whole = flops(norm, dense, vector, vector), flops(plain, dense, *affine)
        figures.append(Figure(f"{name}, less than masked", less(masked, work), asked=30))
        figures.append(Figure(f"{name}, less than the plain norm", less(whole, work), asked=30))
    return Outcome(
        f"XLA's count of operations of a forward with scale and bias, {rows} × {d} at 50 % density: packed rows "
        "(values and ids of rows and columns) against the same norm by a mask over the dense array, and against "
        "the plain norm.",
        tuple(figures),
        note="The plain norm measures the zeros too, and so computes something else; sums by row id cost more "
        "operations than they save against it.",
    )
