"""Norms of non-zero entries: dense against packed against NumPy, padding, and the work saved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl
from tests import reference

pytestmark = pytest.mark.family

NORMS = {"layer": (nl.sparse_layer_norm, 1e-5), "rms": (nl.sparse_rms_norm, 1e-6)}


def sparse(rows=7, size=40, density=0.5, dtype=jnp.float32, seed=0):
    """(dense x, stored mask): row 0 is empty, row 1 has one entry."""
    rng = np.random.default_rng(seed)
    stored = rng.random((rows, size)) < density
    stored[0], stored[1] = False, np.arange(size) == 3
    x = np.where(stored, rng.normal(size=(rows, size)) + 2, 0)
    return jnp.asarray(x, jnp.float32).astype(dtype), stored


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", NORMS)
def test_only_stored_entries_are_normalised_and_zeros_stay_zero(name, dtype):
    norm, eps = NORMS[name]
    x, stored = sparse(dtype=dtype)
    rng = np.random.default_rng(1)
    scale, bias = (jnp.asarray(rng.normal(size=40), jnp.float32) for _ in range(2))
    dy = jnp.asarray(rng.normal(size=x.shape), dtype)
    y, vjp = jax.vjp(jax.jit(norm), x, scale, bias)
    dx, dscale, dbias = vjp(dy)
    ref = reference.norm(
        x, scale[None], bias[None], np.where(stored, dy, 0), axes=(1,), eps=eps, centered=name == "layer", where=stored
    )
    reference.assert_rounded(y, np.where(stored, ref.y, 0), ref.y_size)
    reference.assert_rounded(dx, np.where(stored, ref.dx, 0), ref.dx_size, what="dx")
    reference.assert_sum(dscale, np.where(stored, ref.dscale, 0), (1, 40))
    reference.assert_sum(dbias, np.where(stored, np.float64(dy), 0), (1, 40))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_packed_rows_equal_the_dense_form_in_any_order(name, dtype):
    norm, _ = NORMS[name]
    x, stored = sparse(dtype=dtype)
    rng = np.random.default_rng(2)
    scale, bias, dy = jnp.asarray(rng.normal(size=40), jnp.float32), jnp.ones(40), rng.normal(size=x.shape)
    rows, columns = (t[order] for order in [rng.permutation(stored.sum())] for t in np.nonzero(stored))
    dy = jnp.asarray(dy, dtype)

    def packed(values, scale, bias):
        ids = {"segment_ids": jnp.asarray(rows), "num_segments": len(x), "feature_ids": jnp.asarray(columns)}
        return norm(values, scale, bias, **ids)

    y, vjp = jax.vjp(jax.jit(packed), x[rows, columns], scale, bias)
    dense, dense_vjp = jax.vjp(jax.jit(norm), x, scale, bias)
    assert_close = functools.partial(
        np.testing.assert_allclose, rtol=2e-2 if dtype == jnp.bfloat16 else 1e-4, atol=1e-4
    )
    assert_close(np.float32(y), np.float32(dense)[rows, columns])
    found, want = vjp(dy[rows, columns]), dense_vjp(dy)
    assert_close(np.float32(found[0]), np.float32(want[0])[rows, columns])
    assert_close(found[1], want[1])
    assert_close(found[2], want[2])


def test_narrow_ids_have_room_for_many_rows():
    x = jnp.arange(4000.0)
    run = jax.jit(functools.partial(nl.sparse_rms_norm, num_segments=100))
    ids = np.arange(4000) % 100
    narrow = run(x, segment_ids=jnp.asarray(ids, jnp.int8))
    np.testing.assert_array_equal(narrow, run(x, segment_ids=jnp.asarray(ids, jnp.int32)))


def test_padding_enters_nothing_even_as_nan():
    x = jnp.array([1.0, 3.0, jnp.nan, jnp.inf, 5.0, 6.0])
    ids = jnp.array([0, 0, -1, 2, 1, 1])
    run = jax.jit(functools.partial(nl.sparse_layer_norm, segment_ids=ids, num_segments=2))
    y, vjp = jax.vjp(run, x)
    np.testing.assert_allclose(y, [-1, 1, 0, 0, -1, 1], atol=1e-4)
    (dx,) = vjp(jnp.arange(6.0))
    assert np.isfinite(dx).all() and dx[2] == dx[3] == 0


@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_packed_rows_are_accurate_at_large_means(mean):  # CASES: C1, C3
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=4000) + mean, jnp.float32)
    ids = np.arange(4000) % 4
    y = np.float64(jax.jit(functools.partial(nl.sparse_layer_norm, segment_ids=ids, num_segments=4))(x))
    for row in range(4):
        v = np.float64(x)[ids == row]
        np.testing.assert_allclose(y[ids == row], (v - v.mean()) / np.sqrt(v.var() + 1e-5), atol=3e-6)


@pytest.mark.parametrize(("name", "saved"), [("layer", 0.25), ("rms", 0.35)])
def test_packing_half_the_entries_halves_the_work(name, saved):
    norm, _ = NORMS[name]
    scale = bias = jnp.ones(512)

    def flops(run, *args):
        return jax.jit(run).lower(*args).compile().cost_analysis()["flops"]

    def packed(stored):
        rows, columns = (jnp.asarray(t, jnp.int32) for t in np.nonzero(stored))
        run = lambda v, s, b: norm(v, s, b, segment_ids=rows, num_segments=256, feature_ids=columns)  # noqa: E731
        return flops(run, jnp.ones(len(rows)), scale, bias)

    checkered = np.indices((256, 512)).sum(0) % 2 == 0
    half, whole = packed(checkered), packed(np.ones((256, 512), bool))
    assert half <= 0.52 * whole
    assert half <= (1 - saved) * flops(norm, jnp.asarray(checkered, jnp.float32), scale, bias)


X, IDS = jnp.ones(6), jnp.zeros(6, int)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: nl.sparse_layer_norm(X, segment_ids=IDS), "`num_segments` must be the number of rows"),
    (lambda: nl.sparse_layer_norm(X, num_segments=2), "give `segment_ids` too"),
    (lambda: nl.sparse_rms_norm(X[None], segment_ids=IDS, num_segments=1), "`x` must be the stored values"),
    (lambda: nl.sparse_rms_norm(X, segment_ids=IDS[:3], num_segments=1), "`segment_ids` must have the shape of `x`"),
    (lambda: nl.sparse_rms_norm(X, jnp.ones(4), segment_ids=IDS, num_segments=1), "`scale` must have shape"),
    (lambda: nl.sparse_rms_norm(X, segment_ids=IDS, num_segments=1, rule="both"), "`rule` must be one of"),
    (lambda: nl.sparse_rms_norm(X, eps=-1.0), "`eps` must be >= 0"),
])  # fmt: skip
def test_wrong_values_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_ids_that_are_no_integers_are_refused():
    with pytest.raises(TypeError, match="`segment_ids` must be integers; got float32"):
        nl.sparse_rms_norm(X, segment_ids=X, num_segments=1)
