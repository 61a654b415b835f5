"""Sums in a stated order equal the same sums written out in NumPy, bit for bit, in fp32 and fp16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sim_npu.reduction import ordered_sum
from sim_npu.rounding import round_to

TYPES = {
    "fp32": (np.float32, jnp.add, 4),
    "fp16": (np.float16, lambda a, b: round_to(a + b, "fp16"), 2),
}


def sequential(rows):
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def tree(rows):
    rows = list(rows)
    while len(rows) > 1:
        rows += [np.zeros_like(rows[0])] * (len(rows) % 2)
        rows = [a + b for a, b in zip(rows[0::2], rows[1::2])]
    return rows[0]


def filled(rows, multiple):
    return np.concatenate([rows, np.zeros((-len(rows) % multiple, *rows.shape[1:]), rows.dtype)])


def lanes64(rows):
    return tree(sequential(filled(rows, 64).reshape(-1, 64, *rows.shape[1:])))


def repeats(rows):
    lanes = 256 // rows.dtype.itemsize
    return sequential([tree(r) for r in filled(rows, lanes).reshape(-1, lanes, *rows.shape[1:])])


def halves(rows, left):
    n = len(rows)
    if n > left:
        power = 2 ** int(np.floor(np.log2(n)))
        rows = np.concatenate([rows[: n - power] + rows[power:], rows[n - power : power]])
        while len(rows) > left:
            rows = rows[: len(rows) // 2] + rows[len(rows) // 2 :]
    return rows


ALONG_LANES = {
    "sequential": sequential,
    "lanes64": lanes64,
    "tree": tree,
    "repeats": repeats,
    "halving": lambda rows: tree(halves(rows, 64)),
}
ACROSS_ROWS = {
    "sequential": sequential,
    "lanes64": sequential,
    "tree": tree,
    "repeats": sequential,
    "halving": lambda rows: halves(rows, 1)[0],
}


def run(x, axes, order, type_name):
    _, add, itemsize = TYPES[type_name]
    return np.asarray(jax.jit(lambda x: ordered_sum(x, axes, order=order, add=add, itemsize=itemsize))(x))


@pytest.mark.parametrize("length", [1, 63, 300])
@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("order", ALONG_LANES)
def test_sum_along_lanes_is_in_the_stated_order(order, type_name, length):
    x = np.random.default_rng(length).standard_normal((5, length)).astype(TYPES[type_name][0])

    got = run(x.astype(np.float32), [1], order, type_name)

    np.testing.assert_array_equal(got, ALONG_LANES[order](x.T).astype(np.float32))


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("order", ACROSS_ROWS)
def test_sum_over_rows_adds_whole_rows(order, type_name):
    x = np.random.default_rng(1).standard_normal((21, 40)).astype(TYPES[type_name][0])

    got = run(x.astype(np.float32), [0], order, type_name)

    np.testing.assert_array_equal(got, ACROSS_ROWS[order](x).astype(np.float32))


@pytest.mark.parametrize("order", ["sequential", "repeats"])
def test_several_axes_count_as_one_with_the_last_fastest(order):
    x = np.random.default_rng(2).standard_normal((3, 4, 50)).astype(np.float32)

    got = run(x, [0, 2], order, "fp32")

    np.testing.assert_array_equal(got, ALONG_LANES[order](x.transpose(0, 2, 1).reshape(150, 4)))


def test_orders_differ_where_order_matters():
    x = np.random.default_rng(3).standard_normal((1, 1024)).astype(np.float16).astype(np.float32)

    sums = {order: float(run(x, [1], order, "fp16")[0]) for order in ALONG_LANES}

    assert len(set(sums.values())) >= 3, sums


def test_native_is_xlas_own_sum_and_nothing_sums_to_zero():
    x = np.ones((2, 7), np.float32)

    assert run(x, [1], "native", "fp32").tolist() == [7.0, 7.0]
    assert run(x[:, :0], [1], "lanes64", "fp32").tolist() == [0.0, 0.0]
