"""Kernels do what they do under Pallas: the fp32 policy against interpret mode and NumPy, feature by feature."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton

from sim_npu import crosscore, demos, grid
from sim_npu.emulation import emulate
from sim_npu.pallas_adapter import UnsupportedKernel
from sim_npu.plan import TilePlan
from sim_npu.precision import PRESETS


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def call(body, shape, grid=(1,), in_specs=None, out_specs=None, **options):
    """A Pallas kernel without defaults that differ between versions."""
    specs = {k: v for k, v in (("in_specs", in_specs), ("out_specs", out_specs)) if v is not None}
    outs = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        shape,
        is_leaf=lambda s: isinstance(s, tuple) and isinstance(s[0], int),
    )
    return lambda *args: pl.pallas_call(body, grid=grid, out_shape=outs, **specs, **options)(*args)


DEMOS = {
    "row norm": (lambda interpret: lambda x, g: demos.rms_norm(x, g, interpret=interpret), (13, 100)),
    "chunked row norm with a masked tail": (
        lambda interpret: (
            lambda x, g: demos.rms_norm_chunked(x, g, plan=TilePlan(rows=4, chunk=64), interpret=interpret)
        ),
        (13, 100),
    ),
    "row norm in two passes over chunks": (
        lambda interpret: (
            lambda x, g: demos.rms_norm_stream(x, g, plan=TilePlan(rows=4, chunk=128), interpret=interpret)
        ),
        (8, 300),
    ),
    "channel partials and merge": (
        lambda interpret: lambda x, g: demos.channel_stats(x, plan=TilePlan(rows=2), interpret=interpret),
        (200, 24),
    ),
}


@pytest.mark.parametrize("name", DEMOS)
def test_demonstration_kernels_agree_with_interpret_mode(name):
    make, shape = DEMOS[name]
    x, g = normal(*shape), normal(shape[1], seed=1)

    got = emulate(make(False), x, g, precision="fp32")

    expected = jax.jit(make(True))(x, g)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-5), got, expected)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_rows_agree_with_interpret_mode_within_one_rounding(dtype):
    x, g = (jnp.asarray(a, dtype) for a in (normal(13, 100), normal(100, seed=1)))

    got = emulate(demos.rms_norm, x, g, precision="fp32")

    assert got.dtype == dtype
    expected = np.asarray(demos.rms_norm(x, g, interpret=True), np.float32)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=float(jnp.finfo(dtype).eps))


def test_masked_tail_through_loads_and_stores_beyond_the_end():
    """Chunks of 32 over 50 elements: the second slice reaches beyond the row, under a mask."""

    def body(x_ref, y_ref):
        def turn(k, total):
            at = pl.ds(k * 32, 32)
            inside = (k * 32 + jnp.arange(32)) < 50
            v = pltriton.load(x_ref.at[0, at], mask=inside, other=0.0)
            pltriton.store(y_ref.at[0, at], v * 2.0, mask=inside)
            return total + jnp.sum(v)

        y_ref[0, 0] = jax.lax.fori_loop(0, 2, turn, 0.0)

    x = normal(3, 50)
    spec = pl.BlockSpec((1, 50), lambda i: (i, 0))

    got = emulate(call(body, (3, 50), (3,), [spec], spec), x)

    expected = 2 * x
    expected[:, 0] = x.sum(1)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("start", [0, 3, 7])
def test_slices_at_any_start_are_not_shifted(start):
    def body(s_ref, x_ref, y_ref):
        y_ref[...] = jnp.zeros_like(y_ref)
        y_ref[pl.ds(s_ref[0], 4)] = x_ref[pl.ds(s_ref[0], 4)] + 1.0

    got = emulate(call(body, (10,)), jnp.array([start], jnp.int32), normal(10))

    expected = np.zeros(10, np.float32)
    expected[start : start + 4] = normal(10)[start : start + 4] + 1
    np.testing.assert_array_equal(got, expected)


def test_grid_sequential_scratch_and_phases():
    """Sum of squares over chunks in scratch, started and finished by pl.when."""

    def body(x_ref, y_ref, total_ref):
        k = pl.program_id(1)

        @pl.when(k == 0)
        def _():
            total_ref[...] = jnp.zeros_like(total_ref)

        total_ref[...] += jnp.sum(x_ref[...] * x_ref[...], axis=1, keepdims=True)

        @pl.when(k == pl.num_programs(1) - 1)
        def _():
            y_ref[...] = jnp.sqrt(total_ref[...])

    x = normal(8, 96)
    fn = call(
        body,
        (8, 1),
        (2, 3),
        [pl.BlockSpec((4, 32), lambda i, k: (i, k))],
        pl.BlockSpec((4, 1), lambda i, k: (i, 0)),
        scratch_shapes=[pltpu.VMEM((4, 1), jnp.float32)],
    )

    np.testing.assert_allclose(emulate(fn, x), np.sqrt((x * x).sum(1, keepdims=True)), rtol=1e-5)


def test_steps_without_a_phase_do_not_run_it():
    def body(x_ref, y_ref):
        k = pl.program_id(0)

        @pl.when(k == 0)
        def _():
            y_ref[...] = x_ref[...]

        @pl.when(k > 0)
        def _():
            y_ref[...] = y_ref[...] * 2.0 + x_ref[...]

    x = normal(4, 8)
    fn = call(body, (1, 8), (4,), [pl.BlockSpec((1, 8), lambda k: (k, 0))], pl.BlockSpec((1, 8), lambda k: (0, 0)))

    expected = x[:1]
    for row in x[1:]:
        expected = expected * 2 + row
    np.testing.assert_array_equal(emulate(fn, x), expected)


def test_blocks_may_be_permuted_squeezed_and_run_over_the_edge():
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] + 10.0 * pl.program_id(0) + pl.program_id(1)

    x = normal(3, 10, 7)
    fn = call(
        body,
        (3, 10, 7),
        (3, 3),
        [pl.BlockSpec((None, 4, 7), lambda i, j: (2 - i, j, 0))],
        pl.BlockSpec((None, 4, 7), lambda i, j: (i, j, 0)),
    )

    expected = x[::-1] + 10 * np.arange(3)[:, None, None] + (np.arange(10) // 4)[None, :, None]
    np.testing.assert_allclose(emulate(fn, x), expected, rtol=1e-6)


@pytest.mark.parametrize("limit", [1, 600])
def test_lanes_that_would_fill_memory_run_in_groups(monkeypatch, limit):
    """Groups of one lane, and of a number that does not divide all lanes."""
    x, g = normal(13, 40), normal(40, seed=1)
    together = emulate(demos.rms_norm, x, g, precision="fp16")
    monkeypatch.setattr(grid, "LANE_BYTES", limit)

    grouped = emulate(lambda x, g: demos.rms_norm(x, g, plan=TilePlan(rows=1)), x, g, precision="fp16")

    np.testing.assert_array_equal(grouped, together)


def test_outputs_in_another_order_than_the_grid():
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    x = normal(4, 6)
    fn = call(
        body,
        (6, 4),
        (2, 3),
        [pl.BlockSpec((2, 2), lambda i, j: (i, j))],
        pl.BlockSpec((2, 2), lambda i, j: (2 - j, 1 - i)),
    )

    expected = x.reshape(2, 2, 3, 2).transpose(2, 0, 1, 3)[::-1, ::-1].transpose(0, 2, 1, 3).reshape(6, 4)
    np.testing.assert_array_equal(emulate(fn, x), expected)


def test_blocks_that_nobody_writes_are_nan_or_the_aliased_input():
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2.0

    x = normal(6, 4)
    specs = [pl.BlockSpec((2, 4), lambda i: (i, 0))]

    def fn(**options):
        return call(body, (6, 4), (2,), specs, specs[0], **options)

    got = np.asarray(emulate(fn(), x))
    aliased = np.asarray(emulate(fn(input_output_aliases={0: 0}), x))

    np.testing.assert_array_equal(got[:4], 2 * x[:4])
    assert np.isnan(got[4:]).all()
    np.testing.assert_array_equal(aliased, np.concatenate([2 * x[:4], x[4:]]))


def test_memory_read_before_it_is_written_is_nan():
    def body(x_ref, y_ref, tile_ref):
        y_ref[...] = x_ref[...] + tile_ref[...]

    fn = call(body, (2, 4), scratch_shapes=[pltpu.VMEM((2, 4), jnp.float32)])

    assert np.isnan(np.asarray(emulate(fn, normal(2, 4)))).all()


def test_while_loops_branches_and_inner_functions():
    def body(x_ref, y_ref):
        @jax.jit
        def collatz(n):
            return jnp.where(n % 2 == 0, n // 2, 3 * n + 1)

        def turn(state):
            n, steps = state
            y_ref[0, 0] = y_ref[0, 0] + 1.0
            return collatz(n), steps + 1

        y_ref[...] = jnp.zeros_like(y_ref)
        n, steps = jax.lax.while_loop(lambda s: s[0] != 1, turn, (jnp.int32(6) + pl.program_id(0), 0))
        y_ref[0, 1] = jax.lax.cond(steps > 10, lambda: x_ref[0, 0] * 2.0, lambda: x_ref[0, 1])
        y_ref[0, 2] = steps.astype(jnp.float32)

    x = normal(2, 4)
    spec = pl.BlockSpec((1, 4), lambda i: (i, 0))

    got = np.asarray(emulate(call(body, (2, 4), (2,), [spec], spec), x))

    np.testing.assert_array_equal(got[:, 0], [8, 16])  # turns from 6 and from 7
    np.testing.assert_array_equal(got[:, 2], [8, 16])
    np.testing.assert_array_equal(got[:, 1], [x[0, 1], x[1, 0] * 2])


def test_pl_loop_strides_and_scoped_tiles():
    def body(x_ref, y_ref):
        y_ref[...] = jnp.zeros_like(y_ref)

        def scoped(tile_ref):
            tile_ref[...] = x_ref[pl.ds(1, 4, stride=2)]

            @pl.loop(0, 3)
            def _(k):
                y_ref[pl.ds(k, 4)] += tile_ref[...]

        pl.run_scoped(scoped, pltpu.VMEM((4,), jnp.float32))

    x = normal(8)
    expected = np.zeros(8, np.float32)
    for k in range(3):
        expected[k : k + 4] += x[1:8:2]

    np.testing.assert_array_equal(emulate(call(body, (8,)), x), expected)


def test_index_maps_may_read_prefetched_scalars():
    def body(order_ref, x_ref, y_ref):
        y_ref[...] = x_ref[...] + order_ref[pl.program_id(0)].astype(jnp.float32)

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(3,),
        in_specs=[pl.BlockSpec((2, 4), lambda i, order: (order[i], 0))],
        out_specs=pl.BlockSpec((2, 4), lambda i, order: (i, 0)),
    )
    x, order = normal(6, 4), np.array([2, 0, 1], np.int32)

    def fn(order, x):
        return pl.pallas_call(body, grid_spec=spec, out_shape=jax.ShapeDtypeStruct((6, 4), jnp.float32))(order, x)

    expected = x.reshape(3, 2, 4)[order] + order[:, None, None].astype(np.float32)
    np.testing.assert_array_equal(emulate(fn, order, x), expected.reshape(6, 4))


def test_a_matrix_product_accumulates_in_float32():
    def body(a_ref, b_ref, y_ref):
        y_ref[...] = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

    a, b = normal(8, 64), normal(64, 16, seed=1)
    fn = call(body, (8, 16))

    np.testing.assert_allclose(emulate(fn, a, b), a @ b, rtol=1e-5, atol=1e-5)
    half = np.asarray(emulate(fn, a, b, precision="fp16_fp32acc"))
    narrow = a.astype(np.float16).astype(np.float64) @ b.astype(np.float16).astype(np.float64)
    np.testing.assert_allclose(half, narrow, rtol=1e-5, atol=1e-5)


def test_cumulative_sums_products_and_integer_sums():
    def body(x_ref, y_ref):
        v = x_ref[...]
        y_ref[0:2] = jnp.cumsum(v, axis=1)
        y_ref[2:4] = jnp.broadcast_to(jnp.prod(v, axis=1, keepdims=True), v.shape)
        y_ref[4:6] = jnp.broadcast_to(jnp.sum((v > 0).astype(jnp.int32)).astype(jnp.float32), v.shape)

    x = normal(2, 8)
    got = np.asarray(emulate(call(body, (6, 8)), x))

    np.testing.assert_array_equal(got[:2], np.cumsum(x, axis=1))
    np.testing.assert_allclose(got[2:4, 0], np.prod(x, axis=1), rtol=1e-6)
    assert (got[4:] == (x > 0).sum()).all()


def atomic_sum(x):
    """Every step adds its row into one block, atomically."""

    def body(x_ref, start_ref, y_ref):
        pltriton.atomic_add(y_ref, (0, slice(None)), x_ref[0, :])

    row = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    whole = pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))
    return call(body, (1, x.shape[1]), (x.shape[0],), [row, whole], whole, input_output_aliases={1: 0})(
        x, jnp.zeros((1, x.shape[1]), jnp.float32)
    )


def test_atomic_adds_depend_on_the_order_of_arrival():
    x = normal(48, 16).astype(np.float16).astype(np.float32)

    def run(seed):
        return np.asarray(emulate(atomic_sum, x, precision=dataclasses.replace(PRESETS["fp16"], arrival_seed=seed)))

    in_grid_order = np.zeros(16, np.float16)
    for row in x.astype(np.float16):
        in_grid_order = in_grid_order + row
    np.testing.assert_array_equal(run(None)[0], in_grid_order.astype(np.float32))
    np.testing.assert_array_equal(run(1), run(1))
    assert (run(1) != run(2)).any()
    np.testing.assert_allclose(run(1)[0], x.sum(0), atol=0.1)


def test_atomic_adds_arrive_as_in_the_sums_across_cores():
    x = normal(48, 16).astype(np.float32)

    for seed in (0, 7):
        emulated = emulate(atomic_sum, x, precision=dataclasses.replace(PRESETS["fp32"], arrival_seed=seed))
        np.testing.assert_array_equal(np.asarray(emulated)[0], crosscore.atomic_sum(x, seed=seed))


def test_an_unknown_primitive_is_named_with_its_line():
    def body(x_ref, y_ref):
        y_ref[...] = jax.lax.top_k(x_ref[...], 4)[0]

    with pytest.raises(UnsupportedKernel, match=r"primitive `top_k` at test_emulate_kernels.py:\d+ \(body\)"):
        emulate(call(body, (2, 4)), normal(2, 8))


def test_float64_has_no_place_on_the_core(double_precision):
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...].astype(jnp.float32)

    with pytest.raises(TypeError, match="float64, which an AI Core does not have"):
        emulate(call(body, (2, 4)), np.ones((2, 4), np.float64))
