"""What is particular to the adaptive norms: shapes of the modulation, 1 + scale in float32, identity at the start."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import normlib as nl
from tests import reference
from tests.distributed import mesh

pytestmark = pytest.mark.family


def draw(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32).astype(dtype)


@pytest.mark.parametrize("call", [
    lambda x, m, t: nl.ada_layer_norm(x, m, t), lambda x, m, t: nl.modulate(x, m, t),
    lambda x, m, t: nl.modulated_group_norm(x, m, t, num_groups=2),
])  # fmt: skip
def test_one_plus_scale_is_formed_in_float32(call):  # CASES: D22
    x, shift = draw(2, 3, 8), draw(2, 8, seed=1)
    scale = jnp.full((2, 8), 2.0**-11)  # 1 + scale rounds to 1 in bfloat16
    plain, scaled = call(x, jnp.zeros((2, 8)), shift), call(x, scale, shift)
    moved = np.float64(scaled) - np.float64(plain)
    np.testing.assert_allclose(moved, (np.float64(plain) - np.float64(shift)[:, None]) * 2.0**-11, atol=1e-6)
    low = call(x.astype(jnp.bfloat16), (scale * 1.5).astype(jnp.bfloat16), shift)
    assert low.dtype == jnp.bfloat16


@pytest.mark.parametrize("shape", [(4, 6), (4, 1, 6), (4, 5, 6)])
def test_every_sample_uses_its_own_row(shape):  # CASES: D22
    x, m, t = draw(4, 5, 6), draw(*shape), draw(*shape, seed=1)
    y = np.asarray(jax.jit(nl.ada_layer_norm)(x, m, t))
    for b in range(4):
        ref = reference.norm(np.float64(x[b]), axes=(1,), eps=1e-5).y
        want = ref * (1 + np.float64(m[b])) + np.float64(t[b])
        np.testing.assert_allclose(y[b], want, atol=1e-5)


def test_leading_batch_axes_and_unbatched_tokens():
    x, m = draw(2, 3, 5, 6), draw(2, 3, 6)
    flat = nl.ada_layer_norm(x.reshape(6, 5, 6), m.reshape(6, 6))
    np.testing.assert_allclose(nl.ada_layer_norm(x, m).reshape(6, 5, 6), flat, atol=1e-6)
    np.testing.assert_allclose(nl.ada_layer_norm(x[0, 0], m[0, 0]), nl.ada_layer_norm(x[:1, 0], m[:1, 0])[0], atol=1e-6)
    np.testing.assert_allclose(
        nl.ada_layer_norm(x[:, 0, 0], m[:, 0]), nl.ada_layer_norm(x[:, 0], m[:, 0])[:, 0], atol=1e-6
    )


def test_adaptive_layer_norm_returns_moments_on_request():
    x = draw(2, 3, 16)
    out = nl.ada_layer_norm(x, jnp.ones((2, 16)), return_moments=True)
    np.testing.assert_allclose(out.moments.mean, np.mean(x, -1), atol=1e-6)
    np.testing.assert_allclose(out.moments.var, np.var(x, -1), rtol=1e-5)


def test_a_zero_block_is_the_identity_at_the_start_and_learns():
    x = draw(2, 5, 8, dtype=jnp.bfloat16)
    weight = jnp.zeros((3, 24))
    condition = draw(2, 3)

    def block(weight, x):
        out = nl.ada_layer_norm_zero(x, condition @ weight)
        return nl.gate_residual(x, jnp.tanh(out.y), out.gate)

    np.testing.assert_array_equal(jax.jit(block)(weight, x), x)
    grad = jax.jit(jax.grad(lambda w: block(w, x.astype(jnp.float32)).sum()))(weight)
    assert np.asarray(grad[:, 16:]).all() and not np.asarray(grad[:, :16]).any()


def test_gate_residual_is_rounded_once():
    x, branch, gate = draw(2, 3, 64, dtype=jnp.bfloat16), draw(2, 3, 64, dtype=jnp.bfloat16, seed=1), draw(2, 64)
    want = np.float64(x) + np.float64(gate)[:, None] * np.float64(branch)
    reference.assert_rounded(nl.gate_residual(x, branch, gate), want, abs(want), most=0.51, all_=0.51)


def test_class_tables_equal_per_sample_parameters_and_a_wrong_label_is_nan():
    x, scale, bias = draw(3, 4, 5), draw(7, 5), draw(7, 5, seed=1)
    labels = jnp.array([6, 0, 3])
    run = jax.jit(nl.conditional_batch_norm)
    by_label, by_row = run(x, scale, bias, labels=labels), run(x, scale[labels], bias[labels])
    np.testing.assert_array_equal(by_label.y, by_row.y)
    plain = nl.batch_norm(x)
    np.testing.assert_allclose(by_label.moments.var, plain.moments.var, rtol=1e-6)
    np.testing.assert_allclose(run(x).y, plain.y, atol=1e-6)
    wrong = run(x, scale, bias, labels=jnp.array([6, 7, 3])).y
    assert np.isnan(wrong[1]).all() and np.isfinite(wrong[jnp.array([0, 2])]).all()


def test_gradients_of_a_class_table_stay_in_the_rows_that_were_used():
    x, labels = draw(3, 4, 5), jnp.array([1, 1, 3])
    dtable = jax.jit(jax.grad(lambda t: (nl.conditional_batch_norm(x, t, labels=labels).y ** 3).sum()))(
        jnp.zeros((5, 5))
    )
    used = np.asarray(dtable).any(1)
    assert used.tolist() == [False, True, False, True, False]


def test_conditional_batch_norm_is_synchronised():
    x, scale = draw(8, 3, 5), draw(8, 5)
    run = functools.partial(nl.conditional_batch_norm, axis_name="d")
    spec = nl.ConditionalBatchNormOutput(P("d"), P())
    split = jax.jit(jax.shard_map(run, mesh=mesh(4), in_specs=(P("d"), P("d")), out_specs=spec))(x, scale)
    whole = nl.conditional_batch_norm(x, scale)
    np.testing.assert_allclose(split.y, whole.y, atol=2e-6)
    np.testing.assert_allclose(split.moments.var, whole.moments.var, rtol=1e-5)


def test_channels_first_equals_channels_last():
    x, m, t = draw(2, 5, 4, 6), draw(2, 6), draw(2, 6, seed=1)
    first = jnp.moveaxis(x, -1, 1)
    for last, turned in [
        (nl.modulated_group_norm(x, m, t, num_groups=3), nl.modulated_group_norm(first, m, t, num_groups=3, axis=1)),
        (nl.conditional_batch_norm(x, m, t).y, nl.conditional_batch_norm(first, m, t, axis=1).y),
        (
            nl.adaptive_instance_norm(x, style_mean=m, style_std=t),
            nl.adaptive_instance_norm(first, style_mean=m, style_std=t, axis=1),
        ),
    ]:
        np.testing.assert_allclose(jnp.moveaxis(turned, 1, -1), last, atol=1e-6)


def test_a_style_image_gives_its_statistics_to_the_content():
    x, style = draw(2, 6, 6, 3), draw(2, 40, 5, 3, seed=1) * 3 + 2
    y = np.float64(jax.jit(nl.adaptive_instance_norm)(x, style))
    np.testing.assert_allclose(y.mean((1, 2)), np.float64(style).mean((1, 2)), atol=1e-5)
    np.testing.assert_allclose(y.std((1, 2)), np.float64(style).std((1, 2)), rtol=1e-4)
    flat = jnp.ones_like(style)
    grads = jax.jit(jax.grad(lambda x, s: (nl.adaptive_instance_norm(x, s) ** 2).sum(), (0, 1)))(x, flat)
    assert all(np.isfinite(np.asarray(g)).all() for g in grads)


def test_per_frame_statistics_do_not_see_other_frames():
    x = draw(2, 4, 3, 3, 6)
    run = jax.jit(functools.partial(nl.st_group_norm, num_groups=2, mode="per_frame"))
    np.testing.assert_allclose(run(x)[:, :2], run(x.at[:, 2:].multiply(100.0))[:, :2], atol=1e-6)
    by_frame = nl.group_norm(x.reshape(8, 3, 3, 6), num_groups=2).reshape(x.shape)
    np.testing.assert_allclose(run(x), by_frame, atol=1e-6)
    joint = nl.st_group_norm(x, num_groups=2)
    np.testing.assert_allclose(joint, nl.group_norm(x, num_groups=2), atol=1e-6)
    turned = nl.st_group_norm(jnp.moveaxis(x, 1, 3), num_groups=2, mode="per_frame", time_axis=3)
    np.testing.assert_allclose(jnp.moveaxis(turned, 3, 1), run(x), atol=1e-6)


X = jnp.ones((4, 5, 6))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: nl.ada_layer_norm(X, jnp.ones((4, 30))), r"`mod_scale` must have shape \(4, 6\), .* or x's"),
    (lambda: nl.ada_layer_norm(X, None, jnp.ones((1, 1, 6))), "`mod_shift` must have shape"),
    (lambda: nl.ada_layer_norm(X, jnp.ones(6)), "`mod_scale` must have shape"),
    (lambda: nl.ada_layer_norm(X, scale=jnp.ones(5)), r"`scale` must have shape \(6,\)"),
    (lambda: nl.ada_layer_norm(X, eps=-1.0), "`eps` must be >= 0"),
    (lambda: nl.ada_layer_norm_zero(X, jnp.ones((4, 12))), "`modulation` must have 3 H entries"),
    (lambda: nl.modulate(X, jnp.ones((5, 6))), "`scale` must have shape"),
    (lambda: nl.gate_residual(X, X[:, :1], jnp.ones((4, 6))), r"`branch` must have the shape of `x`"),
    (lambda: nl.gate_residual(X, X, jnp.ones((4, 7))), "`gate` must have shape"),
    (lambda: nl.conditional_batch_norm(X, jnp.ones((3, 6))), r"`scale` must have shape \(4, 6\) \(samples, channels\)"),
    (lambda: nl.conditional_batch_norm(X, jnp.ones((9, 6)), labels=jnp.zeros(3, int)), "`labels` must have shape"),
    (lambda: nl.conditional_batch_norm(X, axis=0), "`axis` must not be 0"),
    (lambda: nl.conditional_batch_norm(X[:1, :1]), "one value per set of statistics"),
    (lambda: nl.modulated_group_norm(X, jnp.ones((4, 5)), num_groups=2), "`mod_scale` must have shape"),
    (lambda: nl.modulated_group_norm(X, num_groups=4), "`num_groups` must divide the 6 channels"),
    (lambda: nl.adaptive_instance_norm(X), "give either `style`, or both"),
    (lambda: nl.adaptive_instance_norm(X, X, style_mean=jnp.ones((4, 6))), "give either `style`, or both"),
    (lambda: nl.adaptive_instance_norm(X, X[:3]), "`style` must have x's rank, samples and channels"),
    (lambda: nl.adaptive_instance_norm(X, style_mean=jnp.ones(6), style_std=jnp.ones(6)), "`style_mean` must have"),
    (lambda: nl.st_group_norm(X[None], num_groups=2, mode="frames"), "`mode` must be one of joint, per_frame"),
    (lambda: nl.st_group_norm(X[None], num_groups=2, time_axis=0), "`time_axis` 0 is the axis of the samples"),
])  # fmt: skip
def test_wrong_values_are_refused(call, message):  # CASES: D19, D22
    with pytest.raises(ValueError, match=message):
        call()


def test_labels_that_are_no_integers_are_refused():
    with pytest.raises(TypeError, match="`labels` must be integers; got float32"):
        nl.conditional_batch_norm(X, jnp.ones((3, 6)), labels=jnp.zeros(4))
