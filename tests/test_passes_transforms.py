"""The tile passes under JAX's transformations, and in programs split between devices."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import normlib as nl
from normlib.passes import PallasPass
from normlib.passes import channels as channels_pass
from tests import distributed, reference
from tests.matrix import BY_NAME, inputs
from tests.passes import TILE_PASSES, on
from tests.test_matrix import check, value_and_grads

pytestmark = pytest.mark.family
SPREAD = list(zip(["layer_norm", "batch_norm", "rms_norm_gemma"], TILE_PASSES))
FULL = [(n, to) for n in ("layer_norm", "batch_norm_first", "group_norm") for to in TILE_PASSES]
SPREAD += [pytest.param(*case, marks=pytest.mark.nightly) for case in FULL]


@pytest.mark.parametrize(("name", "to"), SPREAD)
def test_vmap_equals_a_loop(name, to):
    op = BY_NAME[name]
    many = [inputs(op, seed=i) for i in range(3)]
    xs, scales = jnp.stack([g.x for g in many]), jnp.stack([g.scale for g in many])
    bias, dy = many[0].bias, many[0].dy

    def grads(x, scale):
        y, vjp = jax.vjp(lambda x, s: op.call(x, s, bias), x, scale)
        return y, *vjp(dy)

    with on(to):
        both = jax.jit(jax.vmap(grads))(xs, scales)
        only_scale = jax.jit(jax.vmap(grads, (None, 0)))(xs[0], scales)
    for i, given in enumerate(many):
        for x, found in ((given.x, both), (many[0].x, only_scale)):
            ref = op.reference(x, given.scale, bias, dy)
            reference.assert_rounded(found[0][i], ref.y, ref.y_size)
            reference.assert_rounded(found[1][i], ref.dx, ref.dx_size, what="dx")
            reference.assert_sum(found[2][i], ref.dscale, op.kept_shape, what="dscale")


@pytest.mark.parametrize("rule", ["reverse", "both"])
@pytest.mark.parametrize(("name", "to"), SPREAD)
def test_gradient_of_gradient_is_that_of_the_xla_pass(name, to, rule):
    op = BY_NAME[name]
    given = inputs(op)

    def penalty(x, scale):
        value = lambda x, s: (jnp.tanh(op.call(x, s, given.bias, rule=rule)) * given.dy).sum()  # noqa: E731
        gx, gs = jax.grad(value, (0, 1))(x, scale)
        return (gx**2).sum() + (gs**3).sum()

    want = jax.jit(jax.grad(penalty, (0, 1)))(given.x, given.scale)
    with on(to):
        found = jax.jit(jax.grad(penalty, (0, 1)))(given.x, given.scale)
    for f, w in zip(found, want):
        np.testing.assert_allclose(f, w, atol=5e-6 * float(abs(w).max()), rtol=0)


@pytest.mark.parametrize(("name", "to"), SPREAD)
def test_forward_mode_remat_and_scan(name, to):
    op = BY_NAME[name]
    given = inputs(op)

    def loss(x, scale):
        return (op.call(x, scale, given.bias) * given.dy).sum()

    def three(x, scale):
        step = lambda c, _: (op.call(c, scale, given.bias), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(step), x, None, length=3)[0]

    def run(x, scale):
        tangent = jax.jvp(lambda x: op.call(x, scale, given.bias, rule="both"), (x,), (given.dy,))[1]
        return jax.grad(jax.checkpoint(loss), (0, 1))(x, scale), three(x, scale), tangent

    want = jax.jit(run)(given.x, given.scale)
    with on(to):
        found = jax.jit(run)(given.x, given.scale)
    for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(want)):
        np.testing.assert_allclose(f, w, atol=5e-6 * float(abs(w).max()), rtol=1e-5)


@pytest.mark.parametrize(("name", "to"), SPREAD[:3])
def test_both_derives_the_same(name, to):
    op = BY_NAME[name]
    given = inputs(op)
    with on(to):
        y, dx, dscale, _ = value_and_grads(op, given, rule="both")
    ref = op.reference(given.x, given.scale, given.bias, given.dy)
    reference.assert_rounded(y, ref.y, ref.y_size)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, most=8, all_=16, what="dx")
    reference.assert_sum(dscale, ref.dscale, op.kept_shape, what="dscale")


def test_the_pass_of_a_context_is_part_of_what_is_compiled():
    norm = jax.jit(nl.layer_norm)
    x = jnp.ones((4, 8))
    plain = norm.lower(x).as_text()
    with on("gpu"):
        assert norm.lower(x).as_text() != plain


# Split between devices


def steps(call):
    """(y, dx, dscale, dbias) for the cotangent dy."""

    def run(x, scale, bias, dy):
        y, vjp = jax.vjp(call, x, scale, bias)
        return y, *vjp(dy)

    return run


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("to", ["cpu", "npu", pytest.param("gpu", marks=pytest.mark.nightly)])
def test_row_norms_inside_shard_map(to, check_vma):
    op = BY_NAME["layer_norm"].at((8, 37))
    given = inputs(op)

    def local(*args):
        y, dx, dscale, dbias = steps(op.call)(*args)
        return y, dx, *((dscale, dbias) if check_vma else jax.lax.psum((dscale, dbias), "d"))

    rows = P("d")
    split = jax.shard_map(
        local, mesh=distributed.mesh(2), in_specs=(rows, P(), P(), rows), out_specs=(rows, rows, P(), P()),
        check_vma=check_vma,
    )  # fmt: skip
    with on(to):
        check(op, given, jax.jit(split)(given.x, given.scale, given.bias, given.dy))


@pytest.mark.parametrize(("mode", "to"), [
    ("vma", "cpu"), ("novma", "npu"), ("pmap", "cpu"), ("explicit", "gpu"), ("vma", "npu"),
    *(pytest.param(m, t, marks=pytest.mark.nightly) for m in distributed.MANUAL_MODES + distributed.GLOBAL_MODES
      for t in TILE_PASSES),
])  # fmt: skip
def test_batch_norm_in_every_parallel_mode(mode, to):
    op = BY_NAME["batch_norm"].at((8, 5, 7))
    given = inputs(op)
    with on(to):
        distributed._compiled.cache_clear()  # it does not know of passes
        found = distributed.step(mode, given.x, given.scale, given.bias, given.dy, devices=2)
        distributed._compiled.cache_clear()
    check(op, given, found[:4])


def test_vmap_inside_a_typed_shard_map():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 16)), jnp.float32)
    norm = jax.vmap(nl.layer_norm)
    with on("cpu"):
        found = jax.jit(jax.shard_map(norm, mesh=distributed.mesh(2), in_specs=P("d"), out_specs=P("d")))(x)
    np.testing.assert_allclose(found, norm(x), atol=2e-6)


@functools.cache
def meshes():
    auto = (AxisType.Auto,)
    return {
        "4": jax.make_mesh((4,), ("d",), axis_types=auto, devices=jax.devices()[:4]),
        "8": jax.make_mesh((8,), ("d",), axis_types=auto),
        "4x2": jax.make_mesh((4, 2), ("d", "m"), axis_types=auto * 2),
    }


BN = lambda *args: nl.batch_norm(*args).y  # noqa: E731
BN_ACT = lambda *args: nl.batch_norm_act(*args, residual=args[0]).y  # noqa: E731
GN = functools.partial(nl.group_norm, num_groups=4)
# operator, mesh, how x and the parameters lie, collectives of forward and backward: dscale and dbias are added in one,
# and batch statistics take one forward (moments, gathered and merged) and one backward, which is also dscale and dbias
ADDED = {"all-reduce": 1}
POOLED = {"all-gather": 1, "all-reduce": 1}
GLOBAL = [
    ("layer_norm", nl.layer_norm, "4", P("d"), P(), ADDED), ("rms_norm", nl.rms_norm, "8", P("d"), P(), ADDED),
    ("layer_norm", nl.layer_norm, "4x2", P("d", "m"), P(), ADDED),
    ("batch_norm", BN, "4", P("d"), P(), POOLED), ("batch_norm", BN, "4x2", P("d", None, "m"), P("m"), POOLED),
    ("batch_norm_act", BN_ACT, "4", P("d"), P(), POOLED), ("group_norm", GN, "4", P("d"), P(), ADDED),
    # whole channels are one kernel where a device has them, and moments of its part where it has not
    ("group_norm", GN, "4", P(None, "d"), P(), POOLED), 
    ("group_norm", GN, "4x2", P("m", "d"), P(), POOLED | {"all-reduce": 2}),
    ("group_norm", GN, "4", P(None, None, "d"), P("d"), {}), ("batch_norm", BN, "4", P(None, None, "d"), P("d"), {}),
    ("instance_norm", nl.instance_norm, "4x2", P("d", None, "m"), P("m"), ADDED),
    ("batch_norm of many", jax.vmap(BN, (1, None, None), 1), "4", P("d"), P(), POOLED),
    ("vmap", jax.vmap(nl.layer_norm, (1, None, None), 1), "4", P("d"), P(), ADDED),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "mesh", "where", "parameters", "collectives"), GLOBAL)
def test_globally_sharded_arrays_are_not_gathered(name, call, mesh, where, parameters, collectives):
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(16, 8, 32)).astype(np.float32) for _ in range(2))
    scale, bias = (rng.normal(size=32).astype(np.float32) for _ in range(2))
    want = jax.jit(steps(call))(x, scale, bias, dy)
    mesh = meshes()[mesh]
    put = lambda t, spec: jax.device_put(t, NamedSharding(mesh, spec))  # noqa: E731
    args = put(x, where), put(scale, parameters), put(bias, parameters), put(dy, where)

    with on("cpu"):
        compiled = jax.jit(steps(call)).lower(*args).compile()
        found = compiled(*args)

    kinds = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    assert collections.Counter(re.findall(kinds, compiled.as_text())) == collectives
    assert found[0].sharding.is_equivalent_to(args[0].sharding, 3)
    assert found[1].sharding.is_equivalent_to(args[0].sharding, 3)
    for f, w in zip(found, want):
        np.testing.assert_allclose(f, w, atol=4e-6 * max(1.0, float(abs(w).max())))


def test_whole_channels_are_what_such_norms_take_on_one_device():
    """Or the table above would count the collectives of another kernel."""
    x = jnp.ones((16, 8, 32))
    options = {"eps": 1e-5, "centered": True, "dtype": x.dtype}
    for axes, channels in (((0, 1), None), ((1,), 4), ((1,), None)):
        assert channels_pass.forward(PallasPass("cpu"), [x], None, None, None, axes=axes, channels=channels, **options)


def test_groups_that_devices_cannot_have_whole_are_gathered_and_right():
    x = np.random.default_rng(0).normal(size=(4, 6, 32)).astype(np.float32)
    with on("cpu"):
        split = jax.device_put(x, NamedSharding(meshes()["8"], P(None, None, "d")))
        np.testing.assert_allclose(jax.jit(GN)(split), GN(x), atol=2e-6)


ONE_CHANNEL = {
    "instance_norm": (nl.instance_norm, -1),
    "batch_norm": (BN, -1),
    "batch_norm, channels first": (lambda *args: nl.batch_norm(*args, axis=1).y, 1),
}


@pytest.mark.parametrize("to", ["cpu", "gpu"])
@pytest.mark.parametrize(("call", "axis"), ONE_CHANNEL.values(), ids=ONE_CHANNEL)
def test_devices_may_have_one_channel_each(call, axis, to):
    """Then what is kept beside the channels lies before what is reduced, as in a norm of rows."""
    x, dy = np.random.default_rng(0).normal(size=(2, 3, 5, 8)).astype(np.float32)
    x, dy = (np.moveaxis(t, -1, axis) for t in (x[None].repeat(2, 0), dy[None].repeat(2, 0)))
    scale, bias = np.linspace(0.5, 2, 8, dtype=np.float32), np.linspace(-1, 1, 8, dtype=np.float32)
    want = jax.jit(steps(call))(x, scale, bias, dy)
    spec = P(*("d" if i == axis % x.ndim else None for i in range(x.ndim)))
    x, dy = (jax.device_put(t, NamedSharding(meshes()["8"], spec)) for t in (x, dy))
    with on(to):
        compiled = jax.jit(steps(call)).lower(x, scale, bias, dy).compile()
        found = compiled(x, scale, bias, dy)
    assert "all-gather" not in compiled.as_text() or axis == 1
    for f, w in zip(found, want):
        np.testing.assert_allclose(f, w, atol=4e-6 * max(1.0, float(abs(w).max())))


def test_a_split_row_is_gathered_and_right():
    """The one layout that costs: features of a row norm over devices (`sharded_layer_norm` is for it)."""
    x = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    with on("cpu"):
        split = jax.device_put(x, NamedSharding(meshes()["4"], P(None, "d")))
        compiled = jax.jit(nl.layer_norm).lower(split).compile()
    assert "all-gather" in compiled.as_text()
    np.testing.assert_allclose(compiled(split), nl.layer_norm(x), atol=2e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_partly_manual_mesh(check_vma):
    x = np.random.default_rng(0).normal(size=(8, 6, 32)).astype(np.float32)
    call = jax.shard_map(
        nl.layer_norm, mesh=meshes()["4x2"], in_specs=P("d"), out_specs=P("d"), axis_names={"d"}, check_vma=check_vma
    )
    with on("cpu"):
        np.testing.assert_allclose(jax.jit(call)(x), nl.layer_norm(x), atol=2e-6)
