"""Cases that a review of the core found broken: each a small input and the right answer."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import normlib as nl
from tests import reference
from tests.distributed import mesh
from tests.matrix import BY_NAME

pytestmark = pytest.mark.fast

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3)).astype(np.float32)


def normalized(x, axes=(0,), eps=1e-5):
    x = np.float64(x)
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


@pytest.mark.parametrize(("kind", "vma"), list(itertools.product(["near", "one far", "nan", "equal"], [True, False])))
def test_devices_may_hold_different_shifts(kind, vma):
    shifts = {
        "near": np.linspace(-0.8, 0.8, 4)[:, None] * np.ones((1, 3)), "one far": np.diag([0, 0, 1e3, 0])[:, :3],
        "nan": np.where(np.arange(4)[:, None] == 2, np.nan, np.zeros((4, 3))), "equal": np.full((4, 3), 0.1),
    }[kind].astype(np.float32)  # fmt: skip

    def run(x, shift):
        return nl.batch_norm(x, axis_name="d", method="adaptive", shift=shift[0]).y

    y = jax.jit(jax.shard_map(run, mesh=mesh(), in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=vma))(X, shifts)
    np.testing.assert_allclose(y, normalized(X), atol=2e-6)


@pytest.mark.parametrize("shift", [0.0, 1e4, 1e30, np.nan])
def test_running_statistics_of_virtual_batches_on_many_devices_ignore_a_poor_shift(shift, monkeypatch):
    x = X + np.float32(1e4)
    monkeypatch.setattr("normlib.scope.Scope.gather_limit", 2)
    limited = functools.partial(nl.Scope, gather_limit=2)
    monkeypatch.setattr("normlib._batch.Scope", limited)

    def run(x):
        return nl.batch_norm(x, axis_name="d", virtual_batch_size=2, shift=jnp.full(3, shift)).moments

    moments = jax.jit(jax.shard_map(run, mesh=mesh(), in_specs=P("d"), out_specs=P()))(x)
    np.testing.assert_allclose(moments.var, np.float64(x).var(0), rtol=1e-5)
    np.testing.assert_allclose(moments.mean, np.float64(x).mean(0), rtol=1e-6)


def test_a_complex_mean_far_from_the_shift_is_redone():
    z = (X + 1j * X[::-1] + 1e4j).astype(np.complex64)
    y = nl.batch_norm(z, shift=jnp.zeros(3)).y
    wide = z.astype(np.complex128)
    centred = wide - wide.mean(0)
    np.testing.assert_allclose(y, centred / np.sqrt((abs(centred) ** 2).mean(0) + 1e-5), atol=1e-5)


@pytest.mark.parametrize("rule", ["reverse", "both", "autodiff"])
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm", "group_norm", "layer_norm"])
def test_a_scale_of_zero_beside_a_mask_still_learns(name, rule):
    op = BY_NAME[name]
    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=(2, *op.shape)).astype(np.float32)
    where = rng.random(op.shape) < 0.8
    zero, bias = jnp.zeros(op.parameter_shape), jnp.zeros(op.parameter_shape)
    got = jax.jit(jax.grad(lambda s: (op.call(x, s, bias, where=where, rule=rule) * dy).sum()))(zero)
    xhat = op.reference(x, np.ones(op.parameter_shape), None, dy, where)
    known = np.where(where | (dy != 0), xhat.y, 0)
    reference.assert_sum(got, dy * known, op.kept_shape)


def test_rescaled_constant_rows_give_bias():
    for value in (1e20, -3e30, 1e38):
        assert nl.layer_norm(jnp.full((1, 8), value), rescale=True).tolist() == [[0.0] * 8]


def test_rescaling_one_sample_leaves_the_others_alone():
    x = RNG.normal(size=(3, 4, 6)).astype(np.float32)
    big = np.stack([x[0] * np.float32(1e30), x[1], x[2] * np.float32(1e18)])
    y = jax.jit(functools.partial(nl.group_norm, num_groups=2, rescale=True))(big)
    want = [reference.norm(b[None], axes=(1,), groups=2, channel=2, eps=1e-5).y[0] for b in big]
    np.testing.assert_allclose(y, want, atol=3e-6)


@pytest.mark.parametrize("options", [{}, {"virtual_batch_size": 4}, {"axis_name": "d"}])
def test_rescaling_one_channel_leaves_the_others_alone(options):
    x = X * np.array([1e30, 1, 1], np.float32)

    def norm(x):
        return nl.batch_norm(x, rescale=True, **options).y

    def run(x):
        return jax.grad(lambda x: (norm(x) ** 3).sum())(x), norm(x)

    if "axis_name" in options:
        dx, y = jax.jit(jax.shard_map(run, mesh=mesh(), in_specs=P("d"), out_specs=P("d")))(x)
    else:
        dx, y = jax.jit(run)(x)
    rows = 4 if "virtual_batch_size" in options else 8
    want = np.concatenate([normalized(part) for part in np.split(x, 8 // rows)])
    np.testing.assert_allclose(y, want, atol=3e-6)
    assert np.isfinite(dx).all()


def test_a_masked_entry_does_not_choose_the_rescaling():
    x, where = jnp.array([[1.0, 2.0, 3.0, 1e20]]), jnp.array([[True, True, True, False]])
    y = nl.layer_norm(x, where=where, rescale=True)
    np.testing.assert_allclose(y[0, :3], normalized(np.array([[1.0, 2.0, 3.0]]), (1,))[0], atol=1e-6)


@pytest.mark.parametrize(("axis", "jit"), [((1, 2), True), ((2,), False)])
def test_batch_invariant_layer_norm_over_any_axes_keeps_its_bits(axis, jit):  # CASES: D26
    y = np.random.default_rng(3).normal(size=(64, 8, 48)).astype(np.float32)
    run = functools.partial(nl.layer_norm, axis=axis, batch_invariant=True)
    run = jax.jit(run) if jit else run
    whole = np.asarray(run(y))
    for n in (1, 5, 64):
        np.testing.assert_array_equal(run(y[:n]), whole[:n])
    if axis == (2,):
        for n in (1, 5):
            np.testing.assert_array_equal(run(y[:, :n]), whole[:, :n])


@pytest.mark.parametrize(("backend", "options", "shape"), [
    ("npu", {}, (64, 257, 48)), ("pallas", {"platform": "gpu", "interpret": True}, (8, 700, 16)),
], ids=["npu", "gpu"])  # fmt: skip
def test_batch_invariant_norms_over_the_middle_keep_their_bits_in_kernels(backend, options, shape):
    """Tiles of whole channels depend on how many samples there are: such a norm does not take them."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32) + 1
    with nl.use_backend(backend, **options):
        run = jax.jit(functools.partial(nl.layer_norm, axis=1, batch_invariant=True))
        np.testing.assert_array_equal(run(x[:2]), run(x)[:2])


def test_a_last_virtual_batch_of_one_row_is_refused():  # CASES: B1
    with pytest.raises(ValueError, match="one value per set"):
        nl.batch_norm(jnp.ones((7, 3)), virtual_batch_size=3, ragged=True)
    assert nl.batch_norm(jnp.ones((7, 3)), virtual_batch_size=3, ragged=True, on_single="zero").y.shape == (7, 3)


def test_a_tiny_variance_survives_an_old_value_without_weight():  # CASES: J30, J34
    moments = nl.Moments.of(jnp.array([[1e-5], [-1e-5]]), 0)
    _, var = nl.update_running(jnp.zeros(1), jnp.ones(1), moments, momentum=0.0)
    np.testing.assert_allclose(var, 1e-10, rtol=1e-5)


def test_a_shift_of_a_wider_type_is_taken_in_the_type_of_the_statistics():
    with jax.enable_x64(True):
        y = jax.jit(lambda x, k: nl.batch_norm(x, shift=k).y)(X, jnp.zeros(3, jnp.float64))
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, normalized(X), atol=2e-6)
    y = jax.jit(lambda x, k: nl.batch_norm(x, shift=k).y)(X, jnp.zeros(3, jnp.complex64))
    np.testing.assert_allclose(y, normalized(X), atol=2e-6)


@pytest.mark.parametrize("norm", ["layer", "batch", "groups"])
def test_the_rule_for_both_modes_takes_counts_that_vary_over_devices(norm):
    def loss(x):
        where = x > -1
        if norm == "layer":
            return (nl.layer_norm(x, where=where, rule="both") ** 3).sum()
        options = {"axis_name": "d", "axis_index_groups": [[0, 1], [2, 3]]} if norm == "groups" else {}
        return (nl.batch_norm(x, where=where, rule="both", on_single="zero", **options).y ** 3).sum()

    both = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh(), in_specs=P("d"), out_specs=P("d")))
    assert np.isfinite(both(X)).all()


def test_symbolic_sizes_can_be_exported():
    (n,) = jax.export.symbolic_shape("n")
    args = jax.ShapeDtypeStruct((n, 4, 6), jnp.float32)
    for norm in (lambda x: nl.group_norm(x, num_groups=2), nl.instance_norm, nl.layer_norm):
        assert jax.export.export(jax.jit(norm))(args).out_avals[0].shape[1:] == (4, 6)


def test_counts_are_int32_under_x64_too():
    with jax.enable_x64(True):
        assert nl.batch_norm(jnp.ones((8, 3)), virtual_batch_size=4).moments.count.dtype == jnp.int32


def test_an_empty_batch_of_virtual_batches_stays_empty():  # CASES: B3
    out = nl.batch_norm(jnp.zeros((0, 3)), virtual_batch_size=4)
    assert out.y.shape == (0, 3) and out.moments.count.tolist() == [0, 0, 0]


def test_statistics_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="must have the moments' shape"):
        nl.update_running(jnp.zeros((3, 1)), jnp.ones((3, 1)), nl.Moments.of(X, 0))
    with pytest.raises(ValueError, match="`on_single` must be one of"):
        nl.batch_norm(X, where=np.ones((8, 1), bool), on_single="foo")
    with pytest.raises(ValueError, match="`shift` must have shape"):
        nl.batch_norm(X, shift=jnp.zeros((8, 3)))


def test_numpy_integers_are_integers():
    assert nl.group_norm(X, num_groups=np.int64(3), on_single="zero").shape == X.shape
    assert nl.batch_norm(X, virtual_batch_size=np.int64(4)).y.shape == X.shape
