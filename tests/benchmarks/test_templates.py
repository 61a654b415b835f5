"""The page of templates: ops-nn's rules as restated, and a choice of ours that is never slower."""

import pytest

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
