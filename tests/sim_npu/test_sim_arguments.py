"""What a hostile caller gets: every mistake is refused, and named with what was seen and what was expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import sim_npu
from sim_npu import CapacityError, PrecisionPolicy, TilePlan, UnsupportedKernel, demos, emulate, get_chip, simulate
from sim_npu.builder import Builder

ROWS = ((64, 128), "float32"), ((128,), "float32")
X = np.arange(128, dtype=np.float32).reshape(16, 8)
A2 = get_chip("910b2")


def doubled(into, out, steps=8):
    """y = 2 x by blocks of two rows, which index maps choose."""

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    def fn(x):
        return pl.pallas_call(
            kernel,
            name="doubled",
            grid=(steps,),
            in_specs=[pl.BlockSpec((2, 8), into)],
            out_specs=pl.BlockSpec((2, 8), out),
            out_shape=jax.ShapeDtypeStruct((16, 8), x.dtype),
        )(x)

    return fn


def straight(i):
    return i, 0


def shown(kernel, dtype="float32"):
    return lambda x: pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, dtype))(x)


CALLS = {
    "plan": (lambda: simulate(demos.rms_norm, *ROWS, plan="rows 8"), "`plan` must be a TilePlan or None; got 'rows 8'"),
    "depth": (
        lambda: simulate(demos.rms_norm, *ROWS, plan=TilePlan(queue_depth=9)),
        "`queue_depth` of the plan must be at most 8, .* of 910b2 has; got 9",
    ),
    "profile": (lambda: simulate(demos.rms_norm, *ROWS, profile=None), "`profile` must be 'ideal'.*got None"),
    "no rows": (
        lambda: simulate(demos.rms_norm, ((0, 8), "float32"), ((8,), "float32")),
        r"`args\[0\]` must have at least one element .*\(0, 8\)",
    ),
    "negative": (
        lambda: simulate(demos.rms_norm, ROWS[0], ((-8,), "float32")),
        r"`args\[1\]` must be an array.*\(-8,\) has a negative size",
    ),
    "fraction": (
        lambda: simulate(demos.rms_norm, ((4.5, 8), "float32")),
        r"`args\[0\]`.*\(4.5, 8\) is not made of whole",
    ),
    "dtype": (lambda: simulate(demos.rms_norm, ((4, 8), "float99")), r"`args\[0\]` must be an array.*float99"),
    "function": (lambda: simulate(None, *ROWS), "`fn` must be a function .* got None"),
    "no programs": (lambda: simulate([]), r"`fn` must be a function .* got \[\]"),
    "scale": (
        lambda: simulate(demos.rms_norm, ROWS[0], ((100,), "float32")),
        r"`scale` must have shape \(128,\), x's last axis; got \(100,\)",
    ),
    "axes": (lambda: simulate(demos.rms_norm, *ROWS[::-1]), r"`x` must be \[N, D\]; got shape \(128,\)"),
    "truths": (
        lambda: simulate(demos.rms_norm, ((64, 128), "bool"), ROWS[1]),
        "`x` must be of a float or integer dtype; got bool",
    ),
    "bias": (
        lambda: simulate(demos.group_norm, ((2, 4, 8), "float32"), *[((3,), "float32")] * 2, groups=2),
        r"`scale` must have shape \(4,\), x's channels; got \(3,\)",
    ),
    "groups": (
        lambda: simulate(demos.group_norm, ((2, 4, 8), "float32"), *[((4,), "float32")] * 2, groups=0),
        "`groups` must divide the 4 channels; got 0",
    ),
    "gradient": (
        lambda: simulate(demos.channel_grad, ((2, 4, 9), "float32"), ((2, 4, 8), "float32"), *[((4,), "float32")] * 3),
        r"`dy` must have shape \(2, 4, 8\), that of x; got \(2, 4, 9\)",
    ),
    "plans": (lambda: sim_npu.best_plan(demos.rms_norm, *ROWS, plans=TilePlan()), "`plans` must be TilePlans"),
    "empty plans": (lambda: sim_npu.best_plan(demos.rms_norm, *ROWS, plans=[]), "`plans` must be .* got none"),
    "top": (lambda: sim_npu.rank_plans(demos.rms_norm, *ROWS, plans=[TilePlan()]).table(0), "`top` must be at least 1"),
    "one report": (lambda: sim_npu.compare(simulate(demos.rms_norm, *ROWS)), "`reports` must be a list of reports"),
    "no report": (lambda: sim_npu.compare([3]), r"`reports\[0\]` must be a SimReport.*got 3"),
    "statistics": (
        lambda: emulate(demos.rms_norm, X, X[0], statistics=(2,)),
        r"`statistics` must hold positions of the 2 arguments, from 0; got \(2,\)",
    ),
    "emulated": (lambda: emulate(None, X), "`fn` must be a function of arrays; got None"),
    "emulated without rows": (lambda: emulate(demos.rms_norm, X[:0], X[0]), r"`args\[0\]` must have at least one"),
    "block in": (
        lambda: simulate(doubled(lambda i: (i - 1, 0), straight), X),
        "index map of block `in0` must stay within 0 and 7 along axis 0 .*; it gives -1",
    ),
    "block out": (
        lambda: emulate(doubled(straight, lambda i: (i + 1, 0)), X),
        "index map of block `.*` must stay within 0 and 7 along axis 0 .*; it gives 8",
    ),
    "list": (
        lambda: simulate(demos.rms_norm, ([64, 128], "float32")),
        r"`args\[0\]` must be an array.*'float32' is no array; a shape beside a dtype must be a tuple",
    ),
    "step": (lambda: sim_npu.simulate_step(None, X), "`fn` must be a function of arrays; got None"),
    "step's cache": (lambda: sim_npu.simulate_step(jnp.sin, X, cache="hot"), "`cache` must be one of .* got 'hot'"),
    "step's fusing": (lambda: sim_npu.simulate_step(jnp.sin, X, fuse="no"), "`fuse` must be True or False; got 'no'"),
    "step's depth": (
        lambda: sim_npu.simulate_step(jnp.sin, X, plan=TilePlan(queue_depth=9)),
        "`queue_depth` of the plan must be at most 8",
    ),
    "steps": (lambda: sim_npu.compare_steps(1, 2), "`before` must be a StepReport.*got 1"),
    "bits": (lambda: PrecisionPolicy(approximate_bits=2.5), "`approximate_bits` must be a whole number.*got 2.5"),
    "seed": (lambda: PrecisionPolicy(arrival_seed="a"), "`arrival_seed` must be a whole number.*got 'a'"),
    "flag": (lambda: PrecisionPolicy(int8_chain="yes"), "`int8_chain` must be True or False; got 'yes'"),
    "data": (lambda: PrecisionPolicy(data=16), "`data` must be one of fp32, .*input; got 16"),
    "rows": (lambda: TilePlan(rows=1.5), "`rows` of a TilePlan must be a whole number .* got 1.5"),
    "true": (lambda: TilePlan(queue_depth=True), "`queue_depth` of a TilePlan must be a whole number .* got True"),
    "in place": (lambda: TilePlan(in_place="no"), "`in_place` of a TilePlan must be True or False; got 'no'"),
    "half a core": (lambda: A2.replace(cores=2.5), "`cores` of a ChipSpec must be a positive whole number; got 2.5"),
    "no L2": (lambda: A2.replace(l2_bytes=0), "`l2_bytes` of a ChipSpec must be a positive whole number; got 0"),
    "no rate": (lambda: A2.replace(mte3_bytes_per_cycle=0), "`mte3_bytes_per_cycle` of a ChipSpec must be .* got 0"),
    "launch": (lambda: A2.replace(launch_us=-5), "`launch_us` of a ChipSpec must be a number, 0 or more; got -5"),
    "classes": (lambda: A2.replace(cycles_per_repeat={"arith": 1.0}), "`cycles_per_repeat` of a ChipSpec must hold"),
}


@pytest.mark.parametrize("name", CALLS)
def test_mistakes_are_named(name):
    call, message = CALLS[name]

    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("call", [simulate, sim_npu.best_plan, sim_npu.explain, emulate, sim_npu.simulate_step])
def test_arguments_that_the_function_does_not_take_are_named(call):
    with pytest.raises(TypeError, match=r"`fn` \(rms_norm\) cannot be called .*missing a required argument: 'scale'"):
        call(demos.rms_norm, X)


def test_what_is_no_array_cannot_be_emulated():
    with pytest.raises(TypeError, match=r"`args\[1\]` must be an array.*ShapeDtypeStruct"):
        emulate(demos.rms_norm, X, jax.ShapeDtypeStruct((8,), jnp.float32))


def test_a_written_program_takes_no_arguments():
    b = Builder("copy", grid=(2,))
    x = b.queue_in("x", (64,), "float16", array=(128,))
    b.data_copy(x)
    program = b.build()

    assert simulate(program).total_us > 0
    with pytest.raises(ValueError, match="`args` and keywords are a function's.*got 1 arguments and eps"):
        simulate(program, X, eps=1.0)


def test_arrays_beyond_the_chips_memory_are_refused_unless_it_has_more():
    args = ((1 << 20, 1 << 15), "float32"), ((1 << 15,), "float32")  # 137 GB
    plan = TilePlan(rows=1, chunk=4096, residency="stream")

    with pytest.raises(CapacityError, match="`args`: the arrays of kernel `rms_norm_stream` take at least 137.4 GB"):
        simulate(demos.rms_norm, *args, plan=plan)
    small = simulate(demos.rms_norm, *ROWS, chip=A2.replace(hbm_bytes=32 * 1024))
    assert small.total_us > 0
    with pytest.raises(CapacityError, match="has 0.0 GB of memory"):
        simulate(demos.rms_norm, *ROWS, chip=A2.replace(hbm_bytes=32 * 1024 - 1))


def test_more_steps_than_can_be_laid_out_are_refused():
    with pytest.raises(ValueError, match=r"`fn`: the grid \(100000000,\) of kernel `doubled` has 100,000,000 steps"):
        simulate(doubled(lambda i: (0, 0), lambda i: (0, 0), steps=10**8), X)


def test_a_block_visited_again_on_another_step_is_no_parallel_work():
    again = simulate(doubled(straight, lambda i: (i % 4, 0)), X).kernels[0]
    permuted = simulate(doubled(straight, lambda i: ((i * 5) % 8, 0)), X).kernels[0]

    assert again.schedule.cores == 1  # steps 0 and 4 write the same rows
    assert permuted.schedule.cores == 8
    assert again.traffic.writes == permuted.traffic.writes == X.nbytes


@pytest.mark.parametrize("into", [lambda i: (7 - i, 0), lambda i: (i ^ 3, 0), lambda i: ((i * 3) % 8, 0)])
def test_blocks_in_any_order_give_what_pallas_gives(into):
    order = np.array([int(into(i)[0]) for i in range(8)])

    got = emulate(doubled(into, straight), X)

    np.testing.assert_array_equal(got, 2 * X.reshape(8, 2, 8)[order].reshape(16, 8))


def test_an_input_block_behind_the_end_is_told_and_holds_nothing():
    fn = doubled(lambda i: (i + 1, 0), straight)

    report, got = simulate(fn, X), emulate(fn, X)

    assert "Block in0 lies behind the end of its array at 1 steps" in str(report)
    assert report.kernels[0].traffic.reads == X[2:].nbytes
    np.testing.assert_array_equal(got[:14], 2 * X[2:])
    assert np.isnan(got[14:]).all()


def test_complex_numbers_are_refused():
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    with pytest.raises(UnsupportedKernel, match="complex64: an AI Core has no complex numbers"):
        simulate(shown(kernel, "complex64"), ((8, 8), "complex64"))


def test_the_line_of_a_library_function_is_its_callers():
    def kernel(x_ref, y_ref):
        y_ref[...] = jnp.real(jnp.fft.fft(x_ref[...]))

    with pytest.raises(UnsupportedKernel, match=r"primitive `fft` at test_sim_arguments.py:\d+ \(kernel\) has no"):
        emulate(shown(kernel), X)


def test_fewer_buffers_than_asked_for_are_told():
    def kernel(x_ref, y_ref, z_ref):
        z_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((2, 8), straight)
    fn = pl.pallas_call(
        kernel, grid=(8,), in_specs=[spec] * 2, out_specs=spec, out_shape=jax.ShapeDtypeStruct((16, 8), jnp.float32)
    )

    report = simulate(fn, X, X, plan=TilePlan(queue_depth=5))
    assert "Queue depth 5 is more than a position's 8 buffers allow: in0 has 3" in str(report)
    assert "more than a position" not in str(simulate(fn, X, X, plan=TilePlan(queue_depth=4)))


def test_a_chip_with_one_buffer_gets_plans_that_it_can_run():
    single = A2.replace(name="single", max_queue_depth=1)

    assert simulate(demos.rms_norm, *ROWS, chip=single).plan.queue_depth == 1
    assert sim_npu.best_plan(demos.rms_norm, *ROWS, chip=single).queue_depth == 1


def test_no_plan_that_fits_names_one_that_would():
    with pytest.raises(CapacityError, match="biggest tenants.*The nearest plan that fits: rows"):
        sim_npu.best_plan(demos.rms_norm, ((4096, 4096), "float32"), ((4096,), "float32"), plans=[TilePlan(rows=512)])


def test_explain_takes_profile_and_cache():
    cold = sim_npu.explain(demos.rms_norm, *ROWS, profile="as_shipped:rms_norm", cache="cold")

    assert cold.startswith("rms_norm takes")


def test_constants_of_a_shipped_chip_on_a_changed_one_are_told():
    changed = simulate(demos.rms_norm, *ROWS, chip=A2.replace(cores=3), profile="as_shipped")

    assert "this one was changed" in str(changed)
    assert "this one was changed" not in str(simulate(demos.rms_norm, *ROWS, profile="as_shipped"))
