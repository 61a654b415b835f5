"""Batch norm across devices: every mode and method equals the single-device norm of the concatenated rows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import normlib as nl
from tests import reference
from tests.distributed import GLOBAL_MODES, MANUAL_MODES, mesh, step
from tests.matrix import BY_NAME

pytestmark = pytest.mark.fast


def pairs(*lists):
    return list(itertools.product(*lists))


METHODS = ["gather", "two_phase", "shifted", "adaptive"]
ROWS, SPACE, C = 16, 3, 5
OP = BY_NAME["batch_norm"].at((ROWS, SPACE, C))


def batch(rows=ROWS, mean=1.0, seed=0):
    """Arrays of a global batch whose devices see clearly different means."""
    rng = np.random.default_rng(seed)
    drift = np.linspace(-2, 2, rows)[:, None, None]
    x = (rng.normal(size=(rows, SPACE, C)) + drift + mean).astype(np.float32)
    dy = rng.normal(size=x.shape).astype(np.float32)
    scale, bias = rng.normal(size=(2, C)).astype(np.float32)
    return x, scale, bias, dy


def uneven(rows=ROWS):
    """A mask with 4 / 0 / 2 / 3 valid rows on four devices, ragged in space too."""  # CASES: A1, J19, J20
    where = np.zeros((rows, SPACE, 1), bool)
    for device, valid in enumerate((4, 0, 2, 3)):
        where[device * rows // 4 :][:valid] = True
    where[0, 1:] = False
    return where


def check(results, x, scale, bias, dy, where=None, op=OP):
    y, dx, dscale, dbias, moments = results
    op = op.at(x.shape)
    ref = op.reference(x, scale, bias, dy, where)
    reference.assert_rounded(y, ref.y, ref.y_size)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")
    reference.assert_sum(dscale, ref.dscale, op.kept_shape, what="dscale")
    reference.assert_sum(dbias, ref.dbias, op.kept_shape, what="dbias")
    np.testing.assert_allclose(moments.mean, ref.mean[0, 0], rtol=3e-7, atol=3e-7)
    np.testing.assert_allclose(moments.var, ref.var[0, 0], rtol=2e-6)
    np.testing.assert_array_equal(moments.count, ref.count[0, 0])


@pytest.mark.parametrize(("mode", "method"), pairs(MANUAL_MODES, METHODS))
def test_full_synchronisation_equals_one_device(mode, method):  # CASES: J42, J43, A13
    x, scale, bias, dy = batch()
    shift = None if method in ("gather", "two_phase") else (x.mean((0, 1)) * 1.01).astype(np.float32)
    check(step(mode, x, scale, bias, dy, method=method, shift=_hashable(shift)), x, scale, bias, dy)


def _hashable(shift):
    return None if shift is None else tuple(shift.tolist())


@pytest.mark.parametrize(("mode", "method"), [
    ("vma", "gather"), ("vma", "two_phase"), ("vma_out", "adaptive"), ("novma", "gather"), ("novma_out", "two_phase"),
    ("novma", "adaptive"), ("pmap", "gather"), ("pmap", "shifted"),
])  # fmt: skip
def test_unequal_counts_and_an_empty_device_are_exact(mode, method):  # CASES: A1, A2, A3, J19, J20
    x, scale, bias, dy = batch()
    where = uneven()
    shift = None if method in ("gather", "two_phase") else (0.1,) * C
    check(step(mode, x, scale, bias, dy, where, method=method, shift=shift), x, scale, bias, dy, where)


@pytest.mark.parametrize(("mode", "shift"), pairs(["auto", "explicit"], [None, "near", "far"]))
def test_a_globally_sharded_batch_under_jit_has_global_statistics(mode, shift):
    x, scale, bias, dy = batch()
    guess = {"near": tuple((x.mean((0, 1)) * 1.01).tolist()), "far": (1e3,) * C, None: None}[shift]
    check(step(mode, x, scale, bias, dy, shift=guess), x, scale, bias, dy)


@pytest.mark.parametrize("mode", ["vma", "novma_out", "pmap"])
def test_eight_devices(mode):
    x, scale, bias, dy = batch()
    check(step(mode, x, scale, bias, dy, devices=8), x, scale, bias, dy)


GROUPS = [((0, 1), (2, 3)), ((0, 3), (1, 2))]


def group_rows(groups, rows=ROWS, devices=4):
    per = rows // devices
    return [np.concatenate([np.arange(d * per, (d + 1) * per) for d in g]) for g in groups]


@pytest.mark.parametrize(("mode", "groups", "masked"), [
    ("vma", 0, False), ("vma", 1, True), ("vma_out", 0, True), ("novma", 0, False), ("novma", 1, True),
    ("novma_out", 1, False), ("pmap", 0, True), ("pmap", 1, False),
])  # fmt: skip
def test_groups_of_devices_share_among_themselves(mode, groups, masked):  # CASES: A7, J48
    x, scale, bias, dy = batch()
    where = uneven() if masked else None
    y, dx, dscale, dbias, moments = step(mode, x, scale, bias, dy, where, axis_index_groups=GROUPS[groups])
    terms_scale, terms_bias = np.zeros(x.shape), np.zeros(x.shape)
    for rows in group_rows(GROUPS[groups]):
        ref = OP.reference(x[rows], scale, bias, dy[rows], None if where is None else where[rows])
        reference.assert_rounded(np.asarray(y)[rows], ref.y, ref.y_size)
        reference.assert_rounded(np.asarray(dx)[rows], ref.dx, ref.dx_size, what="dx")
        terms_scale[rows], terms_bias[rows] = ref.dscale, ref.dbias
    reference.assert_sum(dscale, terms_scale, OP.kept_shape, what="dscale")
    reference.assert_sum(dbias, terms_bias, OP.kept_shape, what="dbias")
    whole = OP.reference(x, scale, bias, dy, where)
    np.testing.assert_allclose(moments.mean, whole.mean[0, 0], rtol=3e-7, atol=3e-7)
    np.testing.assert_allclose(moments.var, whole.var[0, 0], rtol=2e-6)
    np.testing.assert_array_equal(moments.count, whole.count[0, 0])


def ghost(x, scale, bias, dy, size, where=None):
    """Reference of virtual batches of `size` neighbouring rows: (y, y_size, dx, dx_size, dscale, dbias terms)."""
    parts = []
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        parts.append(OP.reference(x[rows], scale, bias, dy[rows], None if where is None else where[rows]))
    join = lambda name: np.concatenate([getattr(p, name) for p in parts])  # noqa: E731
    return [join(n) for n in ("y", "y_size", "dx", "dx_size", "dscale", "dbias")]


@pytest.mark.parametrize(("mode", "size"), [
    *pairs(["vma", "novma", "pmap"], [2, 4, 8, 16]), ("vma_out", 2), ("novma_out", 8), ("auto", 4),
    ("explicit", 4), ("auto", 8), ("vma_out", 8),
])  # fmt: skip
def test_virtual_batches_inside_and_across_devices(mode, size):  # CASES: B14
    x, scale, bias, dy = batch()
    y, dx, dscale, dbias, moments = step(mode, x, scale, bias, dy, virtual_batch_size=size)
    ref_y, y_size, ref_dx, dx_size, terms_scale, terms_bias = ghost(x, scale, bias, dy, size)
    reference.assert_rounded(y, ref_y, y_size)
    reference.assert_rounded(dx, ref_dx, dx_size, what="dx")
    reference.assert_sum(dscale, terms_scale, OP.kept_shape, what="dscale")
    reference.assert_sum(dbias, terms_bias, OP.kept_shape, what="dbias")
    whole = OP.reference(x, scale, bias)
    np.testing.assert_allclose(moments.var, whole.var[0, 0], rtol=2e-6)
    assert (np.asarray(moments.count) == ROWS * SPACE).all()


def test_virtual_batches_across_explicitly_sharded_devices_need_auto_axes():
    x, scale, bias, dy = batch()
    with pytest.raises(Exception, match="(?i)shard"):
        step("explicit", x, scale, bias, dy, virtual_batch_size=8)
    place = jax.sharding.NamedSharding(mesh(explicit=True), P("d"))
    norm = jax.sharding.auto_axes(lambda x: nl.batch_norm(x, scale, bias, virtual_batch_size=8).y, out_sharding=place)
    with jax.set_mesh(mesh(explicit=True)):
        y = jax.jit(norm)(jax.device_put(x, place))
    ref_y, y_size = ghost(x, scale, bias, dy, 8)[:2]
    reference.assert_rounded(y, ref_y, y_size)


@pytest.mark.parametrize("masked", [False, True])
def test_a_ragged_last_virtual_batch_is_smaller(masked):  # CASES: B14
    x, scale, bias, dy = batch()
    where = np.random.default_rng(1).random((ROWS, SPACE, 1)) < 0.8 if masked else None

    def norm(x, scale, bias):
        return nl.batch_norm(x, scale, bias, virtual_batch_size=5, ragged=True, where=where)

    out, vjp = jax.vjp(jax.jit(norm), jnp.asarray(x), jnp.asarray(scale), jnp.asarray(bias))
    dx, dscale, _ = vjp(nl.BatchNormOutput(jnp.asarray(dy), jax.tree.map(_zero_cotangent, out.moments)))
    ref_y, y_size, ref_dx, dx_size, terms, _ = ghost(x, scale, bias, dy, 5, where)
    reference.assert_rounded(out.y, ref_y, y_size)
    reference.assert_rounded(dx, ref_dx, dx_size, what="dx")
    reference.assert_sum(dscale, terms, OP.kept_shape)
    whole = OP.reference(x, scale, bias, where=where)
    np.testing.assert_allclose(out.moments.var, whole.var[0, 0], rtol=2e-6)


def _zero_cotangent(t):
    if jnp.issubdtype(t.dtype, jnp.integer):
        return np.zeros(t.shape, jax.dtypes.float0)
    return jnp.zeros_like(t)


def test_group_mean_running_statistics_are_the_mean_of_group_moments():  # CASES: J33
    x, scale, bias, dy = batch()
    for mode, options in (("vma", {"axis_index_groups": GROUPS[1]}), ("auto", {"virtual_batch_size": 8})):
        groups = group_rows(GROUPS[1]) if mode == "vma" else [np.arange(8), np.arange(8, 16)]
        moments = step(mode, x, scale, bias, dy, running="group_mean", **options)[-1]
        parts = [OP.reference(x[rows]) for rows in groups]
        np.testing.assert_allclose(moments.mean, np.mean([p.mean[0, 0] for p in parts], 0), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(moments.var, np.mean([p.var[0, 0] for p in parts], 0), rtol=2e-6)
        np.testing.assert_array_equal(moments.count, 8 * SPACE)
        unbiased = np.mean([p.var[0, 0] for p in parts], 0) * (8 * SPACE) / (8 * SPACE - 1)
        np.testing.assert_allclose(moments.unbiased_var, unbiased, rtol=2e-6)


@pytest.mark.parametrize(("shift", "mode"), pairs(["nan", "inf", "-inf", "1e30", "mixed"], ["vma", "auto"]))
def test_whatever_the_shift_holds_y_is_that_of_a_fresh_state(shift, mode):  # CASES: J27
    x, scale, bias, dy = batch()
    values = {"nan": [np.nan] * C, "inf": [np.inf] * C, "-inf": [-np.inf] * C, "1e30": [1e30] * C,
              "mixed": [0.0, np.nan, 1e30, 1.0, -np.inf]}[shift]  # fmt: skip
    check(step(mode, x, scale, bias, dy, method="adaptive", shift=tuple(values)), x, scale, bias, dy)


@pytest.mark.parametrize(("method", "mean"), pairs(["gather", "two_phase", "adaptive"], [1e2, 1e4, 1e5]))
def test_mean_over_sigma_of_1e4_and_more_is_accurate_across_devices(method, mean):  # CASES: J8
    x, scale, bias, dy = batch(mean=mean)
    y, _, _, _, moments = step("vma", x, scale, bias, dy, method=method)
    ref = OP.reference(x, scale, bias, dy)
    np.testing.assert_allclose(y, ref.y, atol=2e-6)
    np.testing.assert_allclose(moments.var, ref.var[0, 0], rtol=2e-6)


def test_fast_is_the_inaccurate_textbook_form_and_only_on_request():  # CASES: C3
    x, *_ = batch(mean=1e4)
    ref = OP.reference(x)
    error = lambda method: abs(np.asarray(nl.batch_norm(x, method=method).moments.var) / ref.var[0, 0] - 1).max()  # noqa: E731
    assert error("fast") > 1e-2
    assert error("auto") < 1e-5


@pytest.mark.parametrize(("mode", "dtype"), pairs(["vma", "novma", "pmap"], [jnp.bfloat16, jnp.float16]))
def test_16_bit_batches_pool_in_float32(mode, dtype):  # CASES: A4
    x, scale, bias, dy = batch()
    x, dy = jnp.asarray(x, dtype), jnp.asarray(dy, dtype)
    y, dx, *_ = step(mode, x, scale, bias, dy)
    ref = OP.reference(x, scale, bias, dy)
    assert y.dtype == dtype and dx.dtype == dtype
    reference.assert_rounded(y, ref.y, ref.y_size)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")
    text = step(mode, x, scale, bias, dy, lower=True).as_text()
    assert not any(t in line for line in text.splitlines() if "all_gather" in line for t in ("bf16", "f16>"))


@pytest.mark.parametrize(("mode", "groups"), pairs(["vma", "vma_out", "novma_out"], [None, GROUPS[0]]))
def test_cotangents_of_the_moments_are_honoured(mode, groups):
    x, *_ = batch()
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, C)).astype(np.float32)
    spec = P("d")

    def moments_loss(x):
        m = nl.batch_norm(x, axis_name="d", axis_index_groups=groups).moments
        return (m.mean * a).sum() + (m.var * b).sum()

    if mode == "vma":  # the loss is one value for all: its gradient arrives whole
        f = jax.shard_map(jax.grad(moments_loss), mesh=mesh(), in_specs=spec, out_specs=spec)
    else:
        inner = jax.shard_map(
            moments_loss, mesh=mesh(), in_specs=spec, out_specs=P(), check_vma=mode == "vma_out"
        )  # fmt: skip
        f = jax.grad(lambda x: inner(x))
    got = jax.jit(f)(x)
    n, mean = ROWS * SPACE, np.float64(x).mean((0, 1))
    np.testing.assert_allclose(got, a / n + 2 * b * (x - mean) / n, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("mode", "method"), pairs(["vma", "vma_out", "novma_out"], ["gather", "two_phase", "adaptive"])
)
def test_gradient_of_gradient_across_devices(mode, method):
    x, scale, bias, dy = batch()
    vma = mode != "novma_out"

    def inner(x, scale):
        y = nl.batch_norm(x, scale, bias, axis_name="d", method=method).y
        return jax.lax.psum((jnp.tanh(y) * jax.lax.axis_index("d").astype(jnp.float32) + y**3).sum(), "d")

    outer = jax.shard_map(inner, mesh=mesh(), in_specs=(P("d"), P()), out_specs=P(), check_vma=vma)
    penalty = lambda x, s: sum((g**2).sum() for g in jax.grad(outer, (0, 1))(x, s))  # noqa: E731
    got = jax.jit(jax.grad(penalty, (0, 1)))(x, scale)

    def plain(x, scale):
        mean, var = x.mean((0, 1)), x.var((0, 1))
        y = (x - mean) / jnp.sqrt(var + 1e-5) * scale + jnp.asarray(bias, x.dtype)
        index = jnp.repeat(jnp.arange(4), ROWS // 4).reshape(-1, 1, 1)
        return (jnp.tanh(y) * index + y**3).sum()

    with jax.enable_x64(True):
        want = jax.jit(jax.grad(lambda x, s: sum((g**2).sum() for g in jax.grad(plain, (0, 1))(x, s)), (0, 1)))(
            jnp.asarray(x, jnp.float64), jnp.asarray(scale, jnp.float64)
        )
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, atol=3e-6 * float(abs(w).max()))


def test_vmap_with_an_axis_name_synchronises():  # CASES: J38
    x, scale, bias, dy = batch()
    norm = lambda x: nl.batch_norm(x, scale, bias, axis_name=("a", "b"))  # noqa: E731
    nested = jax.vmap(jax.vmap(norm, axis_name="b"), axis_name="a", out_axes=0)
    out = jax.jit(nested)(x.reshape(2, 2, 4, SPACE, C))
    ref = OP.reference(x, scale, bias)
    reference.assert_rounded(out.y.reshape(x.shape), ref.y, ref.y_size)
    only = jax.vmap(
        jax.vmap(lambda x: norm(x).moments.mean, axis_name="b", out_axes=None), axis_name="a", out_axes=None
    )
    np.testing.assert_allclose(jax.jit(only)(x.reshape(2, 2, 4, SPACE, C)), ref.mean[0, 0], rtol=1e-6)


def test_remat_scan_and_vmap_inside_shard_map():  # CASES: J45, J46
    x, scale, bias, dy = batch()

    def norm(x, s):
        return nl.batch_norm(x, s, bias, axis_name="d", method="adaptive").y

    def run(x, dy):
        remat = jax.grad(lambda x: (jax.checkpoint(norm)(x, scale) * dy).sum())(x)
        scanned = jax.grad(lambda x: (jax.lax.scan(lambda c, _: (norm(c, scale), None), x, None, 2)[0] * dy).sum())(x)
        mapped = jax.vmap(lambda s: norm(x, s))(jnp.stack([scale, 2 * scale]))
        jac = jax.jacrev(lambda x: norm(x, scale)[0, 0])(x)
        chunks = nl.welford_scan(x.reshape(-1, C))
        return remat, scanned, mapped, jac, chunks.mean[None]

    f = jax.shard_map(
        run, mesh=mesh(), in_specs=(P("d"), P("d")), out_specs=(P("d"), P("d"), P(None, "d"), P(None, "d"), P("d"))
    )
    remat, scanned, mapped, jac, means = jax.jit(f)(x, dy)
    ref = OP.reference(x, scale, bias, dy)
    reference.assert_rounded(remat, ref.dx, ref.dx_size, what="dx")
    twice = OP.reference(ref.y, scale, bias, dy)
    chained = OP.reference(x, scale, bias, twice.dx)
    np.testing.assert_allclose(scanned, chained.dx, atol=1e-5)
    reference.assert_rounded(mapped[0], ref.y, ref.y_size)
    assert jac.shape == (C, ROWS, SPACE, C) and np.isfinite(jac).all()
    np.testing.assert_allclose(means, x.reshape(4, -1, C).mean(1), rtol=1e-5, atol=1e-6)


def test_without_an_axis_name_nothing_is_shared_between_devices():  # CASES: J49
    x, scale, bias, dy = batch()
    f = jax.jit(
        jax.shard_map(lambda x: nl.batch_norm(x, scale, bias).y, mesh=mesh(), in_specs=P("d"), out_specs=P("d"))
    )
    text = f.lower(x).as_text()
    assert "all_gather" not in text and "all_reduce" not in text
    y = f(x)
    for rows in np.split(np.arange(ROWS), 4):
        ref = OP.reference(x[rows], scale, bias)
        reference.assert_rounded(np.asarray(y)[rows], ref.y, ref.y_size)


def test_one_row_per_device_is_enough_when_devices_share():  # CASES: A9
    x = np.random.default_rng(0).normal(size=(4, C)).astype(np.float32)
    f = lambda x: nl.batch_norm(x, axis_name="d").y  # noqa: E731
    y = jax.jit(jax.shard_map(f, mesh=mesh(), in_specs=P("d"), out_specs=P("d")))(x)
    np.testing.assert_allclose(y, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5), atol=1e-5)
    with pytest.raises(ValueError, match="one value per set"):
        nl.batch_norm(x[:1])


def test_an_unbound_axis_is_named_with_where_to_bind_it():  # CASES: A21
    with pytest.raises(NameError, match="`axis_name`.*'data'.*shard_map"):
        nl.batch_norm(jnp.ones((4, 3)), axis_name="data")


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "method", "masked", "devices"), pairs(MANUAL_MODES, METHODS, [False, True], [4, 8]))
def test_the_full_product_of_modes(mode, method, masked, devices):
    x, scale, bias, dy = batch(rows=32)
    where = uneven(32) if masked else None
    shift = None if method in ("gather", "two_phase") else (0.1,) * C
    check(step(mode, x, scale, bias, dy, where, method=method, shift=shift, devices=devices), x, scale, bias, dy, where)


def test_modes_are_all_covered():
    assert set(MANUAL_MODES) | set(GLOBAL_MODES) == {"vma", "vma_out", "novma", "novma_out", "pmap", "auto", "explicit"}
