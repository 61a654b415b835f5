"""Kernels that use every form the adapter must read, and the golden files made from them.

`python tests/sim_npu/sim_kernels.py` writes the golden files anew.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sim_npu import demos, programs_of

GOLDEN = Path(__file__).with_name("golden")
S = jax.ShapeDtypeStruct


def mixed(x, s):
    """Squeezed and element blocks, floor division in an index map, scalar memory, partial stores, a carried scratch."""

    def kernel(x_ref, s_ref, y_ref, total_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            total_ref[...] = jnp.zeros_like(total_ref)

        def turn(i, carry):
            row = x_ref[pl.ds(i, 1), :].astype(jnp.float32)
            return jnp.maximum(carry, jnp.max(jnp.abs(row), axis=-1, keepdims=True))

        top = jax.lax.fori_loop(0, x_ref.shape[0], turn, jnp.zeros((1, 1), jnp.float32))
        total_ref[...] += top * s_ref[0]
        y_ref[0:2, :] = (x_ref[0:2, :].astype(jnp.float32) / total_ref[...]).astype(y_ref.dtype)
        y_ref[2:4, :] = jnp.where(x_ref[2:4, :] > 0, x_ref[2:4, :], jnp.zeros((), x_ref.dtype))

    return pl.pallas_call(
        kernel,
        name="mixed",
        grid=(4, 2),
        in_specs=[
            pl.BlockSpec((None, 4, 512), lambda i, j: (i, j // 2, 0)),
            pl.BlockSpec(memory_space=pltpu.SMEM),
        ],
        out_specs=pl.BlockSpec((pl.Squeezed(), 4, pl.Element(512)), lambda i, j: (i, j, 0)),
        out_shape=S((4, 8, 512), jnp.bfloat16),
        scratch_shapes=[pltpu.VMEM((1, 1), jnp.float32)],
    )(x, s)


CASES = {
    "mixed": (mixed, (S((4, 4, 512), jnp.bfloat16), S((2,), jnp.float32))),
    "rms_norm": (demos.rms_norm, demos.rms_norm.example_arrays((64, 1000), jnp.bfloat16)),
    "rms_norm_chunked": (demos.rms_norm_chunked, demos.rms_norm.example_arrays((64, 4100), jnp.float16)),
    "rms_norm_stream": (demos.rms_norm_stream, demos.rms_norm.example_arrays((8, 70000), jnp.float32)),
    "channel_stats": (demos.channel_stats, demos.channel_stats.example_arrays((1000, 96), jnp.float32)),
}


def without_lines(text):
    """JSON of programs without source lines, which differ whenever a file is edited."""
    return json.dumps([_strip(json.loads(t)) for t in text], indent=1)


def _strip(node):
    if isinstance(node, dict):
        return {k: _strip(v) for k, v in node.items() if k != "where"}
    if isinstance(node, list):
        return [_strip(v) for v in node]
    return node


def golden_text(name):
    """What the golden file of a case holds."""
    fn, args = CASES[name]
    return without_lines([p.to_json() for p in programs_of(fn, *args)]) + "\n"


if __name__ == "__main__":
    for case in CASES:
        (GOLDEN / f"{case}.json").write_text(golden_text(case))
