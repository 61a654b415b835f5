"""Rounding is exact to the bit: against ml_dtypes, and against a float64 oracle for every cast mode."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sim_npu import rounding
from sim_npu.rounding import approximate, int8_chain, rint_int32, round_to

DTYPES = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3": ml_dtypes.float8_e4m3fn,
}
# fraction bits, smallest normal exponent, largest finite, has infinities: restated from the formats' definitions.
FIELDS = {
    "hf32": (11, -126, (2 - 2.0**-11) * 2.0**127, True),
    "tf32": (10, -126, (2 - 2.0**-10) * 2.0**127, True),
    "bf16": (7, -126, (2 - 2.0**-7) * 2.0**127, True),
    "fp16": (10, -14, 65504.0, True),
    "e5m2": (2, -14, 57344.0, True),
    "e4m3": (3, -6, 448.0, False),
}
MODES = ("rint", "round", "floor", "ceil", "trunc", "odd")


def bits(x):
    """uint32 words with every NaN alike."""
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))


@pytest.fixture(scope="module")
def patterns():
    """Random float32 words, every half word, and every bf16 word with neighbours just off its ties."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    half = np.arange(65536, dtype=np.uint16)
    top = half.astype(np.uint32) << 16
    near = np.concatenate([(top | low).view(np.float32) for low in (1, 0x7FFF, 0x8000, 0x8001)])
    halves = half.view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        ties = np.concatenate([h * np.float32(s) for h in (halves,) for s in (1 + 2.0**-11, 1 + 2.0**-12)])
    return np.concatenate([words, halves, near, ties])


def to_odd(q):
    chopped = np.trunc(q)
    return np.where((q != chopped) & (np.mod(chopped, 2) == 0), chopped + np.copysign(1.0, q), chopped)


WHOLE = {
    "rint": np.rint,
    "round": lambda q: np.copysign(np.floor(np.abs(q) + 0.5), q),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "odd": to_odd,
}


def oracle(x, name, mode, overflow):
    """The same rounding in float64, where x over its quantum is exact."""
    fraction, lowest, largest, has_inf = FIELDS[name]
    with np.errstate(all="ignore"):
        x = np.asarray(x, np.float64)
        exponent = np.maximum(np.frexp(np.where(np.isfinite(x), x, 1.0))[1] - 1, lowest)
        quantum = np.ldexp(1.0, exponent - fraction)
        y = np.copysign(WHOLE[mode](x / quantum) * quantum, x)
    beyond = {"inf": np.inf if has_inf else np.nan, "saturate": largest, "nan": np.nan}[overflow]
    if mode in ("rint", "round"):
        over = np.full_like(x, beyond)
    elif mode in ("floor", "ceil"):
        over = np.where((x < 0) == (mode == "floor"), beyond, largest)
    else:
        over = np.full_like(x, largest)
    y = np.where(np.isfinite(x) & (np.abs(y) > largest), np.copysign(over, x), y)
    y = np.where(np.isinf(x), np.copysign(beyond, x), y)
    return np.where(np.isnan(x), np.nan, y).astype(np.float32)


@pytest.mark.parametrize("name", DTYPES)
def test_rint_equals_ml_dtypes_on_a_million_words_and_every_half(patterns, name):
    got = jax.jit(lambda x: round_to(x, name))(patterns)

    with np.errstate(all="ignore"):
        expected = patterns.astype(DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(bits(got), bits(expected))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FIELDS)
def test_every_mode_equals_the_float64_oracle(patterns, name, mode):
    x = patterns if name in DTYPES else patterns[::4]

    got = jax.jit(lambda x: round_to(x, name, mode=mode))(x)

    np.testing.assert_array_equal(bits(got), bits(oracle(x, name, mode, "inf")))


@pytest.mark.parametrize("overflow", ["saturate", "nan"])
@pytest.mark.parametrize("mode", ["rint", "floor", "ceil", "odd"])
@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3"])
def test_overflow_rules_equal_the_float64_oracle(patterns, name, mode, overflow):
    x = patterns[::7]

    got = jax.jit(lambda x: round_to(x, name, mode=mode, overflow=overflow))(x)

    np.testing.assert_array_equal(bits(got), bits(oracle(x, name, mode, overflow)))


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e4m3"])
@pytest.mark.parametrize("mode", MODES)
def test_values_of_the_format_stay_as_they_are(name, mode):
    keep = jax.jit(round_to, static_argnums=1, static_argnames="mode")
    width = np.dtype(DTYPES[name]).itemsize
    words = np.arange(2 ** (8 * width), dtype=np.uint16 if width == 2 else np.uint8)
    x = words.view(DTYPES[name]).astype(np.float32)

    np.testing.assert_array_equal(bits(keep(x, name, mode=mode)), bits(x))


def test_fp32_passes_every_word_and_saturates_infinity(patterns):
    np.testing.assert_array_equal(bits(jax.jit(round_to, static_argnums=1)(patterns, "fp32")), bits(patterns))
    largest = np.finfo(np.float32).max
    assert float(round_to(jnp.float32(-jnp.inf), "fp32", overflow="saturate")) == -largest


def test_rounding_survives_a_product_before_and_a_sum_after():
    """In one fusion, neither contraction nor excess precision may change a bit."""
    rng = np.random.default_rng(1)
    a, b, c = rng.standard_normal((3, 200_000)).astype(np.float32)

    got = jax.jit(lambda a, b, c: round_to(round_to(a * b, "bf16") + c, "bf16"))(a, b, c)

    bf16 = ml_dtypes.bfloat16
    expected = ((a * b).astype(bf16).astype(np.float32) + c).astype(bf16).astype(np.float32)
    np.testing.assert_array_equal(bits(got), bits(expected))


def test_rounding_works_under_vmap_and_on_16_bit_input():
    x = jnp.arange(12, dtype=jnp.float16).reshape(3, 4) + jnp.float16(0.125)

    got = jax.jit(jax.vmap(lambda row: round_to(row, "e5m2")))(x)

    np.testing.assert_array_equal(np.asarray(got), np.asarray(x).astype(ml_dtypes.float8_e5m2).astype(np.float32))


def test_int8_chain_equals_numpy_step_by_step(patterns):
    got = jax.jit(int8_chain)(patterns)

    with np.errstate(all="ignore"):
        wide = np.clip(np.rint(np.nan_to_num(patterns.astype(np.float64), nan=0.0)), -(2.0**31), 2.0**31 - 1)
        half = np.clip(wide, -65504, 65504).astype(np.float16).astype(np.float64)
    expected = np.clip(np.trunc(half), -128, 127).astype(np.int8)
    np.testing.assert_array_equal(np.asarray(got), expected)


def test_int8_chain_differs_from_plain_truncation():
    x = np.array([1.7, -1.7, 126.5, 127.5], np.float32)

    assert jax.jit(int8_chain)(x).tolist() == [2, -2, 126, 127]
    assert x.astype(np.int8).tolist() == [1, -1, 126, 127]


def test_rint_int32_rounds_ties_to_even_and_saturates(patterns):
    got = jax.jit(rint_int32)(patterns)

    with np.errstate(invalid="ignore"):
        wide = np.rint(np.nan_to_num(patterns.astype(np.float64), nan=0.0))
    np.testing.assert_array_equal(np.asarray(got), np.clip(wide, -(2.0**31), 2.0**31 - 1).astype(np.int32))


def test_approximate_is_within_half_a_unit_of_its_bits(patterns):
    x = patterns[np.isfinite(patterns) & (np.abs(patterns) > 1e-30) & (np.abs(patterns) < 1e30)]

    got = np.asarray(jax.jit(approximate, static_argnums=1)(x, 8), np.float64)

    error = np.abs(got / x.astype(np.float64) - 1)
    assert 2.0**-10 < error.max() <= 2.0**-9


@pytest.mark.parametrize(
    "options, match",
    [
        ({"format": "fp12"}, "`format` must be one of .*fp16.*; got 'fp12'"),
        ({"format": "fp16", "mode": "nearest"}, "`mode` must be one of rint.*; got 'nearest'"),
        ({"format": "fp16", "overflow": "wrap"}, "`overflow` must be one of inf.*; got 'wrap'"),
    ],
)
def test_unknown_options_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        round_to(jnp.ones(3), **options)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="`x` must be of a float dtype of at most 32 bits; got int32"):
        round_to(jnp.ones(3, jnp.int32), "fp16")


@pytest.mark.parametrize("count", [0, 23])
def test_approximation_bits_are_checked(count):
    with pytest.raises(ValueError, match=f"`bits` must be from 1 to 22; got {count}"):
        approximate(jnp.ones(3), count)


def test_format_table_gives_the_smallest_subnormal():
    assert rounding.FORMATS["fp16"].smallest_subnormal == float(np.finfo(np.float16).smallest_subnormal)
    assert rounding.FORMATS["e4m3"].smallest_subnormal == 2.0**-9
