"""Emulated kernels equal the same arithmetic written in NumPy's own float16 and float32, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

from sim_npu.emulation import emulate
from sim_npu.precision import PRESETS, PrecisionPolicy
from sim_npu.rounding import int8_chain

EPS = 1e-3
BF16 = ml_dtypes.bfloat16


def kernel(body, outs, *, block_rows=4):
    """A kernel over blocks of rows; operands of one row are shared by all blocks."""

    def fn(*args):
        rows = args[0].shape[0]

        def spec(a):
            shared = a.shape[0] == 1
            return pl.BlockSpec((1 if shared else block_rows, *a.shape[1:]), lambda i: (0 if shared else i, 0))

        shapes = outs(*args)
        return pl.pallas_call(
            body,
            grid=(rows // block_rows,),
            in_specs=[spec(a) for a in args],
            out_specs=jax.tree.map(spec, shapes),
            out_shape=shapes,
        )(*args)

    return fn


def row_norm_body(x_ref, g_ref, y_ref):
    x = x_ref[...].astype(jnp.float32)
    mean_square = jnp.sum(x * x, axis=1, keepdims=True) / x.shape[1] + EPS
    y_ref[...] = (x * jax.lax.rsqrt(mean_square) * g_ref[...].astype(jnp.float32)).astype(y_ref.dtype)


row_norm = kernel(row_norm_body, lambda x, g: jax.ShapeDtypeStruct(x.shape, x.dtype))


def add_row_norm_body(a_ref, b_ref, g_ref, x_ref, y_ref):
    x = a_ref[...].astype(jnp.float32) + b_ref[...].astype(jnp.float32)
    mean_square = jnp.sum(x * x, axis=1, keepdims=True) / x.shape[1] + EPS
    x_ref[...] = x.astype(x_ref.dtype)
    y_ref[...] = (x * jax.lax.rsqrt(mean_square) * g_ref[...].astype(jnp.float32)).astype(y_ref.dtype)


add_row_norm = kernel(add_row_norm_body, lambda a, b, g: [jax.ShapeDtypeStruct(a.shape, a.dtype)] * 2)


def sequential(v):
    total = v[:, 0]
    for k in range(1, v.shape[1]):
        total = total + v[:, k]
    return total[:, None]


def tree(v):
    while v.shape[1] > 1:
        v = v[:, 0::2] + v[:, 1::2]
    return v


def lanes64(v):
    lanes = v[:, :64]
    for k in range(64, v.shape[1], 64):
        lanes = lanes + v[:, k : k + 64]
    return tree(lanes)


def halving(v):
    while v.shape[1] > 64:
        v = v[:, : v.shape[1] // 2] + v[:, v.shape[1] // 2 :]
    return tree(v)


ORDERS = {"sequential": sequential, "lanes64": lanes64, "tree": tree}


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return rng.standard_normal((8, 256)).astype(np.float16), rng.standard_normal((1, 256)).astype(np.float16)


def assert_same_bits(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("order", ORDERS)
def test_all_fp16_is_numpys_float16_in_each_order(rows, order):
    x, g = rows
    n, eps, one = np.float16(256), np.float16(EPS), np.float16(1)

    got = emulate(row_norm, x, g, precision="fp16", order=order)

    rstd = one / np.sqrt(ORDERS[order](x * x) / n + eps)
    assert_same_bits(got, x * rstd * g)


@pytest.mark.parametrize("order", ORDERS)
def test_fp32_rounds_every_operation_once(rows, order):
    """No contraction, no reciprocal, no reassociation: what XLA's own fusion does not give."""
    x, g = (a.astype(np.float32) * np.float32(1.1) for a in rows)

    got = emulate(row_norm, x, g, precision="fp32", order=order)

    rstd = np.float32(1) / np.sqrt(ORDERS[order](x * x) / np.float32(256) + np.float32(EPS))
    assert_same_bits(got, x * rstd * g)


@pytest.mark.parametrize(
    "formula",
    [
        lambda x, y: x * y + x,  # contracted by XLA
        lambda x, y: x - y * y,
        lambda x, y: (x + np.float32(1e3)) - np.float32(1e3) + np.float32(0.1),  # constants merged on JAX 0.10
        lambda x, y: x * np.float32(1.1) * np.float32(1.3),
        lambda x, y: x / np.float32(3000),
        lambda x, y: x / y[:, :1],
    ],
)
def test_fp32_keeps_every_rounding_that_xla_would_merge(formula):
    def body(x_ref, y_ref, z_ref):
        z_ref[...] = formula(x_ref[...], y_ref[...])

    x, y = np.random.default_rng(5).standard_normal((2, 8, 4096)).astype(np.float32)

    got = emulate(kernel(body, lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype)), x, y, precision="fp32")

    assert_same_bits(got, formula(x, y))


@pytest.mark.parametrize("dtype, preset", [(np.float16, "fp16_fp32acc"), (BF16, "bf16_fp32acc")])
def test_narrow_rows_with_float32_sums_keep_statistics_wide(rows, dtype, preset):
    x, g = (a.astype(np.float32).astype(dtype) for a in rows)

    got = emulate(row_norm, x, g, precision=preset)

    squares = (x * x).astype(np.float32)
    rstd = np.float32(1) / np.sqrt(lanes64(squares) / np.float32(256) + np.float32(EPS))
    scaled = (x.astype(np.float32) * rstd).astype(dtype)
    assert_same_bits(got, (scaled.astype(np.float32) * g.astype(np.float32)).astype(dtype))


def test_ascend_a2_fp16_rounds_the_sum_and_both_products(rows):
    a, g = rows
    b = a[::-1].copy()

    x, y = emulate(add_row_norm, a, b, g, precision="ascend_a2")

    summed = a + b
    wide = summed.astype(np.float32)
    rstd = np.float32(1) / np.sqrt(halving(wide * wide * np.float32(1 / 256)) + np.float32(EPS))
    assert_same_bits(x, summed)
    assert_same_bits(y, (wide * rstd).astype(np.float16) * g)


def test_ascend_a2_fp16_rounds_a_sum_of_inputs_even_where_it_only_feeds_statistics(rows):
    def body(a_ref, b_ref, s_ref):
        x = a_ref[...].astype(jnp.float32) + b_ref[...].astype(jnp.float32)
        s_ref[...] = jnp.sum(x * x, axis=1, keepdims=True)

    squares = kernel(body, lambda a, b: jax.ShapeDtypeStruct((a.shape[0], 1), jnp.float32))
    a, b = rows[0], rows[0][::-1].copy()

    got = emulate(squares, a, b, precision="ascend_a2")

    wide = (a + b).astype(np.float32)
    assert_same_bits(got, halving(wide * wide))


def test_ascend_a2_bf16_takes_statistics_from_the_unrounded_sum(rows):
    a, g = (r.astype(np.float32).astype(BF16) for r in rows)
    b = a[::-1].copy() * BF16(1.1)

    x, y = emulate(add_row_norm, a, b, g, precision="ascend_a2")

    wide = a.astype(np.float32) + b.astype(np.float32)
    rstd = np.float32(1) / np.sqrt(halving(wide * wide * np.float32(1 / 256)) + np.float32(EPS))
    assert_same_bits(x, wide.astype(BF16))
    assert_same_bits(y, ((wide * rstd).astype(BF16).astype(np.float32) * g.astype(np.float32)).astype(BF16))


def test_ascend_950_rounds_once(rows):
    x, g = rows

    got = emulate(row_norm, x, g, chip="950")

    wide = x.astype(np.float32)
    rstd = np.float32(1) / np.sqrt(tree(wide * wide) / np.float32(256) + np.float32(EPS))
    assert_same_bits(got, (wide * rstd * g.astype(np.float32)).astype(np.float16))


@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_squares_beyond_fp16_overflow_or_saturate_as_the_policy_says(order):
    x = np.full((4, 128), 300.0, np.float16)
    g = np.ones((1, 128), np.float16)

    overflowed = emulate(row_norm, x, g, precision="fp16", order=order)
    saturated = emulate(row_norm, x, g, precision=PrecisionPolicy("fp16", "fp16", order, overflow="saturate"))
    wide = emulate(row_norm, x, g, precision="ascend_a2")

    np.testing.assert_array_equal(np.asarray(overflowed), 0.0)  # 300 / inf
    expected = np.float16(300) * (np.float16(1) / np.sqrt(np.float16(65504) / np.float16(128) + np.float16(EPS)))
    np.testing.assert_array_equal(np.asarray(saturated), expected)
    np.testing.assert_allclose(np.asarray(wide), 1.0, atol=1e-3)


def test_a_running_fp16_sum_of_ones_stops_at_2048():
    def body(x_ref, y_ref):
        y_ref[...] = jnp.sum(x_ref[...], axis=1, keepdims=True)

    count = kernel(body, lambda x: jax.ShapeDtypeStruct((x.shape[0], 1), jnp.float32))
    ones = np.ones((4, 4096), np.float32)

    sums = {o: float(emulate(count, ones, precision="fp16", order=o)[0, 0]) for o in ORDERS}

    assert sums == {"sequential": 2048.0, "lanes64": 4096.0, "tree": 4096.0}
    assert float(emulate(count, ones, precision="fp16_fp32acc", order="sequential")[0, 0]) == 4096.0


@pytest.mark.parametrize("mode, expected", [("rint", 2048.0), ("ceil", 2050.0), ("odd", 2050.0), ("trunc", 2048.0)])
def test_a_cast_in_the_kernel_uses_the_policys_mode(mode, expected):
    def body(x_ref, y_ref):
        y_ref[...] = (x_ref[...] + 2048.0).astype(jnp.float16)

    shift = kernel(body, lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float16))

    got = emulate(shift, np.full((4, 8), 0.5, np.float32), precision=PrecisionPolicy(cast=mode))

    assert np.unique(np.asarray(got)).tolist() == [expected if mode != "odd" else 2050.0]


def test_a_cast_to_int8_is_the_three_step_chain_on_a2_only():
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...].astype(jnp.int8)

    quantise = kernel(body, lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int8))
    x = np.linspace(-130, 130, 4 * 521, dtype=np.float32).reshape(4, 521)

    chain = np.asarray(emulate(quantise, x, precision="ascend_a2"))

    np.testing.assert_array_equal(chain, np.clip(np.rint(x), -128, 127).astype(np.int8))
    np.testing.assert_array_equal(chain, np.asarray(int8_chain(x)))
    inside = np.abs(x) < 127
    plain = np.asarray(emulate(quantise, x, precision="fp32"))
    np.testing.assert_array_equal(plain[inside], np.trunc(x[inside]).astype(np.int8))


def test_approximate_rsqrt_keeps_eight_bits(rows):
    x, g = (a.astype(np.float32) for a in rows)

    exact = np.asarray(emulate(row_norm, x, g, precision="ascend_a2"), np.float64)
    rough = np.asarray(emulate(row_norm, x, g, precision="ascend_a2_approximate"), np.float64)

    error = np.abs(rough / exact - 1).max()
    assert 2.0**-12 < error <= 2.0**-9 * 1.001


def test_constants_enter_in_the_data_type():
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 0.1 + jnp.maximum(x_ref[...], 0.3)

    mixed = kernel(body, lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32))
    x = np.linspace(-1, 1, 64, dtype=np.float16).reshape(4, 16)

    got = emulate(mixed, x.astype(np.float32), precision="fp16")

    assert_same_bits(got, (x * np.float16(0.1) + np.maximum(x, np.float16(0.3))).astype(np.float32))


def test_fp16_subnormals_are_kept():
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] * x_ref[...]

    square = kernel(body, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    x = (np.arange(1, 65, dtype=np.float32) * 2.0**-12).astype(np.float16).reshape(4, 16)

    got = emulate(square, x, precision="fp16")

    assert 0 < np.asarray(got).astype(np.float32).min() < 2.0**-14
    assert_same_bits(got, x * x)


def test_a_kernels_own_narrow_type_wins_over_the_policy():
    def body(x_ref, y_ref):
        y_ref[...] = (x_ref[...].astype(jnp.bfloat16) * jnp.bfloat16(3)).astype(jnp.float32)

    triple = kernel(body, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    x = np.linspace(0.1, 1, 64, dtype=np.float32).reshape(4, 16)

    got = emulate(triple, x, precision="fp32")

    assert_same_bits(got, (x.astype(BF16).astype(np.float32) * np.float32(3)).astype(BF16).astype(np.float32))


@pytest.mark.parametrize("power", [2, 3, -2])
def test_powers_round_every_product(power):
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] ** power

    raised = kernel(body, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    x = np.linspace(0.5, 2, 64, dtype=np.float16).reshape(4, 16)

    got = emulate(raised, x, precision="fp16")

    assert_same_bits(got, {2: x * x, 3: x * (x * x), -2: np.float16(1) / (x * x)}[power])


def test_policies_are_plain_data():
    assert dataclasses.replace(PRESETS["fp16"], order="tree") == PRESETS["fp16_tree"]
