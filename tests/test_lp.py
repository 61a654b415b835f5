"""Lengths: orders, extremes, gradients at their kinks, clipping."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normlib as nl

pytestmark = pytest.mark.family


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("p", [0, 0.5, 1, 1.5, 2, 3, 10, math.inf, -math.inf])
@pytest.mark.parametrize("axis", [None, 1, (0, -1)])
def test_every_order_matches_numpy(p, axis):
    x = draw(3, 4, 5).at[1, 2].set(0.0)
    y = jax.jit(functools.partial(nl.lp_norm, p=p, axis=axis))(x)
    size = abs(np.float64(x))
    axes = axis if axis is not None else (0, 1, 2)
    want = {0: lambda: (size > 0).sum(axes), math.inf: lambda: size.max(axes), -math.inf: lambda: size.min(axes)}
    np.testing.assert_allclose(y, want[p]() if p in want else (size**p).sum(axes) ** (1 / p), rtol=2e-6)
    kept = nl.lp_norm(x, p=p, axis=axis, keepdims=True)
    np.testing.assert_allclose(kept.reshape(y.shape), y, rtol=1e-6)
    assert kept.ndim == 3


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e10, 1e30])
@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_powers_neither_overflow_nor_vanish(p, size):
    x = np.float32([1.0, -2.0, 2.0]) * np.float32(size)
    y, dy = jax.jit(jax.value_and_grad(functools.partial(nl.lp_norm, p=p)))(x)
    exact = (abs(np.float64(x)) ** p).sum() ** (1 / p)
    np.testing.assert_allclose(y, exact, rtol=1e-5)
    np.testing.assert_allclose(dy, np.sign(x) * (abs(np.float64(x)) / exact) ** (p - 1), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_lengths_are_summed_in_float32(dtype):
    x = jnp.full(4096, 300.0, dtype)
    assert nl.euclidean_norm(x).dtype == dtype
    np.testing.assert_allclose(np.float64(nl.euclidean_norm(x)), 300.0 * 64, rtol=2.0**-8)


def test_integers_give_float32():
    y = nl.euclidean_norm(jnp.array([[300, 400]], jnp.int32), axis=-1)
    assert y.dtype == jnp.float32 and y.tolist() == [500.0]


@pytest.mark.parametrize("p", [0, 0.5, 1, 2, 3, math.inf, -math.inf])
def test_gradients_at_zero_and_ties_are_finite_and_shared(p):
    grad = jax.jit(jax.grad(functools.partial(nl.lp_norm, p=p)))
    assert np.isfinite(grad(jnp.zeros(4))).all()
    tied = np.asarray(grad(jnp.array([2.0, -2.0, 2.0, -2.0])))
    assert np.isfinite(tied).all()
    if math.isinf(p):
        np.testing.assert_allclose(tied, [0.25, -0.25, 0.25, -0.25])
    y, y_dot = jax.jvp(functools.partial(nl.lp_norm, p=p), (jnp.array([1.0, 3.0]),), (jnp.array([0.5, 1.0]),))
    assert np.isfinite([y, y_dot]).all()


def test_l2_normalize_divides_by_eps_below_it():
    y, vjp = jax.vjp(functools.partial(nl.l2_normalize, eps=0.1), jnp.array([[3.0, 4.0], [0.003, 0.004], [0.0, 0.0]]))
    np.testing.assert_allclose(y, [[0.6, 0.8], [0.03, 0.04], [0, 0]], rtol=1e-6)
    (dx,) = vjp(jnp.ones((3, 2)))
    np.testing.assert_allclose(dx, [[(1 - 0.6 * 1.4) / 5, (1 - 0.8 * 1.4) / 5], [10, 10], [10, 10]], rtol=1e-5)
    assert np.isnan(nl.l2_normalize(jnp.array([1e30, 1e30]))).all()


def test_renorm_leaves_short_slices_alone():
    x = draw(4, 6) * jnp.array([[0.01], [1.0], [100.0], [0.0]])
    y = np.asarray(nl.renorm(x, p=2.0, axis=0, maxnorm=1.0))
    np.testing.assert_array_equal(y[[0, 3]], x[jnp.array([0, 3])])
    np.testing.assert_allclose(np.linalg.norm(y[1:3], axis=1), 1.0, rtol=1e-6)
    grads = jax.grad(lambda x: (nl.renorm(x, p=2.0, axis=0, maxnorm=1.0) ** 2).sum())(x)
    assert np.isfinite(grads).all()
    np.testing.assert_allclose(grads[2], 0, atol=1e-6)  # a slice on the sphere does not change its length


def test_mean_variance_norm_has_eps_outside_the_root():
    x = draw(2, 3, 4, 5) * 1e-8
    y = nl.mean_variance_norm(x, eps=1e-8)
    wide = np.float64(x)
    mean, std = wide.mean((0, 2, 3), keepdims=True), wide.std((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(y, (wide - mean) / (std + 1e-8), rtol=1e-4, atol=1e-6)
    flat, vjp = jax.vjp(nl.mean_variance_norm, jnp.full((2, 3, 4, 5), 1234.0))
    assert not np.asarray(flat).any() and np.isfinite(vjp(x)[0]).all()


def tree():
    return {"w": draw(3, 4), "b": (draw(5, seed=1).astype(jnp.bfloat16), draw(1, seed=2))}


def test_foreach_norm_is_the_norm_of_every_array():
    norms = jax.jit(nl.foreach_norm)(tree())
    for n, t in zip(jax.tree.leaves(norms), jax.tree.leaves(tree())):
        np.testing.assert_allclose(n, np.linalg.norm(np.float64(t).ravel()), rtol=1e-6)


@pytest.mark.parametrize("longest", [0.5, 1e3])
def test_clipping_by_the_common_norm_chains_with_optax(longest):
    clip, before = nl.clip_by_foreach_norm(longest), tree()
    after, _ = jax.jit(clip.update)(before, clip.init(before))
    leaves = [np.float64(t) for t in jax.tree.leaves(before)]
    factor = min(1.0, longest / np.sqrt(sum((t**2).sum() for t in leaves)))
    for a, t, given in zip(jax.tree.leaves(after), leaves, jax.tree.leaves(before)):
        assert a.dtype == given.dtype
        np.testing.assert_allclose(np.float64(a), t * factor, rtol=2.0**-8 if a.dtype == jnp.bfloat16 else 1e-6)
    chained = optax.chain(clip, optax.sgd(0.1))
    updates, _ = chained.update(before, chained.init(before))
    np.testing.assert_allclose(updates["w"], -0.1 * after["w"], rtol=1e-6)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_clipping_per_array_scales_only_the_long_ones(p):
    clip = nl.clip_by_foreach_norm(1.5, p=p, per_array=True)
    zero = {"long": jnp.array([3.0, -4.0]), "short": jnp.array([0.1]), "zero": jnp.zeros(2)}
    out, _ = clip.update(zero, clip.init(None))
    np.testing.assert_allclose(np.linalg.norm(out["long"], ord=p), 1.5, rtol=1e-6)
    np.testing.assert_array_equal(out["short"], zero["short"])
    np.testing.assert_array_equal(out["zero"], 0)


X = jnp.ones((4, 6))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: nl.lp_norm(X, p=-1.0), "`p` must be 0 or greater, or -inf; got -1"),
    (lambda: nl.lp_norm(X, p=math.nan), "`p` must be a number"),
    (lambda: nl.lp_norm(X, axis=2), "`axis` 2 is out of range"),
    (lambda: nl.lp_norm(X, eps=-1.0), "`eps` must be >= 0"),
    (lambda: nl.l2_normalize(X, axis=(1, -1)), "names an axis of x .* twice"),
    (lambda: nl.l2_normalize(X, eps=-1.0), "`eps` must be >= 0"),
    (lambda: nl.renorm(X, p=2.0, axis=0, maxnorm=-1.0), "`maxnorm` must be a number >= 0; got -1"),
    (lambda: nl.mean_variance_norm(X), "`axis` 2 is out of range"),
    (lambda: nl.clip_by_foreach_norm(-1.0), "`max_norm` must be a number >= 0"),
    (lambda: nl.foreach_norm([X], p=-2.0), "`p` must be 0 or greater"),
])  # fmt: skip
def test_wrong_values_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_order_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="`p` must be a number; got 'fro'"):
        nl.lp_norm(X, p="fro")
