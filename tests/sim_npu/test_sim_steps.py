"""Whole steps: every operator found once, with its launches and bytes, through every call JAX can put around it."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, PartitionSpec

from sim_npu import TilePlan, compare_steps, demos, get_chip, simulate, simulate_step
from sim_npu.step_report import StepReport


def train_step(weights, x, y):
    def loss(weights):
        h = x
        for w in weights:
            h = jax.nn.relu(h @ w)
            h = demos.rms_norm(h, jnp.ones(h.shape[-1], h.dtype)) if w.shape[0] == 7 else h
        return jnp.mean((h - y) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads)], value


STEP = ([((256, 512), "bfloat16"), ((512, 128), "bfloat16")], ((1024, 256), "bfloat16"), ((1024, 128), "bfloat16"))


def test_a_train_step_counts_every_product_and_adds_up():
    step = simulate_step(train_step, *STEP)
    products = [op for op in step.ops if op.kind == "matrix product"]

    # forward 2, backward: both weights' gradients and the first layer's output
    assert len(products) == 5
    n, dims = 1024, (256, 512, 128)
    forward = 2 * n * (dims[0] * dims[1] + dims[1] * dims[2])
    assert sum(op.flops for op in products) == 2 * forward + 2 * n * dims[1] * dims[2]
    assert sum(step.shares().values()) == pytest.approx(step.total_us)
    assert {op.unit for op in products} == {"cube"}


def test_fusing_and_keeping_the_cubes_format_both_save_time():
    plain = simulate_step(train_step, *STEP, fuse=False)
    fused = simulate_step(train_step, *STEP)
    fractal = simulate_step(train_step, *STEP, formats="fractal")

    assert plain.total_us > fused.total_us > fractal.total_us
    assert len(plain.ops) > len(fused.ops) > len(fractal.ops)
    assert "format conversion" in fused.shares() and "format conversion" not in fractal.shares()


def test_a_fused_chain_moves_its_ends_only():
    step = simulate_step(lambda x: jnp.tanh(x * 2 + 1), ((1000, 64), "float32"))

    (op,) = step.ops
    assert op.bytes == 2 * 1000 * 64 * 4


def test_a_loop_multiplies_its_body_and_a_pallas_kernel_is_simulated():
    def fn(x, scale):
        y, _ = jax.lax.scan(lambda c, _: (demos.rms_norm(c, scale), None), x, None, length=7)
        return y

    args = ((512, 256), "float32"), ((256,), "float32")
    step = simulate_step(fn, *args)
    kernel = next(op for op in step.ops if op.kind == "Pallas kernel")

    assert kernel.times == 7
    assert kernel.us == pytest.approx(7 * simulate(demos.rms_norm, *args).total_us, rel=1e-6)


def test_a_convolution_counts_its_flops():
    def conv(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    step = simulate_step(conv, ((8, 14, 14, 32), "float16"), ((3, 3, 32, 64), "float16"))
    (op,) = [op for op in step.ops if op.kind == "convolution"]

    assert op.flops == 2 * 8 * 14 * 14 * 64 * 3 * 3 * 32
    assert "convolution" in str(step) and "rules assumed" in str(step)


ROWS, WIDTH = 64, 256
X, SCALE = ((ROWS, WIDTH), "float32"), ((WIDTH,), "float32")


@jax.custom_vjp
def norm(x, scale):
    """A row norm whose backward pass is a kernel as well, and needs what the forward pass gave."""
    return demos.rms_norm(x, scale)


def _backward(saved, g):
    y, scale = saved
    return demos.channel_scale((y * g)[..., None], scale, scale)[..., 0], jnp.zeros_like(scale)


norm.defvjp(lambda x, scale: ((y := norm(x, scale)), (y, scale)), _backward)


@custom_partitioning
def partitioned(x, scale):
    return demos.rms_norm(x, scale)


partitioned.def_partition(partition=None, sharding_rule="i j, j -> i j")


def squares(fn):
    return jax.grad(lambda x, scale: jnp.sum(fn(x, scale) ** 2))


def in_scan(fn):
    return lambda x, scale: jax.lax.scan(lambda c, _: (fn(c, scale), None), x, None, length=7)[0]


def split(fn):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    specs = PartitionSpec("rows"), PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)


@pytest.mark.parametrize(
    ("fn", "forward", "backward", "rows"),
    [
        (norm, 1, 0, ROWS),
        (jax.jit(norm), 1, 0, ROWS),
        (squares(norm), 1, 1, ROWS),
        (squares(jax.checkpoint(norm)), 2, 1, ROWS),  # what the backward pass needs is computed again
        (in_scan(norm), 7, 0, ROWS),
        (squares(in_scan(norm)), 7, 7, ROWS),
        (squares(in_scan(jax.checkpoint(norm))), 14, 7, ROWS),
        (split(norm), 1, 0, ROWS // 2),  # what one device runs
        (squares(split(norm)), 1, 1, ROWS // 2),
        (squares(in_scan(split(norm))), 7, 7, ROWS // 2),
        (partitioned, 1, 0, ROWS),
        (jax.vmap(norm, in_axes=(0, None)), 1, 0, 3 * ROWS),
        (lambda x, s: jax.lax.cond(x[0, 0] > 0, norm, lambda x, s: x, x, s), 1, 0, ROWS),
        (lambda x, s: jax.lax.cond(x[0, 0] > 0, lambda x, s: x, norm, x, s), 1, 0, ROWS),
        (lambda x, s: jax.lax.while_loop(lambda c: c[0, 0] > 0, lambda c: norm(c, s), x), 1, 0, ROWS),
        (lambda x, s: jax.lax.fori_loop(0, 5, lambda i, c: norm(c, s), x), 5, 0, ROWS),
    ],
    ids=lambda v: "" if callable(v) else str(v),
)
def test_a_kernel_is_found_inside_every_kind_of_call(fn, forward, backward, rows):
    x = ((3, ROWS, WIDTH), "float32") if rows == 3 * ROWS else X
    step = simulate_step(fn, x, SCALE)

    assert step.part("^rms_norm").launches == forward
    assert step.part("^channel_scale").launches == backward
    moved = 2 * rows * WIDTH * 4 + 32 * WIDTH * 4  # x and y once, the scale on each of 32 cores
    assert step.part("^rms_norm").bytes == pytest.approx(forward * moved, rel=0.1)


def test_pmap_lays_out_what_one_device_runs():
    step = simulate_step(jax.pmap(norm, in_axes=(0, None)), ((2, ROWS, WIDTH), "float32"), SCALE)

    assert step.part("rms_norm").launches == 1
    assert step.part("rms_norm").bytes == 2 * ROWS * WIDTH * 4 + 32 * WIDTH * 4
    assert any("one device" in note for note in step.notes)


def test_branches_loops_and_devices_are_noted():
    def fn(x, s):
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x * 2, lambda x: jnp.sort(x), x)
        x = jax.lax.while_loop(lambda c: c[0, 0] > 0, jnp.sin, x)
        return split(lambda x, s: norm(x, s) - jax.lax.psum(jnp.sum(x), "rows"))(x, s)

    step = simulate_step(fn, X, SCALE)
    notes = "\n".join(step.notes)

    for words in ("dearest of 2 branches", "turns unknown, one is laid out", "one device", "links are not modelled"):
        assert words in notes, words
    assert step.kinds()["collective"].launches == 1
    assert any("sort" in op.name for op in step.ops)  # the dearest branch


def test_one_function_called_twice_is_two_kernels():
    twice = jax.jit(lambda x: jnp.tanh(x) * 2)  # both calls share one jaxpr
    step = simulate_step(lambda x, y: twice(x) + twice(y), X, X)

    size = ROWS * WIDTH * 4
    assert [op.bytes for op in step.ops] == [2 * size, 3 * size]  # x to a; y and a to the sum


def test_a_turn_of_a_loop_reads_its_part_and_what_follows_reads_all():
    def fn(start, xs):
        last, seen = jax.lax.scan(lambda c, x: (c + jnp.tanh(x), jnp.sort(c)), start, xs)
        return last, jnp.cumsum(seen)

    part = ROWS * WIDTH * 4
    step = simulate_step(fn, X, ((10, ROWS, WIDTH), "float32"))
    by_name = {op.name: op for op in step.ops}

    assert (by_name["tanh+add"].times, by_name["tanh+add"].bytes) == (10, 10 * 3 * part)
    assert (by_name["sort"].times, by_name["sort"].bytes) == (10, 10 * 2 * part)
    assert by_name["cumsum"].bytes == 2 * 10 * part


def test_what_no_result_needs_is_not_laid_out_and_a_slice_reads_its_part():
    def fn(x):
        jnp.sort(x)
        first, _ = jax.jit(lambda x: (jnp.tanh(x[:8]), jnp.cumsum(x)))(x)
        return first

    (op,) = simulate_step(fn, X).ops

    assert (op.name, op.bytes) == ("tanh", 2 * 8 * WIDTH * 4)


def test_parts_are_found_by_name_scope_and_predicate():
    def fn(x, s, w):
        with jax.named_scope("pre_norm"):
            x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return norm(x, s) @ w

    step = simulate_step(fn, X, SCALE, ((WIDTH, WIDTH), "float32"))
    norms, products = step.part("norm"), step.part(lambda op: op.unit == "cube")

    assert step.part("^rms_norm").launches == 1 < norms.launches
    assert step.part("pre_norm").launches == norms.launches - 1
    assert products.flops == 2 * ROWS * WIDTH * WIDTH and step.part("nothing").share == 0
    assert norms.us == sum(op.us for op in step.ops if "norm" in op.name or "norm" in op.scope)
    groups = step.groups(lambda op: "norm" if "norm" in op.name + op.scope else "other")
    assert groups["norm"] == norms and sum(p.share for p in groups.values()) == pytest.approx(1)
    kinds = step.kinds()
    assert sum(p.launches for p in kinds.values()) == sum(op.times for op in step.ops)
    assert kinds["format conversion"].bytes == 2 * 4 * (ROWS * WIDTH + WIDTH * WIDTH)


def test_the_change_of_formats_is_told_per_kind():
    nd, fractal = (simulate_step(train_step, *STEP, formats=f) for f in ("nd", "fractal"))
    change = compare_steps(nd, fractal)

    assert change.us == pytest.approx(fractal.total_us - nd.total_us) and change.us < 0
    assert change.kinds == pytest.approx({k: fractal.shares().get(k, 0) - us for k, us in nd.shares().items()})
    assert next(iter(change.kinds)) == "format conversion"
    text = str(change)
    assert "fused, nd" in text and "fused, fractal" in text and f"{change.us / nd.total_us:+.1%}" in text
    empty = StepReport("none", get_chip("910b2"), (), True, "nd")
    assert "none" in str(compare_steps(empty, empty))


def test_a_plan_is_chosen_per_kernel():
    seen = []

    def choose(name, program):
        seen.append((name, program.grid))
        return TilePlan(queue_depth=1)

    args = ((4096, 4096), "float16"), ((4096,), "float16")
    chosen = simulate_step(norm, *args, plan=choose)

    assert [name for name, _ in seen] == ["rms_norm"]
    single = simulate(demos.rms_norm, *args, plan=TilePlan(queue_depth=1)).total_us
    assert chosen.total_us == pytest.approx(single)
    assert simulate_step(norm, *args, plan=TilePlan(queue_depth=1)).total_us == pytest.approx(single)
    assert simulate_step(norm, *args).total_us < single
    with pytest.raises(ValueError, match="`plan` must be a TilePlan, a function .* or None; got 3"):
        simulate_step(norm, *args, plan=3)


def test_a_kernel_without_a_rule_is_priced_by_its_bytes_and_noted():
    def fn(x):
        everywhere = pl.BlockSpec(memory_space=pl.ANY)
        call = pl.pallas_call(lambda x, y: None, name="own_copies", in_specs=[everywhere], out_specs=everywhere,
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))  # fmt: skip
        return call(x)

    step = simulate_step(fn, X)

    (op,) = step.ops
    assert (op.name, op.bytes) == ("own_copies", 2 * ROWS * WIDTH * 4)
    assert "priced by its bytes" in step.notes[0] and "memory space" in step.notes[0]


def test_zeros_of_a_dilated_input_are_not_multiplied():
    def conv(x, w):
        return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(x, w):
        return jnp.sum(conv(x, w).astype(jnp.float32) ** 2)

    args = ((4, 16, 16, 8), "float16"), ((3, 3, 8, 8), "float16")
    forward = simulate_step(conv, *args).part("convolution").flops
    both = simulate_step(jax.grad(loss), *args).part("convolution").flops

    assert forward == 2 * 4 * 8 * 8 * 8 * 3 * 3 * 8
    assert both == 2 * forward


def test_of_branches_the_dearest_or_the_cheapest_is_laid_out():
    def fn(x):
        return jax.lax.cond(x[0] > 0, lambda x: jnp.cumsum(jnp.sort(x)), lambda x: x + 1, x)

    x = ((4096,), "float32")
    dear, cheap = (simulate_step(fn, x, branches=b) for b in ("dearest", "cheapest"))

    assert any("sort" in op.name for op in dear.ops) and not any("sort" in op.name for op in cheap.ops)
    with pytest.raises(ValueError, match="`branches` must be one of"):
        simulate_step(fn, x, branches="both")
