"""Every operator on the tile passes (interpreted, and the simulated core in fp32) against float64 NumPy.

The XLA pass has the same tests in test_matrix.py and test_composites.py. Here each operator runs on each pass once,
with a dtype, a mask and a shape chosen so that all pairs occur; the product is for the night.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference, test_composites
from tests.composites import BY_NAME as COMPOSITE
from tests.composites import COMPOSITES
from tests.matrix import BY_NAME, OPERATORS, inputs
from tests.passes import TILE_PASSES, on
from tests.test_matrix import DTYPES, LARGE_SHAPES, check, value_and_grads

NAMES = [op.name for op in OPERATORS]
VARIANTS = [("f32", False), ("bf16", True), ("f16", False), ("f32", True), ("bf16", False), ("f16", True)]
# by operator and pass in turn: neighbours differ in dtype and mask, and every variant meets every pass
CASES = [
    (name, to, *VARIANTS[(i + 2 * j) % len(VARIANTS)])
    for i, name in enumerate(NAMES) for j, to in enumerate(TILE_PASSES)
]  # fmt: skip
# rows of 1, lanes of 1, one element, no multiple of any tile, more than one tile, a row in chunks
ODD = [
    ("layer_norm", (1, 1)), ("layer_norm", (5, 1)), ("rms_norm", (1, 7)), ("layer_norm", (3, 1025)),
    ("rms_norm", (2, 5000)), ("layer_norm", (1025, 8)), ("batch_norm", (1025, 1, 3)), ("batch_norm", (2, 1, 1)),
    ("group_norm", (1, 65, 4)), ("instance_norm", (2, 97, 31)), ("layer_norm_first", (1, 6)),
    # whole channels: groups of odd widths, more channels than a tile, one channel, samples of one entry, one sample
    ("group_norm", (2, 70, 60)), ("batch_norm", (33, 2, 1200)), ("batch_norm_first", (5, 1, 3, 3)),
    ("batch_norm_first", (40, 33, 1, 1)), ("batch_norm_first", (3, 70, 5, 7)), ("instance_norm", (1, 2, 600)),
    ("batch_norm_first", (1, 3, 2, 2)),
]  # fmt: skip


def check_norm(name, to, dtype, masked, shape=None, **options):
    op = BY_NAME[name] if shape is None else BY_NAME[name].at(shape)
    given = inputs(op, DTYPES[dtype], masked=masked)
    with on(to):
        check(op, given, value_and_grads(op, given, **options))


@pytest.mark.family
@pytest.mark.parametrize(("name", "to", "dtype", "masked"), CASES)
def test_values_and_gradients_match_float64(name, to, dtype, masked):
    check_norm(name, to, dtype, masked)


@pytest.mark.parametrize(("name", "shape", "to"), [
    (*case, TILE_PASSES[i % len(TILE_PASSES)]) for i, case in enumerate(ODD)
])  # fmt: skip
def test_odd_sizes(name, shape, to):  # CASES: D9, D12, D14
    check_norm(name, to, "f32", False, shape)


@pytest.mark.nightly
@pytest.mark.parametrize("to", [*TILE_PASSES, "tpu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_product(name, to, dtype, masked):
    check_norm(name, to, dtype, masked)


@pytest.mark.nightly
@pytest.mark.parametrize("to", [*TILE_PASSES, "tpu"])
@pytest.mark.parametrize(("name", "shape"), [*ODD, *LARGE_SHAPES.items()])
def test_odd_and_large_sizes_on_every_pass(name, shape, to):
    check_norm(name, to, "f32", False, shape)


@pytest.mark.nightly
@pytest.mark.parametrize("to", TILE_PASSES)
@pytest.mark.parametrize("mean", [10.0, 1e3, 1e4])
@pytest.mark.parametrize("name", LARGE_SHAPES)
def test_999_of_1000_entries_are_within_3_ulp(name, mean, to):
    op = BY_NAME[name].at(LARGE_SHAPES[name])
    given = inputs(op, mean=mean)
    with on(to):
        check(op, given, value_and_grads(op, given))


def check_composite(name, to, dtype):
    op = COMPOSITE[name]
    arrays = op.inputs(DTYPES[dtype])
    cts = test_composites.cotangents(op, arrays)
    with on(to):
        test_composites.check(op, arrays, cts, test_composites.value_and_grads(op, arrays, cts))


# formulas in plain JAX, with no norm of the engine inside, are the same on every pass
PLAIN = {"lp_norm", "l2_normalize", "renorm", "weight_norm", "spectral_norm", "packed", "dynamic_tanh", "modulate"}
NORMS = [op for op in COMPOSITES if not any(op.name.startswith(p) for p in PLAIN)]


@pytest.mark.parametrize(("name", "to", "dtype"), [
    (op.name, TILE_PASSES[i % 3], op.dtypes[(i // 3) % len(op.dtypes)])
    for i, op in enumerate(NORMS) if op.own_rule or i % 2  # an operator by the engine's rule: the table above
])  # fmt: skip
def test_composites_match_float64(name, to, dtype):
    check_composite(name, to, dtype)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "to", "dtype"), [
    (op.name, to, dtype) for op in NORMS for to in TILE_PASSES for dtype in op.dtypes
])  # fmt: skip
def test_composites_on_every_pass(name, to, dtype):
    check_composite(name, to, dtype)


# What rows hold


@pytest.mark.parametrize(("name", "to"), [("layer_norm", "cpu"), ("batch_norm", "gpu"), ("group_norm", "npu")])
def test_constant_input_gives_bias_with_finite_gradients(name, to):  # CASES: J1, J4, C14
    op = BY_NAME[name]
    given = inputs(op)
    bias = np.broadcast_to(np.asarray(given.bias).reshape(op.kept_shape), op.shape)
    for value in (1e4 + 0.3, -3e5, 0.0):
        given.x = jnp.full(op.shape, value, jnp.float32)
        with on(to):
            y, dx, _, _ = value_and_grads(op, given)
        bound = abs(np.asarray(given.scale).reshape(op.kept_shape)) * max(1e-9 * abs(value), 1e-6) + abs(bias) * 2e-7
        assert (abs(np.asarray(y, np.float64) - bias) <= bound).all()
        assert np.isfinite(np.asarray(dx)).all()


@pytest.mark.parametrize("to", TILE_PASSES)
def test_a_bad_row_stays_alone(to):
    op = BY_NAME["layer_norm"]
    given = inputs(op)
    ref = op.reference(given.x, given.scale, given.bias)
    given.x = given.x.at[2, 3].set(jnp.nan).at[5, 0].set(jnp.inf).at[7].multiply(1e30)
    with on(to):
        y, dx, _, _ = value_and_grads(op, given)
    good = np.ones(op.shape[0], bool)
    good[[2, 5, 7]] = False
    reference.assert_rounded(np.asarray(y)[good], ref.y[good], ref.y_size[good])
    assert np.isfinite(np.asarray(dx)[good]).all()
    assert not np.isfinite(np.asarray(y)[~good]).any()  # a variance that overflows is never a silent 0


@pytest.mark.parametrize(("name", "to"), [("layer_norm", "gpu"), ("rms_norm", "npu"), ("batch_norm", "cpu")])
def test_huge_values(name, to):  # CASES: J12
    op = BY_NAME[name]
    given = inputs(op, mean=0.0)
    given.x = given.x * 1e10
    with on(to):
        check(op, given, value_and_grads(op, given))
        given.x = given.x * 1e20
        check(op, given, value_and_grads(op, given, rescale=True))


@pytest.mark.parametrize(("name", "to"), list(zip(["layer_norm", "batch_norm", "group_norm"], TILE_PASSES)))
def test_nothing_measured_gives_bias_and_no_gradient(name, to):  # CASES: J21
    op = BY_NAME[name]
    given = inputs(op)
    given.where = np.zeros(op.shape, bool)
    with on(to):
        y, dx, dscale, _ = value_and_grads(op, given)
    np.testing.assert_array_equal(y, np.broadcast_to(np.asarray(given.bias).reshape(op.kept_shape), op.shape))
    assert not np.asarray(dx).any() and not np.asarray(dscale).any()


@pytest.mark.parametrize("to", TILE_PASSES)
@pytest.mark.parametrize("shape", [(0, 37), (3, 0)])
def test_empty_arrays_keep_their_shape(shape, to):  # CASES: D24
    op = BY_NAME["layer_norm"].at(shape)
    given = inputs(op)
    with on(to):
        y, dx, dscale, _ = value_and_grads(op, given)
    assert y.shape == dx.shape == shape and not np.asarray(dscale).any()


@pytest.mark.parametrize(("to", "name", "size"), [
    *itertools.product(["cpu", "gpu"], ["layer_norm", "rms_norm"], [37, 1000]), ("npu", "layer_norm", 37),
    *(pytest.param("cpu", name, 30_000, marks=pytest.mark.nightly) for name in ("layer_norm", "rms_norm")),
])  # fmt: skip
def test_a_row_does_not_change_with_the_rows_beside_it(to, name, size):
    op = BY_NAME[name].at((200, size))
    given = inputs(op, mean=3.0)

    with on(to):
        norm = jax.jit(op.call)
        whole = np.asarray(norm(given.x, given.scale, given.bias))
        for rows in (1, 3, 64):
            np.testing.assert_array_equal(norm(given.x[:rows], given.scale, given.bias), whole[:rows])
