"""Expressions and tiles of the simulator's program form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim_npu.ir import UNKNOWN, axes_of, dtype_bytes, evaluate, expr, is_known, tile_bytes

LEAVES = st.one_of(st.integers(-9, 9), st.sampled_from([("axis", 0), ("axis", 1)]))
TREES = st.recursive(
    LEAVES, lambda t: st.tuples(st.sampled_from(["add", "sub", "mul", "min", "max", "lt"]), t, t), max_leaves=8
)
PYTHON = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "min": min,
    "max": max,
    "lt": lambda a, b: a < b,
}


def by_hand(tree, point):
    if not isinstance(tree, tuple):
        return tree
    if tree[0] == "axis":
        return point[tree[1]]
    return PYTHON[tree[0]](*(by_hand(t, point) for t in tree[1:]))


def rebuilt(tree):
    """The same tree through `expr`, which folds constants."""
    if not isinstance(tree, tuple) or tree[0] == "axis":
        return tree
    return expr(tree[0], *(rebuilt(t) for t in tree[1:]))


@given(TREES)
def test_folding_and_evaluation_agree_with_python_at_every_grid_point(tree):
    axes = [a.reshape(-1) for a in np.meshgrid(np.arange(3), np.arange(4), indexing="ij")]

    got = np.broadcast_to(evaluate(rebuilt(tree), axes), (12,))

    assert got.tolist() == [by_hand(tree, (i, j)) for i in range(3) for j in range(4)]


def test_integer_division_truncates_as_xla_does():
    assert evaluate(("div", ("axis", 0), 2), [np.array([-3, 3])]).tolist() == [-1, 1]
    assert evaluate(("rem", ("axis", 0), 2), [np.array([-3, 3])]).tolist() == [-1, 1]


def test_an_unknown_operand_makes_the_whole_unknown():
    assert expr("add", ("axis", 0), UNKNOWN) == UNKNOWN and not is_known(UNKNOWN)
    with pytest.raises(ValueError, match="depends on data"):
        evaluate(UNKNOWN, [np.arange(3)])


def test_axes_of_a_tree():
    assert axes_of(("add", ("axis", 1), ("mul", 2, ("axis", 3)))) == {1, 3}


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("int8", 1), ("bool", 1), ("int4", 0.5), ("float8_e5m2", 1)]
)
def test_element_sizes(dtype, size):
    assert dtype_bytes(dtype) == size


@given(st.integers(1, 5), st.integers(1, 300), st.sampled_from(["float32", "float16", "int8"]))
def test_rows_are_padded_to_whole_blocks(rows, width, dtype):
    size = tile_bytes((rows, width), dtype)

    assert size % (32 * rows) == 0
    assert 0 <= size // rows - width * dtype_bytes(dtype) < 32
