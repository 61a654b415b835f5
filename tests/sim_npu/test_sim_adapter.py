"""Reading pallas_call: the same program on every JAX version, nothing run, errors that name primitive and line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from sim_kernels import CASES, GOLDEN, S, golden_text, mixed

from sim_npu import TileProgram, UnsupportedKernel, programs_of, simulate
from sim_npu.pallas_adapter import cond_parts, kernel_calls, ref_index, scan_parts, trace

pytestmark = pytest.mark.family


@pytest.mark.parametrize("name", CASES)
def test_a_traced_kernel_gives_the_golden_program(name):
    assert golden_text(name) == (GOLDEN / f"{name}.json").read_text()


@pytest.mark.parametrize("name", CASES)
def test_a_program_survives_json(name):
    fn, args = CASES[name]
    for program in programs_of(fn, *args):
        assert TileProgram.from_json(program.to_json()) == program


def test_kernel_calls_describe_blocks_scratch_and_semantics():
    (call,) = kernel_calls(*_flat("mixed"))

    assert call.name == "mixed" and call.grid == (4, 2) and call.semantics is None
    x, s = call.inputs
    assert (x.array_shape, x.block_shape, x.ref_shape, x.unit) == ((4, 4, 512), (None, 4, 512), (4, 512), "block")
    assert s.space == "scalar" and x.space == "ub"
    assert call.outputs[0].role == "out" and call.outputs[0].dtype == jnp.bfloat16
    assert call.scratch[0].shape == (1, 1)
    assert len(call.jaxpr.invars) == 4


def _flat(name):
    fn, args = CASES[name]
    return (fn, *args)


def test_kernels_inside_jit_and_custom_derivatives_are_found_in_order():
    @jax.custom_vjp
    def f(x, s):
        return mixed(x, s)

    f.defvjp(lambda x, s: (mixed(x, s), None), lambda _, g: (g[:, :4], jnp.zeros(2)))

    calls = kernel_calls(jax.jit(lambda x, s: f(jax.jit(mixed)(x, s)[:, :4], s)), *CASES["mixed"][1])

    assert [c.name for c in calls] == ["mixed", "mixed"]


def test_scan_parts_count_constants_carries_and_inputs():
    def f(a, b):
        return jax.lax.scan(lambda c, x: ((c[0] + 1, c[1] * a + x), c[1]), (0, b), jnp.ones((5, 3)))

    eqn = next(e for e in trace(f, 1.0, jnp.ones(3)).jaxpr.eqns if e.primitive.name == "scan")
    parts = scan_parts(eqn)

    assert (parts.num_consts, parts.num_carry, parts.num_xs, parts.length) == (1, 2, 1, 5)
    assert len(parts.body.jaxpr.invars) == 4


def test_cond_parts_and_ref_index_of_a_kernel():
    (call,) = kernel_calls(*_flat("mixed"))
    cond = next(e for e in call.jaxpr.eqns if e.primitive.name == "cond")
    swap = next(e for e in call.jaxpr.eqns if e.primitive.name == "swap")

    assert len(cond_parts(cond)) == 2
    assert ref_index(swap).dims == ((0, 1, 1), (0, 1, 1)) and ref_index(swap).value is not None


def _one_step(kernel, *, shape=(8, 128), **kwargs):
    return lambda x: pl.pallas_call(kernel, out_shape=S(shape, x.dtype), **kwargs)(x)


def test_a_loop_of_unknown_length_is_refused_with_its_line():
    def kernel(x_ref, y_ref):
        y_ref[...] = jax.lax.while_loop(lambda v: jnp.max(v) < 9.0, lambda v: v * 2.0, x_ref[...])

    with pytest.raises(UnsupportedKernel, match=r"`while` at test_sim_adapter.py:\d+ \(kernel\).*constant bounds"):
        simulate(_one_step(kernel), S((8, 128), "float32"))


def test_a_ref_the_kernel_copies_itself_is_refused():
    def kernel(x_ref, y_ref):
        pltpu.sync_copy(x_ref, y_ref)

    with pytest.raises(UnsupportedKernel, match="builder"):
        simulate(_one_step(kernel, in_specs=[pl.BlockSpec(memory_space=pl.ANY)]), S((8, 128), "float32"))


def test_a_function_without_kernels_is_refused_and_pointed_to_simulate_step():
    with pytest.raises(ValueError, match="calls no Pallas kernel.*sim_npu.simulate_step"):
        simulate(lambda x: x + 1, S((8,), "float32"))


def test_an_operation_without_a_rule_is_listed_not_hidden():
    def kernel(x_ref, y_ref):
        y_ref[...] = jnp.cumsum(x_ref[...], axis=1)

    report = simulate(_one_step(kernel), S((8, 128), "float32"))

    assert [op for op, _ in report.unknown] == ["cumsum"]
    assert "unknown operation `cumsum` at test_sim_adapter.py" in str(report)


def test_tracing_runs_nothing():
    ran = []

    def fn(x):
        jax.debug.callback(lambda v: ran.append(np.asarray(v).sum()), x)
        return mixed(x, jnp.ones(2))

    assert len(kernel_calls(fn, CASES["mixed"][1][0])) == 1 and ran == []


def test_masked_loads_and_stores_are_selections():
    plgpu = pytest.importorskip("jax.experimental.pallas.triton")

    def kernel(x_ref, y_ref):
        inside = jax.lax.broadcasted_iota(jnp.int32, (8, 128), 1) < 100
        y = plgpu.load(x_ref.at[:, :], mask=inside, other=0.0) * 2.0
        plgpu.store(y_ref.at[:, :], y, mask=inside)

    (program,) = programs_of(_one_step(kernel), S((8, 128), "float32"))

    ops = [(s.op, s.kind) for s in program.body]
    assert ("masked load", "select") in ops and ("masked store", "select") in ops and not program.unknown()
    assert program.body[-1].out == "out0"


def test_prefetched_scalars_are_unknown_and_said_so():
    def fn(index, x):
        def kernel(index_ref, x_ref, y_ref):
            y_ref[...] = x_ref[...] * 2.0

        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(8,),
            in_specs=[pl.BlockSpec((8, 128), lambda i, s: (s[i], 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, s: (i, 0)),
        )
        return pl.pallas_call(kernel, grid_spec=spec, out_shape=S((64, 128), jnp.float32))(index, x)

    (k,) = simulate(fn, S((8,), "int32"), S((64, 128), "float32")).kernels

    assert k.traffic.reads == 64 * 128 * 4 and "Scalar-prefetch" in k.program.notes[0]


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax"])
def test_kernels_written_by_others_are_read(name):
    module = pytest.importorskip(f"jax.experimental.pallas.ops.gpu.{name}")
    fn, x = getattr(module, name), S((64, 1024) if name == "softmax" else (4, 16, 1024), "float32")
    weights = () if name == "softmax" else (S((1024,), "float32"),) * 2

    report = simulate(lambda *a: fn(*a), x, *weights)

    assert report.kernels[0].traffic.writes == 64 * 1024 * 4 and not report.unknown


def test_work_outside_the_kernels_is_named_not_hidden():
    report = simulate(lambda x, s: jnp.tanh(mixed(x * 2, s)) * 3 * 4, *CASES["mixed"][1])

    (note,) = [n for n in report.kernels[0].program.notes if "Outside" in n]
    assert "mul (3), tanh" in note and note.split("\n")[0] in str(report)


@pytest.mark.parametrize("control", ["scan", "cond"])
def test_a_kernel_in_a_loop_or_branch_is_refused_with_the_remedy(control):
    def looped(x, s):
        return jax.lax.fori_loop(0, 3, lambda i, c: c + mixed(x, s), jnp.zeros((4, 8, 512), jnp.bfloat16))

    def chosen(x, s):
        return jax.lax.cond(s[0] > 0, lambda: mixed(x, s), lambda: jnp.zeros((4, 8, 512), jnp.bfloat16))

    with pytest.raises(UnsupportedKernel, match=f"a kernel inside `{control}` at test_sim_adapter.py.*simulate_step"):
        simulate(looped if control == "scan" else chosen, *CASES["mixed"][1])
