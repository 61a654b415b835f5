"""MX blocks, stochastic rounding, rounding to 16 bits, and packing: bit by bit against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import normlib as nl
from normlib import quantize
from normlib.precision import narrowed
from tests import quantize_oracle as oracle

pytestmark = [pytest.mark.family, pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")]

MX_DTYPES = ["float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"]
MX_CASES = [(d, 0) for d in MX_DTYPES] + [(d, 1) for d in MX_DTYPES[1:]]
RUNS = {
    "eager": quantize.apply,
    "jit": jax.jit(quantize.apply),
    "vmap": lambda quant, n: jax.jit(jax.vmap(functools.partial(quantize.apply, quant)))(n),
}


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def hard_blocks(width, seed=0):
    """Blocks of every size, at and beside every power of two, with zeros, infinities, NaN and subnormals."""
    rng = np.random.default_rng(seed)
    n = rng.uniform(-1, 1, (254, width)) * 2.0 ** np.arange(-126, 128)[:, None]
    tops = np.ldexp(np.array([1.0, 1.75, 1.5]), np.arange(-126, 128)[:, None] - 1).astype(np.float32)
    beside = [tops, np.nextafter(tops, np.float32(np.inf)), np.nextafter(tops, np.float32(0))]
    peaks = np.concatenate(beside, 1)
    blocks = [n.astype(np.float32)]
    for column in range(peaks.shape[1]):
        block = (rng.uniform(-1, 1, (254, width)) * abs(peaks[:, [column]])).astype(np.float32)
        block[:, width // 2] = peaks[:, column]
        blocks.append(block)
    n = np.concatenate(blocks)
    n[0], n[1], n[2] = 0, -0.0, 1e-40
    n[3, 0], n[4, -1], n[5, 0] = np.nan, np.inf, -np.inf
    n[6], n[7] = 3.4e38, 0
    n[7, 0] = 2.0**-126
    return n


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize(("dtype", "scale_alg"), MX_CASES)
def test_mx_codes_and_bytes_are_those_of_numpy(dtype, scale_alg, how):  # CASES: E1, E7
    dtype, n = numpy_dtype(dtype), hard_blocks(33)
    out = RUNS[how](nl.MX(dtype, scale_alg=scale_alg), n)
    codes, byte = oracle.mx(n, dtype, scale_alg)
    oracle.assert_same(out.scale, byte, "bytes")
    oracle.assert_same(out.y, codes)


@pytest.mark.parametrize("width", [1, 31, 32, 64, 100])
def test_mx_takes_any_width(width):
    n = hard_blocks(width)[::5].reshape(2, -1, width)
    out = RUNS["jit"](nl.MX(jnp.float8_e4m3fn), n)
    codes, byte = oracle.mx(n, ml_dtypes.float8_e4m3fn)
    assert out.scale.shape == (*n.shape[:-1], -(-width // 32)) and out.scale.dtype == jnp.uint8
    oracle.assert_same(out.scale, byte, "bytes")
    oracle.assert_same(out.y, codes)


def test_mx_bytes_of_powers_of_two():
    n = np.float32(2) ** np.array([[0], [2], [-20]], np.float32) * np.ones(32, np.float32)
    assert RUNS["jit"](nl.MX(), n).scale.ravel().tolist() == [125, 127, 105]
    assert RUNS["jit"](nl.MX(jnp.float8_e4m3fn), n).scale.ravel().tolist() == [119, 121, 99]
    assert RUNS["jit"](nl.MX(jnp.float8_e5m2), n).scale.ravel().tolist() == [112, 114, 92]


def test_mx_blocks_of_zeros_and_blocks_with_nan():  # CASES: E1
    n = np.ones((4, 64), np.float32)
    n[0, :32], n[1, 40], n[2, 3] = -0.0, np.nan, np.inf
    out = RUNS["jit"](nl.MX(jnp.float8_e4m3fn), n)
    assert out.scale[:3].tolist() == [[0, 119], [119, 255], [255, 119]]
    assert not np.asarray(out.y[0, :32]).view(np.uint8).any() and not np.asarray(out.y[1, 32:]).view(np.uint8).any()
    values = np.asarray(nl.dequantize(out))
    assert (values[0, :32] == 0).all() and np.isnan(values[1, 32:]).all() and (values[1, :32] == 1).all()


def test_mx_scale_alg_1_never_saturates_and_0_does():
    n = jnp.full((1, 32), 500.0)  # floor(log2) - 8 gives 1 * 448; rounded up 2 * 256
    assert nl.dequantize(RUNS["jit"](nl.MX(jnp.float8_e4m3fn), n))[0, 0] == 448
    assert nl.dequantize(RUNS["jit"](nl.MX(jnp.float8_e4m3fn, scale_alg=1), n))[0, 0] == 512


@pytest.mark.parametrize("dtype", MX_DTYPES)
def test_mx_dequantises_to_code_times_power_of_two(dtype):
    n = hard_blocks(40)
    out = RUNS["jit"](nl.MX(numpy_dtype(dtype)), n)
    exponent = np.repeat(np.asarray(out.scale).astype(int) - 127, 32, -1)[:, :40]
    exact = np.asarray(out.y).astype(np.float64) * 2.0**exponent
    expected = np.where(exponent == 128, np.nan, oracle.flushed(exact))
    np.testing.assert_array_equal(oracle.flushed(jax.jit(nl.dequantize)(out)), expected)


def test_mx_exponents_are_found_among_measured_entries():
    n = np.ones((1, 64), np.float32)
    n[0, 1], n[0, 2] = np.nan, 1e9
    out = RUNS["jit"](nl.MX(jnp.float8_e4m3fn), n, where=(np.arange(64) > 2)[None])
    assert out.scale.tolist() == [[119, 119]]
    assert np.asarray(out.y).astype(np.float32)[0, 2:4].tolist() == [448, 256]


# -- stochastic rounding ----------------------------------------------------------------------------------------------


def neighbours(v, dtype):
    """The two codes around each v, as float64 values."""
    name = np.dtype(dtype).name
    if name in oracle.INTEGERS:
        return np.floor(v), np.ceil(v)
    grid = np.arange(2 ** (4 if name == "float4_e2m1fn" else 8), dtype=np.uint8).view(dtype).astype(np.float64)
    grid = np.unique(grid[np.isfinite(grid)])
    return grid[np.searchsorted(grid, v, "right") - 1], grid[np.searchsorted(grid, v, "left")]


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_stochastic_rounding_is_unbiased_between_the_two_nearest_codes(dtype):
    dtype, count = numpy_dtype(dtype), 4000
    v = np.array([0.3, -0.3, 0.75, 2.9, -3.6, 1.0, -2.0, 5.3, 0.001, 0.0, 0.004, 3e-5], np.float32)
    quant = nl.Static(1.0, dtype=dtype, rounding="stochastic", key=jax.random.key(3))
    codes = np.asarray(RUNS["jit"](quant, np.broadcast_to(v, (count, v.size))).y).astype(np.float64)
    low, high = neighbours(v.astype(np.float64), dtype)
    assert ((codes == low) | (codes == high)).all()
    chance = np.where(high > low, (v - low) / np.where(high > low, high - low, 1), 0)
    spread = (high - low) * np.sqrt(chance * (1 - chance) / count)
    assert (abs(codes.mean(0) - v) <= 5 * spread + 1e-9).all()


@pytest.mark.parametrize("quant", [nl.Dynamic, nl.Asymmetric, nl.MX])
def test_stochastic_rounding_of_dynamic_kinds_is_unbiased(quant):
    row = np.linspace(-1, 1, 64).astype(np.float32) ** 3
    kind = quant(rounding="stochastic", key=jax.random.key(0))
    out = RUNS["jit"](kind, np.broadcast_to(row, (4000, 64)))
    mean = np.asarray(nl.dequantize(out), np.float64).mean(0)[1:-1]  # the ends of an asymmetric range may saturate
    step = 2.0 if quant is nl.MX else float(out.scale[0, 0])
    assert abs(mean - row[1:-1]).max() < 5 * step / 2 / np.sqrt(4000)


def test_stochastic_rounding_depends_on_the_key_alone_and_saturates():
    n = jnp.array([0.5] * 64 + [1e9, -jnp.inf, jnp.nan])

    def codes(seed, dtype=jnp.int8):
        kind = nl.Static(1.0, dtype=dtype, rounding="stochastic", key=jax.random.key(seed))
        return np.asarray(RUNS["jit"](kind, n).y).astype(np.float32)

    np.testing.assert_array_equal(codes(0), codes(0))
    assert (codes(0) != codes(1)).any()
    assert codes(0)[-3:].tolist() == [127, -128, 0]
    assert codes(0, jnp.float8_e5m2)[-3:-1].tolist() == [57344, -57344] and np.isnan(codes(0, jnp.float8_e5m2)[-1])


# -- 16 bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_rounding_to_16_bits_is_that_of_a_cast(dtype):
    rng = np.random.default_rng(0)
    grid = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ties = (grid[1:].astype(np.float64) + grid[:-1]).astype(np.float32) / 2
    n = oracle.flushed(np.concatenate([grid, ties, np.nextafter(ties, np.float32(9e9)), bits, bits / 2**110]))
    expected = n.astype(dtype).astype(np.float32)
    got = np.asarray(jax.jit(lambda n: narrowed(n, dtype))(n))
    oracle.assert_same(oracle.flushed(got), oracle.flushed(expected))


# -- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [lambda f: f, jax.jit])
@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.float4_e2m1fn])
def test_two_codes_go_into_a_byte_and_come_back(dtype, how):
    codes = np.arange(48, dtype=np.uint8).reshape(3, 16) % 16
    codes[codes == 8] = 9  # all but float4's -0 and int4's -8, taken apart below
    values = codes.view(dtype) if dtype is not ml_dtypes.int4 else ((codes.astype(np.int8) ^ 8) - 8).astype(dtype)
    packed = how(nl.pack)(jnp.asarray(values))
    np.testing.assert_array_equal(packed, codes[:, ::2] | (codes[:, 1::2] << 4))
    oracle.assert_same(how(lambda p: nl.unpack(p, dtype))(packed), values)
    edge = jnp.asarray(np.array([-8, 7], ml_dtypes.int4)) if dtype is ml_dtypes.int4 else jnp.array([-0.0, 6], dtype)
    oracle.assert_same(nl.unpack(nl.pack(edge), dtype), np.asarray(edge))


def test_an_odd_number_of_codes_is_filled_up():
    codes = jnp.array([[1, -2, 3], [4, 5, -6]], jnp.int4)
    packed = nl.pack(codes)
    assert packed.tolist() == [[0xE1, 0x03], [0x54, 0x0A]]
    np.testing.assert_array_equal(nl.unpack(packed, jnp.int4, size=3), codes)
    assert nl.pack(jnp.zeros((2, 0), jnp.int4)).shape == (2, 0)


# -- reading codes ----------------------------------------------------------------------------------------------------


def test_dequantising_subtracts_first_and_multiplies_once():
    rng = np.random.default_rng(0)
    y = rng.integers(-128, 128, (50, 64)).astype(np.int8)
    scale, zero_point = (
        rng.uniform(0.01, 2, (50, 1)).astype(np.float32),
        rng.integers(-500, 500, (50, 1)).astype(np.int32),
    )
    expected = (y.astype(np.int32) - zero_point).astype(np.float32) * scale
    out = nl.Quantized(jnp.asarray(y), jnp.asarray(scale), jnp.asarray(zero_point))
    for read in (nl.dequantize, jax.jit(nl.dequantize)):
        np.testing.assert_array_equal(read(out), expected)
    assert nl.dequantize(out, dtype=jnp.bfloat16).dtype == jnp.bfloat16
