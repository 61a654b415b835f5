"""Claims about memory that an operation in place saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import normlib
from benchmarks.claims import row_kernels as kernels
from benchmarks.claims.registry import Figure, Outcome, claim, less
from sim_npu import TilePlan, get_chip, programs_of
from sim_npu.footprint import ub_map


def peak_bytes(fn: Callable, *args: jax.ShapeDtypeStruct, donated: tuple[int, ...] = ()) -> int:
    """Arguments, results and temporaries of the compiled `fn`, what results share with arguments counted once."""
    m: Any = jax.jit(fn, donate_argnums=donated).lower(*args).compile().memory_analysis()
    return (
        m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
    )  # a donated argument and the result in its place are one buffer


@claim("in-place", "in place: up to 50 % less memory", basis="count", seconds=2)
def in_place() -> Outcome:
    x, vector = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096,), jnp.float32)
    cases: dict[str, tuple[Callable, tuple, tuple[int, ...]]] = {
        "rms_norm": (normlib.rms_norm, (x, vector), (0,)),
        "layer_norm": (normlib.layer_norm, (x, vector, vector), (0,)),
        "add_rms_norm": (normlib.add_rms_norm, (x, x, vector), (0, 1)),
    }
    saved = {
        name: less(peak_bytes(fn, *args), peak_bytes(fn, *args, donated=donated))
        for name, (fn, args, donated) in cases.items()
    }
    array, scale = (x.shape, x.dtype.name), (vector.shape, x.dtype.name)
    buffers = []
    for kernel, operands in (
        (kernels.add, (array, array)),
        (kernels.rms_norm, (array, scale)),
        (kernels.layer_norm, (array, scale, scale)),
    ):
        (program,) = programs_of(kernel, *operands)
        used = [ub_map(program, get_chip("910b2"), TilePlan(in_place=on)).used for on in (False, True)]
        buffers.append(less(*used))
    return Outcome(
        "Arguments, results and temporaries of the compiled function (`memory_analysis`), 1024 × 4096 bfloat16, with "
        "x donated against not; beside it the unified buffer of three kernels in sim_npu (add, RMS and layer norm) "
        "with results of single instructions in the place of operands.",
        (
            Figure("less memory, best", max(saved.values()), asked=50),
            *(Figure(name, value) for name, value in saved.items()),
            Figure("unified buffer, best", max(buffers)),
        ),
    )
