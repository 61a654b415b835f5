"""Codes and scales, bit by bit against NumPy float32 on the same float32 input."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import normlib as nl
from normlib import quantize
from tests import quantize_oracle as oracle

pytestmark = [pytest.mark.family, pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")]

RUNS = {
    "eager": quantize.apply,
    "jit": jax.jit(quantize.apply, static_argnames=("axes",)),
    "vmap": lambda quant, n, **k: jax.jit(jax.vmap(functools.partial(quantize.apply, quant, **k)))(n),
}
DTYPES = ["int8", "uint8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
SYMMETRIC = ["int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
SCALES = [2.0**-4, 0.1, 0.0333, 3.7, 1e-30, 2.0**-126, 2.0**126]
rows = np.random.default_rng(7)


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.fixture
def run():
    return RUNS["jit"]


@pytest.fixture(params=["eager", "jit"])
def run_both(request):
    return RUNS[request.param]


# -- static -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiply", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_static_codes_are_those_of_numpy(dtype, multiply, run_both):  # CASES: E3, E4, E7, E9
    dtype = numpy_dtype(dtype)
    for scale in SCALES:
        n = oracle.aimed(1 / scale if multiply else scale, dtype)
        out = run_both(nl.Static(jnp.float32(scale), dtype=dtype, multiply=multiply), n)
        oracle.assert_same(out.y, oracle.static(n, scale, dtype, multiply=multiply), f"scale {scale}")
        step = np.float32(1) / np.float32(scale) if multiply else np.float32(scale)
        assert out.scale.dtype == np.float32 and out.scale.item() == step and out.zero_point is None


@pytest.mark.parametrize("mode", oracle.MODES)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4"])
def test_every_rounding_of_integers_is_that_of_numpy(dtype, mode, run_both):  # CASES: E3
    dtype = numpy_dtype(dtype)
    for scale in (2.0**-4, 0.1, 3.7):
        n = oracle.aimed(scale, dtype)
        out = run_both(nl.Static(scale, rounding=mode, dtype=dtype), n)
        oracle.assert_same(out.y, oracle.static(n, scale, dtype, mode=mode), f"{mode}, scale {scale}")


def test_ties_go_to_even_unless_told_otherwise():  # CASES: E3
    ties = jnp.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    expected = {
        "rint": [0, 2, 2, 0, -2, -2], "half_away": [1, 2, 3, -1, -2, -3], "floor": [0, 1, 2, -1, -2, -3],
        "ceil": [1, 2, 3, 0, -1, -2], "trunc": [0, 1, 2, 0, -1, -2],
    }  # fmt: skip
    for mode, codes in expected.items():
        assert RUNS["jit"](nl.Static(1.0, rounding=mode), ties).y.tolist() == codes, mode


def test_the_largest_values_saturate_and_never_wrap():  # CASES: E4
    n = jnp.array([127.4, 127.5, 127.6, 128, 200, 1e10, jnp.inf, -128.5, -129, -1e10, -jnp.inf, jnp.nan])
    out = RUNS["jit"](nl.Static(1.0), n)
    assert out.y.tolist() == [127, 127, 127, 127, 127, 127, 127, -128, -128, -128, -128, 0]


def test_the_smallest_code_can_be_raised():  # CASES: E5
    out = RUNS["jit"](nl.Static(1.0, lowest=-127), jnp.array([-500.0, -127.6, 127.6]))
    assert out.y.tolist() == [-127, -127, 127]


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344)])
def test_fp8_saturates_and_keeps_nan(dtype, largest, run_both):  # CASES: E7
    n = jnp.array([449.0, 464, 465, 1e10, jnp.inf, -jnp.inf, jnp.nan]) * (largest / 448)
    y = np.asarray(run_both(nl.Static(1.0, dtype=numpy_dtype(dtype)), n).y).astype(np.float32)
    assert y[:6].tolist() == [largest] * 5 + [-largest] and np.isnan(y[6])


def test_fp4_saturates_infinities_and_gives_zero_for_nan(run_both):
    y = run_both(nl.Static(1.0, dtype=jnp.float4_e2m1fn), jnp.array([jnp.nan, jnp.inf, -jnp.inf, 5.0, 0.75])).y
    oracle.assert_same(y, np.array([0.0, 6, -6, 4, 1]).astype(ml_dtypes.float4_e2m1fn))


def test_int4_saturates(run_both):
    y = run_both(nl.Static(1.0, dtype=jnp.int4), jnp.array([7.5, 9, 1e9, -8.5, -9, jnp.nan])).y
    assert np.asarray(y).astype(int).tolist() == [7, 7, 7, -8, -8, 0]


@pytest.mark.parametrize("zero_point", [3, -128, 127, 200])
def test_the_zero_point_is_added_after_rounding(zero_point, run_both):  # CASES: E10
    for scale in (2.0**-4, 0.1):
        n = oracle.aimed(scale, np.int8)
        out = run_both(nl.Static(scale, zero_point), n)
        oracle.assert_same(out.y, oracle.static(n, scale, np.int8, zero_point))
        assert out.zero_point.dtype == jnp.int32 and out.zero_point.item() == zero_point
    # a tie with an odd zero point: 0.5 rounds to 0 and then becomes 3, not rint(3.5) = 4
    assert run_both(nl.Static(1.0, 3), jnp.array([0.5])).y.item() == 3


def test_scales_and_zero_points_per_feature_and_per_row(run):
    n = rows.normal(size=(6, 40)).astype(np.float32) * 3
    for shape in ((), (40,), (6, 1), (1, 40), (6, 40)):
        scale = rows.uniform(0.01, 0.1, shape).astype(np.float32)
        zero_point = rows.integers(-5, 6, shape).astype(np.int32)
        out = run(nl.Static(jnp.asarray(scale), jnp.asarray(zero_point)), n)
        oracle.assert_same(out.y, oracle.static(n, scale, np.int8, zero_point))


def test_scales_along_a_leading_channel_axis():
    n = rows.normal(size=(2, 5, 3)).astype(np.float32)
    scale = rows.uniform(0.01, 0.1, 5).astype(np.float32)
    out = RUNS["jit"](nl.Static(scale), n, axes=1)
    oracle.assert_same(out.y, oracle.static(n, scale[:, None], np.int8))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_scale_closed_over_gives_the_codes_of_one_passed_in(dtype):
    dtype = numpy_dtype(dtype)
    n = np.concatenate([oracle.aimed(0.0333, dtype), rows.normal(size=4096).astype(np.float32)])
    out = jax.jit(lambda n: quantize.apply(nl.Static(0.0333, dtype=dtype), n))(n)
    oracle.assert_same(out.y, oracle.static(n, 0.0333, dtype))


# -- dual -------------------------------------------------------------------------------------------------------------


def test_dual_is_two_quantisations_of_one_input(run):
    n = rows.normal(size=(4, 24)).astype(np.float32)
    smooth = rows.uniform(0.5, 2, 24).astype(np.float32)
    out = run(nl.Dual(nl.Static(0.05, 3), nl.Dynamic(smooth)), n)
    codes, scale = oracle.dynamic(n, np.int8, smooth=smooth)
    oracle.assert_same(out.y, oracle.static(n, 0.05, np.int8, 3))
    oracle.assert_same(out.y2, codes)
    oracle.assert_same(out.scale2, scale)
    assert out.first.zero_point.item() == 3 and out.second.zero_point is None and out.second.y is out.y2


# -- dynamic ----------------------------------------------------------------------------------------------------------


def hard_rows(width=72):
    """Rows of all sizes, of zeros, with one entry, at ties, near overflow and below the smallest normal number."""
    n = rows.normal(size=(300, width)) * 2.0 ** rows.integers(-140, 120, (300, 1))
    n[0] = 0
    n[1], n[1, 5] = 0, -3.25
    n[2] = np.arange(width) - 36.5
    n[2, 0] = 127
    n[3] = 3.4e38 * np.sign(n[3])
    n[4] = 1e-40
    n[5] = -0.0
    n[6], n[6, 1] = np.arange(width) % 7 - 3.5, 7
    return n.astype(np.float32)


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("dtype", SYMMETRIC)
def test_dynamic_codes_and_scales_are_those_of_numpy(dtype, how):  # CASES: E1, E5, E9
    dtype, n = numpy_dtype(dtype), hard_rows()
    out = RUNS[how](nl.Dynamic(dtype=dtype), n)
    codes, scale = oracle.dynamic(n, dtype)
    oracle.assert_same(out.scale.reshape(300, 1), scale, "scale")
    oracle.assert_same(out.y, codes)


@pytest.mark.parametrize("dtype", SYMMETRIC)
def test_a_zero_row_has_zero_codes_and_the_floor_as_scale(dtype, run):  # CASES: E1
    for quant, floor in ((nl.Dynamic(dtype=numpy_dtype(dtype)), 2.0**-126), (nl.Dynamic(floor=1e-5), np.float32(1e-5))):
        out = run(quant, jnp.array([[0.0, 0.0], [1.0, -1.0]]))
        assert out.scale[0, 0] == floor and not np.asarray(out.y[0]).astype(float).any()
        assert nl.dequantize(out)[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", oracle.MODES)
def test_the_lowest_code_never_appears_in_any_rounding(mode, run):  # CASES: E5
    n = hard_rows()
    for dtype, lowest in ((np.dtype("int8"), -127), (numpy_dtype("int4"), -7)):
        out = run(nl.Dynamic(dtype=dtype, rounding=mode), n)
        oracle.assert_same(out.y, oracle.dynamic(n, dtype, mode=mode)[0])
        assert np.asarray(out.y).astype(int).min() == lowest


def test_smoothing_multiplies_first(run):
    n, smooth = hard_rows(), rows.uniform(0.1, 10, 72).astype(np.float32)
    out = run(nl.Dynamic(jnp.asarray(smooth)), n)
    codes, scale = oracle.dynamic(n, np.int8, smooth=smooth)
    oracle.assert_same(out.scale, scale, "scale")
    oracle.assert_same(out.y, codes)


def test_non_finite_values_stay_in_their_row(run_both):
    n = hard_rows()
    n[7, 3], n[8, 2], n[9, 1], n[9, 4] = np.nan, np.inf, -np.inf, np.nan
    for dtype in ("int8", "float8_e4m3fn"):
        dtype = numpy_dtype(dtype)
        out = run_both(nl.Dynamic(dtype=dtype), n)
        codes, scale = oracle.dynamic(n, dtype)
        assert np.isnan(out.scale[7:10:2]).all() and out.scale[8, 0] == np.inf
        oracle.assert_same(out.scale, scale, "scale")
        oracle.assert_same(out.y, codes)


@pytest.mark.parametrize("shape", [(64, 300), (1, 7), (3, 1025), (2, 3, 129)])
def test_a_nan_anywhere_in_a_row_reaches_its_scale(shape, run):
    n = rows.normal(size=shape).astype(np.float32)
    n[..., 0, shape[-1] // 2] = np.nan
    scale = np.asarray(run(nl.Dynamic(), n).scale)
    assert np.isnan(scale[..., 0, 0]).all() and np.isfinite(scale[..., 1:, 0]).all()


def test_groups_of_128_have_scales_of_their_own(run):  # CASES: E13
    n = rows.normal(size=(5, 1152)).astype(np.float32)
    out = run(nl.Dynamic(group=128, dtype=jnp.float8_e4m3fn), n)
    codes, scale = oracle.dynamic(n, numpy_dtype("float8_e4m3fn"), group=128)
    assert out.scale.shape == (5, 9)
    oracle.assert_same(out.scale, scale, "scale")
    oracle.assert_same(out.y, codes)
    np.testing.assert_array_equal(nl.dequantize(out), codes.astype(np.float32) * np.repeat(scale, 128, 1))


def test_rows_over_several_axes(run):
    n = rows.normal(size=(4, 3, 20)).astype(np.float32)
    out = run(nl.Dynamic(), n, axes=(1, 2))
    codes, scale = oracle.dynamic(n.reshape(4, 60), np.int8)
    oracle.assert_same(out.scale, scale[..., None], "scale")
    oracle.assert_same(out.y, codes.reshape(n.shape))


def test_scales_are_found_among_measured_entries():
    n = np.array([[1.0, -2.0, 100.0, np.nan], [4.0, 0, 0, 0]], np.float32)
    where = np.array([[True, True, False, False]] * 2)
    for quant in (nl.Dynamic(), nl.Dynamic(group=4)):
        out = RUNS["jit"](quant, n, where=where)
        oracle.assert_same(out.scale, np.array([[2], [4]], np.float32) / np.float32(127))
        assert out.y.tolist() == [[64, -127, 127, 0], [127, 0, 0, 0]]


# -- asymmetric -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", RUNS)
def test_asymmetric_codes_scales_and_zero_points_are_those_of_numpy(how):  # CASES: E10
    n = hard_rows() + rows.normal(size=(300, 1)).astype(np.float32)
    n[10], n[11], n[12] = 5.0, np.linspace(-5, -1, 72), np.linspace(0, 255, 72)
    n[13, 1], n[14, 1], n[15, 1:3] = np.nan, np.inf, [np.inf, -np.inf]
    out = RUNS[how](nl.Asymmetric(), n)
    codes, scale, zero_point = oracle.asymmetric(n)
    oracle.assert_same(out.scale.reshape(300, 1), scale, "scale")
    np.testing.assert_array_equal(np.asarray(out.zero_point).reshape(300, 1), zero_point)
    oracle.assert_same(out.y, codes)
    assert out.zero_point.dtype == jnp.int32


def test_a_negative_row_uses_all_codes_by_a_wide_zero_point(run):  # CASES: E10
    out = run(nl.Asymmetric(), jnp.array([[-5.0, -1.0, -3.0], [0.0, 255.0, 7.0], [0.0, 0.0, 0.0]]))
    assert out.zero_point.ravel().tolist() == [191, -128, -128]
    assert out.y[:, :2].tolist() == [[-128, 127], [-128, 127], [-128, -128]]


@pytest.mark.parametrize("value", [5.0, -1e-3, 1e10, 3e38, 1e-30, 0.0])
def test_dequantised_asymmetric_codes_are_within_a_step_even_of_constant_rows(value, run):  # CASES: E10
    spread = np.array([[0.0], [1e-7], [1e-4], [1.0]]) * np.linspace(0, 1, 50)
    n = (value * (1 + spread)).clip(-3.3e38, 3.3e38).astype(np.float32)
    out = run(nl.Asymmetric(), n)
    error = abs(np.asarray(nl.dequantize(out), np.float64) - n)
    assert (error <= out.scale).all()


def test_dequantised_asymmetric_codes_are_within_a_step_of_rows_far_from_zero(run):  # CASES: E10
    centre = rows.uniform(-3, 3, (600, 1)) * 10.0 ** rows.integers(-20, 20, (600, 1))
    n = (centre * (1 + rows.uniform(0, 1, (600, 40)) * 2.0 ** -rows.integers(8, 26, (600, 1)))).astype(np.float32)
    out = run(nl.Asymmetric(), n)
    steps = abs(np.asarray(nl.dequantize(out), np.float64) - n) / np.asarray(out.scale)
    assert steps.max() <= 1


def test_asymmetric_scales_are_found_among_measured_entries():
    n = np.array([[1.0, 2.0, np.nan, 1e9], [3.0, 3, 3, 3]], np.float32)
    out = RUNS["jit"](nl.Asymmetric(), n, where=np.array([[True, True, False, False], [False] * 4]))
    oracle.assert_same(out.scale, np.array([[np.float32(1) / np.float32(255)], [2.0**-126]], np.float32))
    assert out.y[0].tolist() == [-128, 127, 0, 127]


# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("quant", [nl.Static(0.1), nl.Dynamic(), nl.Asymmetric(), nl.MX(), nl.Dynamic(group=4)])
def test_empty_arrays_have_empty_codes(quant, shape):
    if getattr(quant, "group", None) and shape[-1] % 4:
        shape = (*shape[:-1], 4)
    out = jax.jit(quantize.apply)(quant, jnp.ones(shape))
    assert out.y.shape == shape and nl.dequantize(out).shape == shape
    assert out.scale.shape[:-1] in ((), shape[:-1]) or out.scale.shape == (1, 1)


def test_float64_is_rounded_to_float32_first(double_precision):
    n = np.random.default_rng(0).normal(size=(20, 64))
    narrow = n.astype(np.float32)
    for dtype in (np.dtype("int8"), numpy_dtype("float8_e4m3fn")):
        out = RUNS["jit"](nl.Dynamic(dtype=dtype), jnp.asarray(n))
        codes, scale = oracle.dynamic(narrow, dtype)
        oracle.assert_same(out.scale, scale, "scale")
        oracle.assert_same(out.y, codes)
    codes, scale, zero_point = oracle.asymmetric(narrow)
    out = RUNS["jit"](nl.Asymmetric(), jnp.asarray(n))
    oracle.assert_same(out.y, codes)
    assert out.zero_point.dtype == jnp.int32
    oracle.assert_same(RUNS["jit"](nl.Static(0.1, 3), jnp.asarray(n)).y, oracle.static(narrow, 0.1, np.int8, 3))
    oracle.assert_same(RUNS["jit"](nl.MX(), jnp.asarray(n)).y, oracle.mx(narrow, numpy_dtype("float4_e2m1fn"))[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_input_is_quantised_as_its_float32_value(dtype):
    n = jnp.asarray(hard_rows()[20:60] % 100, dtype)
    out = RUNS["jit"](nl.Dynamic(), n)
    oracle.assert_same(out.y, oracle.dynamic(np.asarray(n).astype(np.float32), np.int8)[0])
