"""Dynamic norms and norms of weights, split rows, p-RMSNorm, and quantised outputs of the composite norms."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec as P

import normlib as nl
from normlib import linen, nnx
from tests import reference
from tests.distributed import mesh

pytestmark = pytest.mark.family


def draw(*shape, dtype=jnp.float32, mean=0.0, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape) + mean, jnp.float32).astype(dtype)


ONE_HOT = {"instance": 0, "layer": 1, "batch": 2}


@pytest.mark.parametrize("which", ONE_HOT)
def test_switchable_norm_with_one_weight_is_that_norm(which):
    x = draw(4, 6, 5, mean=100.0)
    logits = jnp.where(jnp.arange(3) == ONE_HOT[which], 0.0, -jnp.inf)
    y = np.float64(jax.jit(nl.switchable_norm)(x, logits, logits).y)
    axes = {"instance": (1,), "layer": (1, 2), "batch": (0, 1)}[which]
    np.testing.assert_allclose(y, reference.norm(x, axes=axes, eps=1e-5).y, atol=2e-5)


def test_equal_statistics_mix_to_themselves_at_large_means():
    row = np.random.default_rng(0).normal(size=(1, 64, 1)) + 1e4
    x = jnp.asarray(np.tile(row, (3, 1, 4)), jnp.float32)
    y = jax.jit(nl.switchable_norm)(x, jnp.array([0.3, -1.0, 0.7]), draw(3)).y
    ref = reference.norm(x, axes=(1,), eps=1e-5)
    reference.assert_rounded(y, ref.y, ref.y_size)


def test_switchable_norm_evaluates_with_running_statistics_and_across_devices():
    x, logits = draw(8, 6, 5), draw(3)
    train = jax.jit(nl.switchable_norm)(x, logits, logits)
    stored = {"running_mean": train.moments.mean, "running_var": train.moments.var}
    same = nl.switchable_norm(x, logits, logits, **stored)
    np.testing.assert_allclose(same.y, train.y, atol=1e-5)
    alone = nl.switchable_norm(x[:1], logits, logits, **stored)
    np.testing.assert_allclose(alone.y, same.y[:1], atol=1e-6)
    run = lambda x: nl.switchable_norm(x, logits, logits, axis_name="d")  # noqa: E731
    spec = nl.SwitchableNormOutput(P("d"), P())
    split = jax.jit(jax.shard_map(run, mesh=mesh(4), in_specs=P("d"), out_specs=spec))(x)
    np.testing.assert_allclose(split.y, train.y, atol=1e-5)


def switched(a, x, where, logits, scale, bias, eps=1e-5):
    """Switchable norm of the measured entries, in the float64 of `a` (numpy or jax.numpy); x is 0 behind the mask."""
    weights = [a.exp(t) / a.exp(t).sum() for t in logits]
    mean = var = 0.0
    for k, axes in enumerate([(1,), (1, 2), (0, 1)]):
        n = a.maximum(where.sum(axes, keepdims=True), 1)
        own = (x * where).sum(axes, keepdims=True) / n
        mean = mean + weights[0][k] * own
        var = var + weights[1][k] * (((x - own) ** 2) * where).sum(axes, keepdims=True) / n
    return (x - mean) / a.sqrt(var + eps) * scale + bias


@pytest.mark.parametrize("rule", ["reverse", "both", "autodiff"])
def test_switchable_norm_measures_where_the_mask_holds(rule):  # CASES: B16, J24
    x, scale, bias, dy = draw(4, 6, 5, mean=2.0), draw(5), draw(5, seed=1), draw(4, 6, 5, seed=2)
    logits = draw(3), draw(3, seed=3)
    where = np.random.default_rng(4).random((4, 6, 5)) < 0.7
    where[:, :2], where[1, :, 2] = True, False  # an instance of which nothing is measured
    empty = np.zeros_like(where)
    empty[1, :, 2] = True

    @jax.jit
    def run(x, scale, bias, *logits):
        call = lambda *a: nl.switchable_norm(a[0], *a[3:], a[1], a[2], where=where, rule=rule).y  # noqa: E731
        y, vjp = jax.vjp(call, x, scale, bias, *logits)
        return y, vjp(jnp.where(where, dy, 0))

    y, grads = run(jnp.where(where, x, jnp.nan), scale, bias, *logits)
    wide = [np.float64(t) for t in (jnp.where(where, x, 0), scale, bias, *logits)]
    ref = switched(np, wide[0], where, wide[3:], *wide[1:3])
    np.testing.assert_allclose(np.where(where, y, 0), np.where(where, ref, 0), atol=2e-6)
    np.testing.assert_array_equal(np.asarray(y)[empty], np.broadcast_to(bias, y.shape)[empty])
    with jax.enable_x64(True):
        sent = jnp.where(where, np.float64(dy), 0)
        total = lambda x, s, b, *logits: (switched(jnp, x, jnp.asarray(where), logits, s, b) * sent).sum()  # noqa: E731
        want = jax.jit(jax.grad(total, (0, 1, 2, 3, 4)))(*map(jnp.asarray, wide))
    for got, ref in zip(grads, want):
        np.testing.assert_allclose(got, ref, atol=3e-6 * max(1, float(abs(ref).max())))


def test_switchable_norm_across_devices_and_in_layers_takes_a_mask():
    x, logits = draw(8, 6, 5), jnp.zeros(3)
    where = np.random.default_rng(4).random((8, 6, 1)) < 0.7
    where[:, :2] = True
    want = switched(np, np.float64(x), np.broadcast_to(where, x.shape), (np.zeros(3),) * 2, 1.0, 0.0)
    run = lambda x, w: nl.switchable_norm(x, logits, logits, where=w, axis_name="d").y  # noqa: E731
    split = jax.jit(jax.shard_map(run, mesh=mesh(4), in_specs=(P("d"), P("d")), out_specs=P("d")))(x, where)
    np.testing.assert_allclose(split, want, atol=5e-6)
    layer = linen.SwitchableNorm(use_running_average=False)
    (y, _) = jax.jit(lambda x, w: layer.init_with_output(jax.random.key(0), x, mask=w))(x, where)
    np.testing.assert_allclose(y, want, atol=5e-6)
    model = nnx.SwitchableNorm(5, rngs=flax_nnx.Rngs(0))
    np.testing.assert_allclose(flax_nnx.jit(lambda m, x, w: m(x, mask=w))(model, x, where), want, atol=5e-6)
    mean = np.float64(x)[np.broadcast_to(where, x.shape)].reshape(-1, 5).mean(0)
    np.testing.assert_allclose(model.mean[...], 0.01 * mean, atol=1e-6)


def test_batch_renorm_agrees_with_inference_inside_its_bounds_and_with_batch_norm_at_none():
    x, scale, bias = draw(16, 5, mean=0.3), draw(5), draw(5, seed=1)
    mean, var = jnp.full(5, 0.2), jnp.full(5, 1.3)
    free = jax.jit(functools.partial(nl.batch_renorm, r_max=100.0, d_max=100.0))(x, mean, var, scale, bias)
    np.testing.assert_allclose(free.y, nl.batch_norm_inference(x, mean, var, scale, bias), atol=1e-5)
    tied = jax.jit(functools.partial(nl.batch_renorm, r_max=1.0, d_max=0.0))(x, mean, var, scale, bias)
    plain = nl.batch_norm(x, scale, bias)
    np.testing.assert_allclose(tied.y, plain.y, atol=1e-5)
    np.testing.assert_allclose(tied.moments.var, plain.moments.var, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_batch_renorm_is_not_poisoned_by_bad_running_means(bad):  # CASES: J27
    x = draw(16, 3)
    out = jax.jit(nl.batch_renorm)(x, jnp.array([0.0, bad, 0.0]), jnp.ones(3))
    assert np.isfinite(out.y).all() and np.isfinite(out.moments.var).all()


def test_batch_renorm_takes_traced_bounds_and_devices():
    x = draw(16, 3)
    run = lambda x, r, d: nl.batch_renorm(x, jnp.zeros(3), jnp.ones(3), r_max=r, d_max=d, axis_name="d")  # noqa: E731
    spec = nl.BatchRenormOutput(P("d"), P())
    split = jax.shard_map(run, mesh=mesh(4), in_specs=(P("d"), P(), P()), out_specs=spec)
    whole = nl.batch_renorm(x, jnp.zeros(3), jnp.ones(3), r_max=1.1, d_max=0.1)
    loss = lambda f: jax.jit(jax.grad(lambda x: (f(x) ** 3).sum()))(x)  # noqa: E731
    np.testing.assert_allclose(jax.jit(split)(x, 1.1, 0.1).y, whole.y, atol=1e-5)
    one = loss(lambda x: nl.batch_renorm(x, jnp.zeros(3), jnp.ones(3), r_max=1.1, d_max=0.1).y)
    np.testing.assert_allclose(loss(lambda x: split(x, 1.1, 0.1).y), one, atol=1e-4)


def test_dynamic_tanh_is_bounded_and_keeps_x_only():
    x = draw(64, 256, dtype=jnp.bfloat16)
    alpha, scale = jnp.array([0.5]), jnp.ones(256)
    y, vjp = jax.vjp(jax.jit(nl.dynamic_tanh), x * 1e4, alpha, scale)
    assert abs(np.float32(y)).max() <= 1 and vjp(y)[1].shape == (1,)
    kept = sum(t.nbytes for t in jax.tree.leaves(vjp) if hasattr(t, "nbytes"))
    assert kept <= 1.1 * x.nbytes


def test_weight_norm_is_flax_own():
    layer, x = nn.WeightNorm(nn.Dense(5)), draw(2, 7)
    variables = layer.init(jax.random.key(0), x)
    kernel = variables["params"]["layer_instance"]["kernel"]
    scale = draw(5)
    (name,) = (n for n in variables["params"] if n != "layer_instance")
    variables["params"][name] = jax.tree.map(lambda t: scale, variables["params"][name])
    np.testing.assert_allclose(layer.apply(variables, x), x @ nl.weight_norm(kernel, scale), rtol=1e-5, atol=1e-6)


def test_weight_norm_of_one_length_for_all():
    kernel = draw(3, 4, 5)
    y = nl.weight_norm(kernel, jnp.float32(2.0), feature_axes=None)
    np.testing.assert_allclose(np.linalg.norm(y), 2.0, rtol=1e-6)
    two = nl.weight_norm(kernel, feature_axes=(0, -1))
    np.testing.assert_allclose(np.linalg.norm(two, axis=1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("n_steps", [1, 4])
def test_spectral_norm_is_flax_own(n_steps):
    layer, x = nn.SpectralNorm(nn.Conv(5, (3, 3)), n_steps=n_steps), draw(2, 6, 6, 4)
    variables = layer.init(jax.random.key(0), x, update_stats=False)
    kernel = jax.tree.leaves(variables["params"])[-1]
    y, state = layer.apply(variables, x, update_stats=True, mutable=["batch_stats"])
    u = next(t for t in jax.tree.leaves(variables["batch_stats"]) if t.shape == (1, 5))
    out = jax.jit(functools.partial(nl.spectral_norm, n_steps=n_steps))(kernel, u)
    new = {t.shape: t for t in jax.tree.leaves(state["batch_stats"])}
    np.testing.assert_allclose(out.u, new[1, 5], rtol=1e-5)
    np.testing.assert_allclose(out.sigma, new[()], rtol=1e-5)
    want = jax.lax.conv_general_dilated(x, out.kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    np.testing.assert_allclose(y, want, atol=1e-5)


def test_spectral_norm_converges_and_leaves_vectors_alone():
    kernel, u = draw(6, 4, dtype=jnp.bfloat16), draw(1, 4)
    out = jax.jit(functools.partial(nl.spectral_norm, n_steps=60))(kernel, u)
    np.testing.assert_allclose(out.sigma, np.linalg.norm(np.float64(kernel), 2), rtol=1e-4)
    assert out.kernel.dtype == jnp.bfloat16
    assert (
        nl.spectral_norm(kernel[0], u).kernel is kernel[0] or (nl.spectral_norm(kernel[0], u).kernel == kernel[0]).all()
    )
    assert not np.asarray(nl.spectral_norm(jnp.zeros((3, 4)), u).kernel).any()


@pytest.mark.parametrize(("partial", "kept"), [(0.25, 16), (0.3, 20), (1.0, 64), (0.001, 1)])
def test_partial_rms_norm_measures_the_first_features(partial, kept):
    x, scale, dy = draw(5, 64), draw(64), draw(5, 64, seed=1)
    y, vjp = jax.vjp(jax.jit(lambda x, s: nl.rms_norm(x, s, partial=partial)), x, scale)
    dx, dscale = vjp(dy)
    where = np.broadcast_to(np.arange(64) < kept, (5, 64))
    ref = reference.norm(x, scale[None], None, dy, axes=(1,), eps=1e-6, centered=False, where=where)
    reference.assert_rounded(y, ref.y, ref.y_size)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")
    np.testing.assert_allclose(dscale, ref.dscale.sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_norms_of_split_rows_equal_those_of_whole_rows(name):
    whole, split = {"layer": (nl.layer_norm, nl.sharded_layer_norm), "rms": (nl.rms_norm, nl.sharded_rms_norm)}[name]
    x, scale = draw(3, 32, mean=50.0), draw(32)
    columns = P(None, "d")
    run = jax.shard_map(
        functools.partial(split, axis_name="d"), mesh=mesh(4), in_specs=(columns, P("d")), out_specs=columns
    )
    np.testing.assert_allclose(jax.jit(run)(x, scale), whole(x, scale), atol=1e-5)
    with pytest.raises(ValueError, match="`axis_name` must name the mesh axis"):
        split(x, scale, axis_name=None)


QUANTISED = {
    "add_layer": lambda x, q: nl.add_layer_norm(x, x * 0.5, quant=q).y,
    "add_rms": lambda x, q: nl.add_rms_norm(x, x * 0.5, quant=q).y,
    "multi": lambda x, q: nl.multi_add_rms_norm([x, x], x, quant=q).y,
    "ada": lambda x, q: nl.ada_layer_norm(x[:, None], jnp.ones((4, 64)), quant=q),
    "silu": lambda x, q: nl.group_norm_silu(x, num_groups=4, quant=q),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_outputs_are_codes_of_the_unrounded_value(name):
    x = draw(4, 64, dtype=jnp.bfloat16)
    call = QUANTISED[name]
    codes = jax.jit(lambda x: call(x, nl.Dynamic()))(x)
    assert isinstance(codes, nl.Quantized) and codes.y.dtype == jnp.int8
    n = np.float64(jax.jit(lambda x: call(x, None))(x.astype(jnp.float32)))
    error = abs(np.float64(nl.dequantize(codes)) - n)
    step = np.float64(codes.scale)
    assert (error <= 0.502 * np.broadcast_to(step.reshape(*step.shape, *(1,) * (n.ndim - step.ndim)), n.shape)).all()
    assert abs(np.int32(codes.y)).max() == 127


def test_a_quantised_sum_keeps_its_residual_and_two_codes():
    x = draw(4, 64, dtype=jnp.bfloat16)
    out = jax.jit(lambda x: nl.add_layer_norm(x, x, quant=nl.Dual(nl.Static(0.05), nl.Static(0.1))))(x)
    np.testing.assert_array_equal(out.residual, x + x)
    n = np.float64(nl.add_layer_norm(x, x).y)
    for codes, step in ((out.y.y, 0.05), (out.y.y2, 0.1)):
        assert (abs(np.float64(codes) * step - np.clip(n, -128 * step, 127 * step)) <= step).all()
    with pytest.raises(ValueError, match="`quant` has no widened copy"):
        nl.add_rms_norm_cast(x, x, quant=nl.Dynamic())


X = jnp.ones((4, 5, 6))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: nl.dynamic_tanh(X, jnp.ones(2)), r"`alpha` must be a scalar; got shape \(2,\)"),
    (lambda: nl.dynamic_tanh(X, 0.5, jnp.ones(5)), "`scale` must have shape"),
    (lambda: nl.switchable_norm(X, jnp.ones(2), jnp.ones(3)), r"`mean_logits` must have shape \(3,\)"),
    (lambda: nl.switchable_norm(X, jnp.ones(3), jnp.ones(3), running_mean=jnp.ones(6)), "must be given together"),
    (lambda: nl.switchable_norm(X, jnp.ones(3), jnp.ones(3), axis=0), "`axis` must not be 0"),
    (lambda: nl.switchable_norm(X[:, :1], jnp.ones(3), jnp.ones(3)), "one value per set of statistics"),
    (lambda: nl.batch_renorm(X, jnp.ones(5), jnp.ones(6)), "`running_mean` must have shape"),
    (lambda: nl.batch_renorm(X, jnp.ones(6), jnp.ones(6), r_max=0.5), "`r_max` must be a number >= 1"),
    (lambda: nl.batch_renorm(X, jnp.ones(6), jnp.ones(6), d_max=-1.0), "`d_max` must be a number >= 0"),
    (lambda: nl.batch_renorm(X[:1, :1], jnp.ones(6), jnp.ones(6)), "one value per set of statistics"),
    (lambda: nl.weight_norm(X, jnp.ones(5)), "`scale` must have shape"),
    (lambda: nl.weight_norm(X, feature_axes=3), "`feature_axes` 3 is out of range"),
    (lambda: nl.spectral_norm(X, jnp.ones((1, 5))), r"`u` must have shape \(1, 6\)"),
    (lambda: nl.spectral_norm(X, jnp.ones((1, 6)), error_on_non_matrix=True), "is no matrix"),
    (lambda: nl.spectral_norm(X, jnp.ones((1, 6)), n_steps=-1), "`n_steps` must be a number of iterations"),
    (lambda: nl.rms_norm(X, partial=0.0), r"`partial` must lie in \(0, 1\]"),
    (lambda: nl.rms_norm(X, partial=0.5, axis=(1, 2)), "along one `axis`"),
])  # fmt: skip
def test_wrong_values_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
