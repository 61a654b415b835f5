"""What the engine keeps, moves and promises beyond values: residuals, passes, backends, batch invariance, inference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl
from normlib import passes
from tests import reference
from tests.matrix import BY_NAME, inputs

pytestmark = pytest.mark.fast


def residual_bytes(call, x):
    """Bytes that the backward keeps beside the parameters, as a multiple of x's."""
    _, vjp = jax.vjp(call, x)
    return sum(t.nbytes for t in jax.tree.leaves(vjp) if hasattr(t, "nbytes")) / x.nbytes


@pytest.mark.parametrize("rule", ["reverse", "both"])
@pytest.mark.parametrize(("name", "shape"), [
    ("batch_norm", (16, 8, 64)), ("layer_norm", (64, 512)), ("rms_norm", (64, 512)), ("group_norm", (4, 64, 64)),
    ("instance_norm", (4, 256, 64)),
])  # fmt: skip
def test_the_backward_keeps_x_and_statistics_only(name, shape, rule):
    op = BY_NAME[name].at(shape)
    x = inputs(op, jnp.bfloat16).x
    assert residual_bytes(functools.partial(op.call, rule=rule), x) <= 1.15
    assert residual_bytes(functools.partial(op.call, rule="autodiff"), x) >= 2


@pytest.mark.parametrize("name", ["batch_norm", "layer_norm", "rms_norm", "group_norm", "instance_norm"])
def test_a_norm_and_its_backward_need_no_large_temporaries(name):
    shape = {"layer_norm": (512, 1024), "rms_norm": (512, 1024)}.get(name, (16, 512, 64))
    op = BY_NAME[name].at(shape)
    given = inputs(op, jnp.bfloat16)
    step = jax.jit(lambda x, s, b, dy: jax.vjp(op.call, x, s, b)[1](dy))
    used = step.lower(given.x, given.scale, given.bias, given.dy).compile().memory_analysis().temp_size_in_bytes
    assert used <= 0.05 * given.x.nbytes


@pytest.mark.parametrize(("name", "size"), [
    ("layer_norm", 5), ("layer_norm", 1000), ("rms_norm", 64),
    *(pytest.param(name, size, marks=pytest.mark.nightly) for name, size in (
        ("layer_norm", 64), ("layer_norm", 100), ("rms_norm", 5), ("rms_norm", 100), ("rms_norm", 1000)
    )),
])  # fmt: skip
def test_batch_invariant_rows_do_not_change_by_a_bit(name, size):  # CASES: D26
    op = BY_NAME[name].at((257, size))
    given = inputs(op)
    run = jax.jit(functools.partial(op.call, batch_invariant=True))
    whole = np.asarray(run(given.x, given.scale, given.bias))
    for rows in (1, 3, 8, 100, 256):
        np.testing.assert_array_equal(run(given.x[:rows], given.scale, given.bias), whole[:rows])
    ref = op.reference(given.x, given.scale, given.bias)
    reference.assert_rounded(whole, ref.y, ref.y_size)
    dx = jax.jit(jax.grad(lambda x: (op.call(x, given.scale, batch_invariant=True) * given.dy).sum()))(given.x)
    want = op.reference(given.x, given.scale, None, given.dy)
    reference.assert_rounded(dx, want.dx, want.dx_size, what="dx")


def test_inference_is_the_affine_map_of_the_stored_statistics():  # CASES: B18
    op = BY_NAME["batch_norm_first"]
    given = inputs(op)
    rng = np.random.default_rng(0)
    mean, var = rng.normal(size=7).astype(np.float32), rng.uniform(0.1, 2, 7).astype(np.float32)

    def infer(x, mean, var, scale, bias):
        return nl.batch_norm_inference(x, mean, var, scale, bias, axis=1)

    args = given.x, mean, var, given.scale, given.bias
    y, vjp = jax.vjp(jax.jit(infer), *args)
    dx, dmean, dvar, dscale, dbias = vjp(given.dy)
    x, dy, m, v, s, b = (np.asarray(t, np.float64) for t in (given.x, given.dy, mean, var, given.scale, given.bias))
    col = lambda t: t.reshape(1, 7, 1, 1)  # noqa: E731
    r = 1 / np.sqrt(v + 1e-5)
    np.testing.assert_allclose(y, (x - col(m)) * col(r * s) + col(b), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, dy * col(s * r), rtol=1e-5, atol=1e-6)
    total = lambda t: t.sum((0, 2, 3))  # noqa: E731
    np.testing.assert_allclose(dmean, -total(dy) * s * r, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dvar, -0.5 * total(dy * (x - col(m))) * s * r**3, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dscale, total(dy * (x - col(m))) * r, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dbias, total(dy), rtol=1e-4, atol=1e-5)
    second = jax.grad(lambda s: jax.grad(lambda x: (infer(x, mean, var, s, given.bias) ** 2).sum())(given.x).sum())
    assert np.isfinite(jax.jit(second)(given.scale)).all()


def test_inference_keeps_16_bit_types_and_rounds_once():
    op = BY_NAME["batch_norm"]
    given = inputs(op, jnp.bfloat16)
    y = nl.batch_norm_inference(given.x, jnp.zeros(7), jnp.ones(7), given.scale, given.bias)
    want = np.float64(given.x) * np.float64(given.scale) / np.sqrt(1 + 1e-5) + np.float64(given.bias)
    assert y.dtype == jnp.bfloat16
    reference.assert_rounded(y, want, np.maximum(abs(want), abs(np.float64(given.bias))), most=0.51, all_=0.51)


def test_statistics_and_apply_are_steps_of_their_own():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 5)), jnp.float32)
    m = nl.Moments.of(x, 0)
    low, mean = m.low[None], m.mean[None]
    y = nl.affine(x, mean, m.rstd(1e-5)[None], low=low)
    np.testing.assert_allclose(y, nl.batch_norm(x).y, rtol=1e-6, atol=1e-6)


def test_moments_come_with_row_norms_on_request():
    x = np.random.default_rng(0).normal(size=(3, 4, 50)).astype(np.float32)
    out = nl.layer_norm(x, return_moments=True)
    np.testing.assert_allclose(out.moments.mean, x.mean(-1), atol=1e-6)
    np.testing.assert_allclose(out.moments.rstd(1e-5), 1 / np.sqrt(x.var(-1) + 1e-5), rtol=1e-5)
    np.testing.assert_allclose(nl.rms_norm(x, return_moments=True).moments.var, (x**2).mean(-1), rtol=1e-5)


def test_gemma_scale_is_formed_in_float32_before_one_rounding():  # CASES: D1, D3
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.bfloat16)
    w = jnp.full(64, 15.8125, jnp.bfloat16)
    y = nl.rms_norm(x, w, scale_offset=1.0)
    ref = reference.norm(x, np.asarray(w, np.float64), None, axes=(1,), eps=1e-6, centered=False, offset=1.0)
    reference.assert_rounded(y, ref.y, ref.y_size, most=0.55, all_=0.6)
    cubes = jax.grad(lambda x, w: (nl.rms_norm(x, w, scale_offset=1.0) ** 3).sum(), (0, 1))
    dx, dw = jax.jit(cubes)(x, jnp.zeros(64))
    assert np.asarray(dx, np.float64).any() and np.isfinite(dw).all()


def test_group_norm_of_one_group_is_layer_norm_over_all_but_the_rows():  # CASES: J57
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 8)), jnp.float32)
    np.testing.assert_allclose(nl.group_norm(x, num_groups=1), nl.layer_norm(x, axis=(1, 2)), atol=2e-6)
    np.testing.assert_allclose(nl.group_norm(x, num_groups=8), nl.instance_norm(x), atol=2e-6)
    last = nl.layer_norm(x)
    assert abs(np.asarray(nl.group_norm(x, num_groups=1) - last)).max() > 1e-2


def test_a_positive_axis_is_the_negative_one():  # CASES: J60, D7
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 4, 8)), jnp.float32)
    for norm in (lambda **k: nl.batch_norm(x, **k).y, lambda **k: nl.layer_norm(x, **k)):
        np.testing.assert_array_equal(norm(axis=3), norm(axis=-1))
    strided = jnp.array(np.asarray(x)[..., ::2])
    np.testing.assert_allclose(nl.layer_norm(x[..., ::2]), nl.layer_norm(strided), atol=1e-7)
    first = nl.group_norm(jnp.moveaxis(x, -1, 1), num_groups=2, axis=1)
    np.testing.assert_allclose(nl.group_norm(x, num_groups=2), jnp.moveaxis(first, 1, -1), atol=1e-6)


def test_masks_of_lower_rank_stand_for_rows():  # CASES: J22, J26
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 3)) + 5, jnp.float32)
    rows = np.random.default_rng(1).random((4, 6)) < 0.6
    y = nl.batch_norm(x, where=rows).y
    np.testing.assert_allclose(np.asarray(y)[rows].mean(0), 0, atol=1e-6)
    only = nl.batch_norm(x, where=rows[:, :1]).y
    np.testing.assert_allclose(np.asarray(only)[rows[:, 0]].mean((0, 1)), 0, atol=1e-6)
    image = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 6)), jnp.float32)
    part = np.random.default_rng(1).random((2, 4, 4, 1)) < 0.7
    y = np.asarray(nl.group_norm(image, num_groups=3, where=part)).reshape(2, 16, 3, 2)
    np.testing.assert_allclose([y[n][part[n].ravel()].mean((0, 2)) for n in range(2)], 0, atol=1e-6)


def test_unmeasured_entries_are_mapped_and_have_the_affine_gradient():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    where = np.arange(8)[:, None] < 5
    scale = jnp.array([1.0, 2.0, 3.0])
    y, vjp = jax.vjp(jax.jit(lambda x: nl.batch_norm(x, scale, where=where).y), x)
    (dx,) = vjp(np.float32(np.arange(8)[:, None] == 7) * np.ones((1, 3), np.float32))
    wide = np.float64(x)
    mean, rstd = wide[:5].mean(0), 1 / np.sqrt(wide[:5].var(0) + 1e-5)
    np.testing.assert_allclose(y[7], (wide[7] - mean) * rstd * scale, rtol=1e-5)
    np.testing.assert_allclose(dx[7], scale * rstd, rtol=1e-5)
    np.testing.assert_array_equal(dx[5:7], 0)
    assert np.asarray(dx[:5]).any()


def test_a_backend_is_chosen_by_argument_or_context_and_recompiles(monkeypatch):
    calls = []

    class Spy:
        moments, sums, grad_sums, grad_apply = (
            staticmethod(getattr(passes.xla, n)) for n in ("moments", "sums", "grad_sums", "grad_apply")
        )

        @staticmethod
        def apply(*args, **kwargs):
            calls.append("apply")
            return passes.xla.apply(*args, **kwargs)

    monkeypatch.setitem(passes.BACKENDS, "spy", Spy)
    norm = jax.jit(lambda x: nl.layer_norm(x))
    norm(jnp.ones((2, 3)))
    assert not calls
    with nl.use_backend("spy"):
        norm(jnp.ones((2, 3)))
    assert calls == ["apply"]
    nl.layer_norm(jnp.ones((2, 3)), backend="spy")
    assert calls == ["apply"] * 2
    with pytest.raises(ValueError, match="`backend` must be one of"), nl.use_backend("abacus"):
        pass


def test_recommended_epsilons_are_only_for_who_asks():
    assert [nl.recommended_eps(d) for d in (jnp.float32, jnp.float16, jnp.int8)] == [1e-5, 1e-4, 1e-2]
    assert nl.recommended_eps(jnp.float16, mixed_precision=True) == 1e-3


def test_nan_and_inf_stay_in_their_own_row_and_channel():
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    x[1, 2], x[3, 4] = np.nan, np.inf
    rows, channels = np.isfinite(nl.layer_norm(x)).all(1), np.isfinite(nl.batch_norm(x).y).all(0)
    assert rows.tolist() == [True, False, True, False]
    assert channels.tolist() == [True, True, False, True, False, True]


@pytest.mark.parametrize("rule", ["reverse", "both"])
@pytest.mark.parametrize("name", ["batch_norm", "layer_norm", "rms_norm"])
def test_y_can_be_left_unrounded_for_an_epilogue(name, rule):
    op = BY_NAME[name]
    given = inputs(op, jnp.bfloat16)
    raised = [p.reshape(op.kept_shape) for p in (given.scale, given.bias)]
    options = {"centered": op.options.get("centered", True), "eps": op.options["eps"], "rule": rule}

    def norm(x):
        return nl.normalize(x, *raised, axes=op.reduce, out_dtype=jnp.float32, **options).y

    y, vjp = jax.vjp(jax.jit(norm), given.x)
    dy = given.dy.astype(jnp.float32) * 1.001
    (dx,) = vjp(dy)
    ref = op.reference(given.x, given.scale, given.bias, dy)
    assert y.dtype == jnp.float32 and dx.dtype == jnp.bfloat16
    reference.assert_rounded(y, ref.y, ref.y_size)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")


@pytest.mark.parametrize("norm", [nl.layer_norm, nl.rms_norm])
def test_an_epsilon_of_zero_gives_nan_for_equal_entries_alone(norm):
    x = jnp.array([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 6.0]])
    y = np.asarray(norm(x, eps=0.0))
    row = np.float64(x[1]) - (3.0 if norm is nl.layer_norm else 0.0)
    assert np.isnan(y[0]).all()
    np.testing.assert_allclose(y[1], row / np.sqrt((row**2).mean()), rtol=3e-7)
