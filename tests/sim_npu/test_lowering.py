"""Kernels lower for TPU and Triton without either, and what does not is named."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton

from sim_npu.lowering import LoweringFailed, lower_check

PARAMS = {"tpu": pltpu.CompilerParams(), "cuda": pltriton.CompilerParams(num_warps=4)}
TARGETS = {"tpu": ("tpu_custom_call",), "cuda": ("__gpu$xla.gpu.triton",)}


def row_norm(x_ref, y_ref):
    """Chunked row norm in the write-once style: a power-of-two chunk and a masked tail."""

    def turn(k, total):
        v = x_ref[:, pl.ds(k * 128, 128)]
        return total + jnp.sum(v * v, axis=1, keepdims=True)

    total = jax.lax.fori_loop(0, x_ref.shape[1] // 128, turn, jnp.zeros((x_ref.shape[0], 1)))
    y_ref[...] = x_ref[...] * jax.lax.rsqrt(total / x_ref.shape[1] + 1e-6)


def sorting(x_ref, y_ref):
    y_ref[...] = jnp.sort(x_ref[...])


def call(kernel, platform, block=(8, 256), interpret=False):
    def fn(x):
        return pl.pallas_call(
            kernel,
            grid=(x.shape[0] // block[0],),
            in_specs=[pl.BlockSpec(block, lambda i: (i, 0))],
            out_specs=pl.BlockSpec(block, lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            compiler_params=PARAMS[platform],
            interpret=interpret,
        )(x)

    return fn


ROWS = jax.ShapeDtypeStruct((16, 256), jnp.float32)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_row_norm_lowers_to_the_platforms_kernel(platform):
    found = lower_check(call(row_norm, platform), ROWS, platform=platform)

    assert found.ok
    assert found.platform == platform
    assert found.custom_calls == TARGETS[platform]
    assert found.text_bytes > 1000


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_an_interpreted_kernel_shows_as_none(platform):
    assert lower_check(call(row_norm, platform, interpret=True), ROWS, platform=platform).custom_calls == ()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_primitive_without_rule_is_named(platform):
    with pytest.raises(LoweringFailed, match=f"does not lower for {platform}: Unimplemented primitive.*sort") as info:
        lower_check(call(sorting, platform), ROWS, platform=platform)
    assert isinstance(info.value.__cause__, NotImplementedError)


def test_a_block_of_one_row_is_refused_by_tpu_alone():
    with pytest.raises(LoweringFailed, match="divisible by 8 and 128"):
        lower_check(call(row_norm, "tpu", block=(1, 256)), ROWS, platform="tpu")
    assert lower_check(call(row_norm, "cuda", block=(1, 256)), ROWS, platform="cuda").ok


def test_lengths_that_are_no_power_of_two_are_refused_by_triton():
    odd = jax.ShapeDtypeStruct((16, 300), jnp.float32)
    with pytest.raises(LoweringFailed, match="power of 2"):
        lower_check(call(row_norm, "cuda", block=(8, 300)), odd, platform="cuda")


def test_errors_of_the_function_itself_pass():
    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        lower_check(broken, ROWS, platform="tpu")


def test_other_platforms_are_refused():
    with pytest.raises(ValueError, match="`platform` must be one of tpu, cuda; got 'rocm'"):
        lower_check(jnp.sin, ROWS, platform="rocm")
