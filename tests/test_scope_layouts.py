"""Batch norm and its relatives over meshes of other layouts: two axes, split features and space, unequal parameters."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import normlib as nl
from tests import reference
from tests.distributed import mesh
from tests.matrix import BY_NAME
from tests.test_scope import OP, ROWS, C, batch, group_rows, pairs

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("axes", ["outer", "inner", "both"])
def test_axes_of_a_two_dimensional_mesh(axes):
    x, scale, bias, dy = batch()
    grid = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    names = {"outer": "a", "inner": "b", "both": ("a", "b")}[axes]

    def run(x, scale, dy):
        def loss(x, scale):
            return (nl.batch_norm(x, scale, bias, axis_name=names).y * dy).sum()

        return jax.grad(loss, (0, 1))(x, scale)

    f = jax.shard_map(run, mesh=grid, in_specs=(P(("a", "b")), P(), P(("a", "b"))), out_specs=(P(("a", "b")), P()))
    dx, dscale = jax.jit(f)(x, scale, dy)
    groups = {"outer": [[0, 2], [1, 3]], "inner": [[0, 1], [2, 3]], "both": [[0, 1, 2, 3]]}[axes]
    terms = np.zeros(x.shape)
    for rows in group_rows(groups):
        ref = OP.reference(x[rows], scale, bias, dy[rows])
        reference.assert_rounded(np.asarray(dx)[rows], ref.dx, ref.dx_size, what="dx")
        terms[rows] = ref.dscale
    reference.assert_sum(dscale, terms, OP.kept_shape)


@pytest.mark.parametrize("vma", [True, False])
def test_devices_may_hold_different_scales(vma):
    x, _, bias, dy = batch()
    scales = np.random.default_rng(5).normal(size=(4, C)).astype(np.float32)

    def run(x, scale, dy):
        return jax.grad(lambda x, s: (nl.batch_norm(x, s[0], axis_name="d").y * dy).sum(), (0, 1))(x, scale)

    f = jax.shard_map(run, mesh=mesh(), in_specs=(P("d"),) * 3, out_specs=(P("d"),) * 2, check_vma=vma)
    dx, dscale = jax.jit(f)(x, scales, dy)
    per_row = np.repeat(scales, ROWS // 4, 0)[:, None]
    ref = reference.norm(x, per_row, None, dy, axes=(0, 1), eps=1e-5)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")
    np.testing.assert_allclose(dscale, ref.dscale.reshape(4, -1, C).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vma", [True, False])
def test_a_replicated_batch_inside_the_scope_counts_as_copies(vma):
    x, scale, bias, dy = batch(rows=6)

    def run(x, dy):
        return jax.value_and_grad(lambda x: (nl.batch_norm(x, scale, bias, axis_name="d").y * dy).sum())(x)

    f = jax.shard_map(run, mesh=mesh(), in_specs=(P(), P()), out_specs=(P(), P()), check_vma=vma)
    _, dx = jax.jit(f)(x, dy)
    ref = OP.at(x.shape).reference(x, scale, bias, dy)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")


@pytest.mark.parametrize(("name", "vma"), pairs(["layer_norm", "rms_norm"], [True, False]))
def test_a_feature_axis_split_over_devices(name, vma):
    op = BY_NAME[name].at((6, 32))
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 6, 32)).astype(np.float32)
    scale, bias = rng.normal(size=(2, 32)).astype(np.float32)
    norm = {"layer_norm": nl.layer_norm, "rms_norm": nl.rms_norm}[name]

    def run(x, scale, bias, dy):
        y, vjp = jax.vjp(lambda *a: norm(*a, axis_name="d"), x, scale, bias)
        return y, *vjp(dy)

    specs = (P(None, "d"), P("d"), P("d"), P(None, "d"))
    f = jax.shard_map(run, mesh=mesh(), in_specs=specs, out_specs=(specs[0], specs[0], P("d"), P("d")), check_vma=vma)
    y, dx, dscale, dbias = jax.jit(f)(x, scale, bias, dy)
    ref = op.reference(x, scale, bias, dy)
    reference.assert_rounded(y, ref.y, ref.y_size)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")
    reference.assert_sum(dscale, ref.dscale, (1, 32))
    reference.assert_sum(dbias, ref.dbias, (1, 32))


def test_group_norm_with_space_split_over_devices():
    op = BY_NAME["group_norm"].at((3, 16, 12))
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 3, 16, 12)).astype(np.float32)
    scale, bias = rng.normal(size=(2, 12)).astype(np.float32)

    for method, vma in pairs(("gather", "two_phase"), (True, False)):

        def run(x, scale, bias, dy):
            y, vjp = jax.vjp(lambda *a: nl.group_norm(*a, num_groups=4, axis_name="d", method=method), x, scale, bias)
            dx, dscale, dbias = vjp(dy)
            return y, dx, *((dscale, dbias) if vma else jax.lax.psum((dscale, dbias), "d"))

        rows = P(None, "d")
        f = jax.shard_map(
            run, mesh=mesh(), in_specs=(rows, P(), P(), rows), out_specs=(rows, rows, P(), P()), check_vma=vma
        )
        y, dx, dscale, _ = jax.jit(f)(x, scale, bias, dy)
        ref = op.reference(x, scale, bias, dy)
        reference.assert_rounded(y, ref.y, ref.y_size)
        reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")
        reference.assert_sum(dscale, ref.dscale, op.kept_shape)


def test_partly_manual_meshes_leave_the_channels_to_xla():
    x, scale, bias, dy = batch()
    grid = jax.make_mesh((4, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x6 = np.concatenate([x, x[..., :1]], -1)
    place = jax.sharding.NamedSharding(grid, P("d", None, "m"))

    def run(x):
        return jax.grad(lambda x: (nl.batch_norm(x, axis_name="d").y ** 3).sum())(x)

    f = jax.shard_map(run, mesh=grid, in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
    dx = jax.jit(f)(jax.device_put(x6, place))
    ref = OP.at(x6.shape).reference(x6)
    want = OP.at(x6.shape).reference(x6, None, None, 3 * ref.y**2)
    np.testing.assert_allclose(dx, want.dx, atol=2e-5)


@pytest.mark.parametrize(("channels", "groups"), [(8, 4), (8, 8), (8, 2), (16, 4)])
def test_group_norm_with_channels_on_an_explicit_mesh(channels, groups):
    op = dataclasses.replace(BY_NAME["group_norm"], options={"groups": groups, "channel": 2, "eps": 1e-5})
    op = op.at((3, 6, channels))
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, *op.shape)).astype(np.float32)
    scale, bias = rng.normal(size=(2, channels)).astype(np.float32)
    split, rows = (jax.NamedSharding(mesh(explicit=True), s) for s in (P("d"), P(None, None, "d")))
    given = (jax.device_put(x, rows), *(jax.device_put(t, split) for t in (scale, bias)), jax.device_put(dy, rows))

    @jax.jit
    def run(x, scale, bias, dy):
        y, vjp = jax.vjp(lambda *a: nl.group_norm(*a, num_groups=groups, rescale=channels == 16), x, scale, bias)
        return y, *vjp(dy)

    y, dx, dscale, dbias = run(*given)
    ref = op.reference(x, scale, bias, dy)
    assert y.sharding.spec == rows.spec and dscale.sharding.spec == split.spec
    reference.assert_rounded(y, ref.y, ref.y_size)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")
    reference.assert_sum(dscale, ref.dscale, op.kept_shape)
    reference.assert_sum(dbias, ref.dbias, op.kept_shape)


@pytest.mark.parametrize("options", [{}, {"method": "two_phase"}, {"axis_index_groups": [[0, 1]]}])
def test_partly_manual_meshes_with_explicit_channels(options):
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    grid = jax.make_mesh((2, 2), ("d", "m"), axis_types=kinds, devices=jax.devices()[:4])
    x = np.random.default_rng(0).normal(size=(8, 6, 8)).astype(np.float32)

    def run(x):
        return jax.grad(lambda x: (nl.batch_norm(x, axis_name="d", **options).y ** 3).sum())(x)

    with jax.set_mesh(grid):
        f = jax.shard_map(run, in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
        dx = jax.jit(f)(jax.device_put(x, jax.NamedSharding(grid, P("d", None, "m"))))
    op = OP.at(x.shape)
    want = op.reference(x, None, None, 3 * op.reference(x).y ** 2)
    np.testing.assert_allclose(dx, want.dx, atol=2e-5)


@pytest.mark.parametrize(("size", "ragged"), [(3, True), (4, False)])
def test_virtual_batches_that_do_not_fit_explicitly_sharded_rows_are_named(size, ragged):
    x = jax.device_put(np.ones((8, 6, 8), np.float32), jax.NamedSharding(mesh(explicit=True), P("d")))
    with pytest.raises(ValueError, match=rf"`virtual_batch_size` {size} does not divide the 2 rows.*auto_axes"):
        nl.batch_norm(x, virtual_batch_size=size, ragged=ragged)


def test_batch_invariance_over_an_explicitly_sharded_row_is_named():
    x = jax.device_put(np.ones((8, 6, 8), np.float32), jax.NamedSharding(mesh(explicit=True), P(None, None, "d")))
    with pytest.raises(ValueError, match=r"`batch_invariant` needs each row whole.*'d'"):
        nl.layer_norm(x, batch_invariant=True)


@pytest.mark.parametrize(("options", "rule"), [
    ({}, "reverse"), ({"axis_index_groups": [[0, 1], [2, 3]]}, "reverse"), ({"method": "two_phase"}, "reverse"),
    ({"method": "adaptive"}, "reverse"), ({"virtual_batch_size": 2}, "reverse"), ({"virtual_batch_size": 2}, "both"),
])  # fmt: skip
def test_gradients_taken_outside_of_vmap(options, rule):
    x, scale, bias, dy = batch()
    x4, dy4 = (t.reshape(4, -1, *t.shape[1:]) for t in (x, dy))
    a, b = np.random.default_rng(1).normal(size=(2, C)).astype(np.float32)
    shift = {"shift": x.mean((0, 1))} if options.get("method") == "adaptive" else {}

    def member(x):
        out = nl.batch_norm(x, scale, bias, axis_name="d", rule=rule, **options, **shift)
        return out.y, out.moments.mean, out.moments.var

    def loss(x, with_moments):
        y, mean, var = jax.vmap(member, axis_name="d", out_axes=(0, None, None))(x)
        return (y * dy4).sum() + with_moments * ((mean * a).sum() + (var * b).sum())

    grad = jax.jit(jax.grad(loss))
    dx = np.asarray(grad(x4, 0.0)).reshape(x.shape)
    size = ROWS // 2 if "axis_index_groups" in options else options.get("virtual_batch_size", ROWS)
    for start in range(0, ROWS, size):
        rows = slice(start, start + size)
        ref = OP.reference(x[rows], scale, bias, dy[rows])
        reference.assert_rounded(dx[rows], ref.dx, ref.dx_size, what="dx")
    from_moments = np.asarray(grad(x4, 1.0)).reshape(x.shape) - dx
    n, mean = ROWS * x.shape[1], np.float64(x).mean((0, 1))
    np.testing.assert_allclose(from_moments, a / n + 2 * b * (x - mean) / n, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("vma", [True, False])
def test_j41_the_gradient_of_a_summed_loss_inside_is_p_times_too_large_only_where_nothing_is_typed(vma):
    """docs/distributed.md: without types the transpose of a psum is a psum again; take the local loss there."""
    x, scale, bias, dy = batch()

    def inside(x, dy, summed):
        def loss(x):
            local = (nl.batch_norm(x, scale, bias, axis_name="d").y * dy).sum()
            return jax.lax.psum(local, "d") if summed else local

        return jax.grad(loss)(x)

    def run(summed):
        f = jax.shard_map(
            lambda x, dy: inside(x, dy, summed), mesh=mesh(), in_specs=P("d"), out_specs=P("d"), check_vma=vma
        )  # fmt: skip
        return np.asarray(jax.jit(f)(x, dy))

    ref = OP.reference(x, scale, bias, dy)
    reference.assert_rounded(run(False), ref.dx, ref.dx_size, what="dx of the local loss")
    reference.assert_rounded(run(True), ref.dx * (1 if vma else 4), ref.dx_size * 4, what="dx of the summed loss")


def test_a20_one_program_serves_every_mask_and_every_count():
    x, scale, bias, _ = batch()

    def run(x, where):
        return nl.batch_norm(x, scale, bias, where=where, axis_name="d").y

    f = jax.jit(jax.shard_map(run, mesh=mesh(), in_specs=P("d"), out_specs=P("d")))
    for rows in (ROWS, 7, 1, 0):
        where = np.broadcast_to(np.arange(ROWS).reshape(-1, 1, 1) < rows, x.shape)
        ref = OP.reference(x, scale, bias, where=where)
        reference.assert_rounded(f(x, where), ref.y, ref.y_size)
    assert f._cache_size() == 1
