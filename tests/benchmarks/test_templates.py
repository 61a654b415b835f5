"""The page of templates: ops-nn's rules as restated, and a choice of ours that is never slower."""

import dataclasses

import pytest

from benchmarks import channel_templates
from benchmarks.templates import PATH, RULES, page, rows


@pytest.mark.parametrize(
    ("operator", "d", "dtype", "template"),
    [
        ("RmsNorm", 2000, "bfloat16", "MERGE_N"),
        ("RmsNorm", 12288, "bfloat16", "NORMAL"),
        ("RmsNorm", 12288, "float32", "SPLIT_D"),
        ("LayerNormV4", 40, "float32", "Transpose"),
        ("LayerNormV4", 1280, "float32", "MergeN"),
        ("LayerNormV4", 16384, "float32", "Common"),
        ("AddRmsNorm", 12096, "bfloat16", "NORMAL"),
        ("AddRmsNorm", 12097, "bfloat16", "CUT_D"),
    ],
)
def test_the_rules_choose_by_length_as_ops_nn_does(operator, d, dtype, template):
    assert RULES[operator].choose(4096, d, dtype)[0] == template


def test_our_choice_is_not_slower_by_more_than_its_grid():
    found = list(rows(lengths=(256, 8192), dtypes=("bfloat16",)))

    assert [r.operator for r in found] == ["RmsNorm"] * 2 + ["LayerNormV4"] * 2 + ["AddRmsNorm"] * 2
    for r in found:
        assert r.our_us <= 1.06 * min(r.their_us or r.our_us, r.default_us)
    assert "| RmsNorm | bfloat16 | 256 | MERGE_N |" in page(found, "910b2")


def test_the_page_has_every_operator():
    text = PATH.read_text()
    for name in RULES:
        assert f"| {name} | bfloat16 |" in text and f"| {name} | float32 |" in text


@pytest.mark.parametrize(("rule", "shape", "template", "way"), [
    ("batch_norm_a2", (2, 64, 4095), "FullReduce", "kept"),
    ("batch_norm_a2", (2, 64, 4096), "Welford", "streamed"),
    ("batch_norm_950", (98, 256), "RA full reduce", "kept"),
    ("batch_norm_950", (100_000, 256), "RA block split R", "in parts"),
    ("batch_norm_950", (4097, 512), "RA block split R", "in parts"),
    ("batch_norm_950", (4096, 512), "RA Welford", "streamed"),
    ("batch_norm_950", (64, 24, 3136), "RAR block split R", "in parts"),
    ("batch_norm_950", (64, 25, 3136), "RAR Welford", "streamed"),
    ("batch_norm_grad_a2", (2, 64, 6000), "FullLoad", "kept"),
    ("batch_norm_grad_a2", (2, 64, 6001), "SplitLoad", "streamed"),
    ("batch_norm_grad_a2", (2, 96, 10_000), "SplitLoad", "streamed"),
    ("batch_norm_grad_a2", (2, 64, 10_000), "SplitLoad across cores", "in parts"),
    ("batch_norm_grad_950", (98, 2048), "RA full load", "kept"),
    ("batch_norm_grad_950", (1568, 1568), "RA split R", "in parts"),
    ("batch_norm_grad_950", (1568, 2048), "RA recompute", "streamed"),
    ("instance_norm_950", (2, 64, 1280), "ARA full reduce", "kept"),
    ("instance_norm_950", (2, 16_384, 1280), "ARA Welford", "streamed"),
    ("group_norm_silu_a2", (2, 320, 4096), "SMALL_SHAPE", "kept"),
    ("group_norm_silu_a2", (2, 320, 4112), "HIGH_PERF", "streamed"),
])  # fmt: skip
def test_the_rules_choose_by_channels_as_ops_nn_does(rule, shape, template, way):
    assert getattr(channel_templates, rule)(shape) == (template, way)


def test_our_way_over_channels_is_near_the_best():
    rule = dataclasses.replace(channel_templates.RULES[1], shapes=((98, 2048), (6272, 256)))
    found = list(channel_templates.rows("910b2", [rule]))

    assert [(r.theirs, r.ours) for r in found] == [("RA full reduce", "kept"), ("RA block split R", "in parts")]
    for r in found:
        assert r.best_us <= r.our_us <= 1.1 * min(r.their_us or r.our_us, r.parts_us)
    assert "| BatchNormV3, 950 | 98 × 2048 | RA full reduce |" in channel_templates.section(found)


def test_the_page_has_every_operator_over_channels():
    text = PATH.read_text()
    for rule in channel_templates.RULES:
        for shape in rule.shapes:
            assert f"| {rule.operator} | {' × '.join(map(str, shape))} |" in text
