"""The coverage table: every listed function exists, every expression runs, the page is the table's."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import normlib

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import ops_nn_coverage
from ops_nn_table import ROWS

COVERED = [row for row in ROWS if row.function is not None]


@pytest.fixture(scope="module")
def names():
    return ops_nn_coverage.examples()


@pytest.mark.parametrize("row", COVERED, ids=lambda row: row.name)
def test_the_call_runs_and_gives_finite_numbers(row, names):
    assert callable(getattr(normlib, row.function))
    assert f"normlib.{row.function}" in row.call or row.function == "Moments"
    out = eval(row.call, dict(names))
    leaves = [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(out)]
    assert leaves and all(np.isfinite(leaf).all() for leaf in leaves)


def test_all_75_operators_are_listed_once_and_70_or_more_have_a_counterpart():
    assert len(ROWS) == len({row.name for row in ROWS}) == 75
    assert len(COVERED) >= 70
    assert all(row.note for row in ROWS if row.function is None)


def test_the_page_is_up_to_date():
    assert ops_nn_coverage.PAGE.read_text(encoding="utf-8") == ops_nn_coverage.page()
