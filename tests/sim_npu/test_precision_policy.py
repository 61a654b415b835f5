"""Policies: what each preset rounds to, and which arguments are refused."""

import dataclasses

import pytest

from sim_npu.precision import ORDERS, PRESETS, Kind, PrecisionPolicy, resolve


def test_kinds_join_to_what_a_result_is_made_of():
    assert Kind.CONSTANT | Kind.INPUT == Kind.INPUT
    assert Kind.STATISTIC | Kind.INPUT == Kind.NORMALISED
    assert Kind.NORMALISED | Kind.STATISTIC == Kind.NORMALISED


@pytest.mark.parametrize(
    "preset, constant, statistic, data, normalised",
    [
        ("fp32", "fp32", "fp32", "fp32", "fp32"),
        ("fp16_fp32acc", "fp32", "fp32", "fp16", "fp16"),
        ("bf16_fp32acc", "fp32", "fp32", "bf16", "bf16"),
        ("fp16_tree", "fp32", "fp16", "fp16", "fp16"),
    ],
)
def test_presets_round_each_kind_to_its_type(preset, constant, statistic, data, normalised):
    policy = PRESETS[preset]

    assert [policy.format_of(k) for k in Kind.__members__.values()] == [constant, statistic, data, normalised]


@pytest.mark.parametrize("dtypes, data, added", [(("float16",), "fp16", "fp16"), (("bfloat16",), "bf16", "fp32")])
def test_ascend_a2_takes_its_type_from_the_inputs_and_widens_bf16(dtypes, data, added):
    policy = PRESETS["ascend_a2"].for_inputs((*dtypes, "float32", "int32"))

    assert policy.data == data
    assert policy.format_of(Kind.INPUT) == added
    assert policy.format_of(Kind.INPUT, feeds_sum=True) == "fp32"
    assert policy.format_of(Kind.NORMALISED) == data


def test_float32_inputs_leave_ascend_a2_in_float32():
    assert PRESETS["ascend_a2"].for_inputs(("float32",)).data == "fp32"


def test_cast_mode_is_for_formats_without_arithmetic():
    policy = PrecisionPolicy(data="bf16", cast="floor")

    assert [policy.arithmetic_mode(f) for f in ("fp16", "fp32", "bf16", "e4m3")] == ["rint", "rint", "floor", "floor"]


@pytest.mark.parametrize(
    "precision, order, chip, expected",
    [
        (None, None, None, PRESETS["fp32"]),
        (None, None, "910b2", PRESETS["ascend_a2"]),
        (None, None, "950", PRESETS["ascend_950"]),
        (None, "tree", "910b2", dataclasses.replace(PRESETS["ascend_a2"], order="tree")),
        ("fp16", None, "910b2", dataclasses.replace(PRESETS["fp16"], order="repeats")),
        ("fp16", None, "310p", dataclasses.replace(PRESETS["fp16"], order="tree")),
        ("fp16", "sequential", "310p", PRESETS["fp16_sequential"]),
        (PRESETS["fp16_tree"], None, None, PRESETS["fp16_tree"]),
    ],
)
def test_arguments_of_emulate_resolve_to_a_policy(precision, order, chip, expected):
    assert resolve(precision, order, chip) == expected


def test_three_orders_of_all_fp16_are_offered():
    for order in ("sequential", "lanes64", "tree"):
        policy = PRESETS[f"fp16_{order}"]
        assert (policy.data, policy.accumulator, policy.order) == ("fp16", "fp16", order)
        assert order in ORDERS


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"data": "fp8"}, "`data` must be one of .*e4m3, input; got 'fp8'"),
        ({"accumulator": "input"}, "`accumulator` must be one of .*e4m3; got 'input'"),
        ({"order": "random"}, "`order` must be one of sequential.*; got 'random'"),
        ({"cast": "up"}, "`cast` must be one of rint.*; got 'up'"),
        ({"overflow": "wrap"}, "`overflow` must be one of inf.*; got 'wrap'"),
        ({"approximate_bits": 0}, "`approximate_bits` must be a whole number from 1 to 22 or None; got 0"),
    ],
)
def test_unknown_fields_are_named(fields, match):
    with pytest.raises(ValueError, match=match):
        PrecisionPolicy(**fields)


@pytest.mark.parametrize("precision", ["fp15", 16])
def test_unknown_precision_is_named(precision):
    with pytest.raises(ValueError, match=f"`precision` must be .*; got {precision!r}"):
        resolve(precision, None, None)


def test_unknown_order_and_chip_are_named():
    with pytest.raises(ValueError, match="`order` must be one of .*; got 'any'"):
        resolve("fp16", "any", None)
    with pytest.raises(ValueError, match="`chip` must be one of .*; got '911'"):
        resolve("fp16", None, "911")
