"""Every operator against float64 NumPy: dtypes, layouts, odd sizes, masks, and JAX's transformations."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.matrix import BY_NAME, OPERATORS, inputs

pytestmark = pytest.mark.fast

NAMES = [op.name for op in OPERATORS]
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
RULES = ["reverse", "both", "autodiff"]


def daily(names, others, chosen):
    """Every (name, other); those for which chosen(index of the name, other) is false are nightly."""
    return [
        pytest.param(name, other, marks=() if chosen(i, other) else pytest.mark.nightly)
        for i, name in enumerate(names) for other in others
    ]  # fmt: skip


@functools.cache
def compiled(call, **options):
    """The one compiled function of an operator and its options: tests of the same shapes share its programs."""

    @jax.jit
    def run(x, scale, bias, dy, where):
        y, vjp = jax.vjp(lambda *args: call(*args, where=where, **options), x, scale, bias)
        return y, *vjp(dy)

    return run


def value_and_grads(op, given, rule="reverse", **options):
    """y and the cotangents of x, scale, bias for the cotangent dy; None for a parameter that is None."""
    return compiled(op.call, rule=rule, **options)(given.x, given.scale, given.bias, given.dy, given.where)


def check(op, given, results, measured=True):
    """Compare (y, dx, dscale, dbias) with the reference."""
    y, dx, dscale, dbias = results
    ref = op.reference(given.x, given.scale, given.bias, given.dy, given.where)
    seen = np.ones(op.shape, bool) if given.where is None else np.asarray(given.where)
    pick = lambda t: np.where(seen, reference.f64(t), 0)  # noqa: E731
    dtype = np.asarray(given.x).dtype
    assert y.dtype == dtype and dx.dtype == dtype
    assert dscale.dtype == given.scale.dtype and dbias.dtype == given.bias.dtype
    reference.assert_rounded(pick(y).astype(dtype), pick(ref.y), np.where(seen, ref.y_size, 1))
    # with 4 entries to a set the roundings of its two sums do not average out: 0.5 % of a float32 dx is beyond 3 ulp
    share = 1e-2 if ref.count.size and ref.count.max() < 8 else 1e-3
    reference.assert_rounded(
        pick(dx).astype(dtype), pick(ref.dx), np.where(seen, ref.dx_size, 1), what="dx", share=share
    )
    reference.assert_sum(dscale, ref.dscale, op.kept_shape, dtype=np.asarray(dscale).dtype, what="dscale")
    reference.assert_sum(dbias, ref.dbias, op.kept_shape, dtype=np.asarray(dbias).dtype, what="dbias")
    assert np.isfinite(reference.f64(dx)[seen]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_match_float64(name, dtype):
    op = BY_NAME[name]
    given = inputs(op, DTYPES[dtype])
    check(op, given, value_and_grads(op, given))


LARGE_SHAPES = {
    "batch_norm": (100, 20, 33), "layer_norm": (200, 301), "rms_norm": (200, 301), "group_norm": (50, 31, 36),
    "instance_norm_first": (40, 33, 5, 11),
}  # fmt: skip


@pytest.mark.parametrize("mean", [0.0, 10.0, 1e3])
@pytest.mark.parametrize("name", LARGE_SHAPES)
def test_999_of_1000_entries_are_within_3_ulp(name, mean):
    op = BY_NAME[name].at(LARGE_SHAPES[name])
    given = inputs(op, mean=mean)
    check(op, given, value_and_grads(op, given))


@pytest.mark.parametrize("mean", [100.0, 1e4])
@pytest.mark.parametrize("name", NAMES)
def test_large_means_cost_no_accuracy(name, mean):  # CASES: J6, J8, C1, C3
    op = BY_NAME[name]
    given = inputs(op, mean=mean)
    check(op, given, value_and_grads(op, given))


@pytest.mark.parametrize(("name", "rule", "dtype"), [
    (name, rule, dtype) for i, name in enumerate(NAMES)
    for rule, dtype in (("reverse", "f32"), [("both", "f32"), ("autodiff", "bf16"), ("reverse", "f16")][i % 3])
])  # fmt: skip
def test_masks_select_what_is_measured_with_nan_behind_them(name, rule, dtype):  # CASES: B16, J24
    op = BY_NAME[name]
    given = inputs(op, DTYPES[dtype], masked=True)
    y, dx, dscale, dbias = value_and_grads(op, given, rule)
    if rule != "reverse":
        dx = jnp.where(given.where, dx, 0)
    check(op, given, (y, dx, dscale, dbias))


@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("name", NAMES)
def test_the_other_rules_agree_with_float64(name, rule):
    op = BY_NAME[name]
    given = inputs(op)
    results = value_and_grads(op, given, rule)
    ref = op.reference(given.x, given.scale, given.bias, given.dy)
    reference.assert_rounded(results[0], ref.y, ref.y_size)
    reference.assert_rounded(results[1], ref.dx, ref.dx_size, most=8, all_=16, what="dx")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["batch_norm", "layer_norm", "rms_norm_gemma", "group_norm"])
def test_16_bit_parameters_get_gradients_in_their_own_dtype(name, dtype):  # CASES: J56, B19
    op = BY_NAME[name]
    given = inputs(op, DTYPES[dtype], parameter_dtype=DTYPES[dtype])
    check(op, given, value_and_grads(op, given))


@pytest.mark.parametrize(("name", "which"), daily(
    NAMES, ["scale", "bias", "none"], lambda i, which: which == "none" or which == ["scale", "bias"][i % 2]
))  # fmt: skip
def test_scale_and_bias_may_be_absent(name, which):  # CASES: B19
    op = BY_NAME[name]
    given = inputs(op)
    given.scale, given.bias = given.scale if which == "scale" else None, given.bias if which == "bias" else None
    y, dx, dscale, dbias = value_and_grads(op, given)
    assert (dscale is None, dbias is None) == (given.scale is None, given.bias is None)
    scale = np.zeros(op.parameter_shape) if given.scale is None and op.options.get("offset") else given.scale
    ref = op.reference(given.x, scale, given.bias, given.dy)
    reference.assert_rounded(y, ref.y, ref.y_size)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 111, 500, 769, 1023, 1025, 3584])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_row_norms_take_any_row_length(name, size):  # CASES: D9
    op = BY_NAME[name].at((5, size))
    given = inputs(op)
    check(op, given, value_and_grads(op, given))


@pytest.mark.parametrize(("name", "shape"), [
    ("batch_norm", (2, 1, 1)), ("batch_norm", (1025, 1, 3)), ("batch_norm", (7, 13, 129)),
    ("group_norm", (2, 1, 4 * 33)), ("group_norm", (1, 65, 4)), ("instance_norm", (1, 2, 1)),
    ("instance_norm", (2, 97, 31)),
    ("layer_norm", (65537, 4)), ("layer_norm", (1025, 8)),
])  # fmt: skip
def test_odd_sizes(name, shape):  # CASES: D12, D14, D16
    op = BY_NAME[name].at(shape)
    given = inputs(op)
    check(op, given, value_and_grads(op, given))


@pytest.mark.parametrize("name", NAMES)
def test_constant_input_gives_bias_with_finite_gradients(name):  # CASES: J1, J4, C14
    op = BY_NAME[name]
    given = inputs(op)
    if not op.options.get("centered", True):
        pytest.skip("RMS keeps the mean in: a constant row is not special")
    for value in (1e4 + 0.3, 1234.0, -3e5, 0.0):
        given.x = jnp.full(op.shape, value, jnp.float32)
        y, dx, _, _ = value_and_grads(op, given)
        bias = np.broadcast_to(np.asarray(given.bias).reshape(op.kept_shape), op.shape)
        bound = abs(np.asarray(given.scale).reshape(op.kept_shape)) * max(1e-9 * abs(value), 1e-6)
        assert (abs(np.asarray(y, np.float64) - bias) <= bound + abs(bias) * 2e-7).all()
        assert np.isfinite(np.asarray(dx)).all()


@pytest.mark.parametrize("name", NAMES)
def test_vmap_equals_a_loop(name):
    op = BY_NAME[name]
    many = [inputs(op, seed=i) for i in range(3)]
    xs, scales = jnp.stack([g.x for g in many]), jnp.stack([g.scale for g in many])
    bias, dy = many[0].bias, many[0].dy

    def grads(x, scale):
        y, vjp = jax.vjp(lambda x, s: op.call(x, s, bias), x, scale)
        return y, *vjp(dy)

    together = jax.jit(jax.vmap(grads))(xs, scales)
    for i in range(3):
        given = inputs(op, seed=i)
        ref = op.reference(given.x, given.scale, bias, dy)
        reference.assert_rounded(together[0][i], ref.y, ref.y_size)
        reference.assert_rounded(together[1][i], ref.dx, ref.dx_size, what="dx")
        reference.assert_sum(together[2][i], ref.dscale, op.kept_shape, what="dscale")


TWICE = ["batch_norm", "layer_norm", "rms_norm_gemma", "group_norm_first", "instance_norm"]
DAILY = {*((name, "reverse") for name in TWICE), ("batch_norm", "both"), ("group_norm_first", "both"),
         ("layer_norm", "autodiff")}  # fmt: skip


@pytest.mark.parametrize(("name", "rule"), [
    pytest.param(*case, marks=() if case in DAILY else pytest.mark.nightly) for case in itertools.product(TWICE, RULES)
])  # fmt: skip
def test_gradient_of_gradient_matches_float64(name, rule):
    op = BY_NAME[name]
    given = inputs(op)

    def penalty(call, x, scale, bias, dy):
        gx, gs = jax.grad(lambda x, s: (jnp.tanh(call(x, s, bias)) * dy).sum(), (0, 1))(x, scale)
        return (gx**2).sum() + (gs**3).sum()

    def plain(x, scale, bias):
        """The textbook formula, for JAX to differentiate in float64."""
        o = op.options
        axes = op.reduce + ((o["channel"],) if "groups" in o else ())
        kept = op.kept_shape
        shape = x.shape
        if "groups" in o:
            c = o["channel"]
            x = x.reshape(*shape[:c], o["groups"], -1, *shape[c + 1 :])
            axes = tuple(a + (a > c) for a in op.reduce) + (c + 1,)
        mean = x.mean(axes, keepdims=True) if o.get("centered", True) else 0.0
        y = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + o["eps"])
        return y.reshape(shape) * (scale.reshape(kept) + o.get("offset", 0.0)) + bias.reshape(kept)

    got = jax.jit(jax.grad(lambda *a: penalty(lambda *b: op.call(*b, rule=rule), *a), (0, 1)))(
        given.x, given.scale, given.bias, given.dy
    )
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(t), jnp.float64) for t in (given.x, given.scale, given.bias, given.dy)]
        want = jax.jit(jax.grad(lambda *a: penalty(plain, *a), (0, 1)))(*wide)
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, atol=3e-6 * float(abs(w).max()), rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_remat_scan_and_eval_shape(name):
    op = BY_NAME[name]
    given = inputs(op)

    def loss(x, scale):
        return (op.call(x, scale, given.bias) * given.dy).sum()

    dx, dscale = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1)))(given.x, given.scale)
    ref = op.reference(given.x, given.scale, given.bias, given.dy)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")
    reference.assert_sum(dscale, ref.dscale, op.kept_shape, what="dscale")

    def three(x, scale):
        return jax.lax.scan(lambda c, _: (op.call(c, scale, given.bias), None), x, None, length=3)[0].sum()

    assert np.isfinite(jax.jit(jax.grad(three, 1))(given.x, given.scale)).all()
    assert jax.eval_shape(lambda x: op.call(x), given.x).shape == op.shape


@pytest.mark.parametrize(
    ("name", "rule"), daily(NAMES, ["both", "autodiff"], lambda i, rule: rule == "both" or i % 3 == 0)
)
def test_forward_mode_with_the_rules_that_have_it(name, rule):
    op = BY_NAME[name]
    given = inputs(op)
    dx = given.dy
    _, y_dot = jax.jit(lambda x: jax.jvp(lambda x: op.call(x, given.scale, given.bias, rule=rule), (x,), (dx,)))(
        given.x
    )
    h = 1e-6
    ref = [op.reference(np.float64(given.x) + s * h * np.float64(dx), given.scale, given.bias).y for s in (1, -1)]
    np.testing.assert_allclose(y_dot, (ref[0] - ref[1]) / (2 * h), rtol=1e-3, atol=2e-5 * float(abs(y_dot).max()))


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_is_refused_by_the_reverse_rule(name):
    op = BY_NAME[name]
    given = inputs(op)
    with pytest.raises(TypeError, match="forward-mode|custom_vjp"):
        jax.jit(lambda x: jax.jvp(lambda x: op.call(x), (x,), (x,))).lower(given.x)


@pytest.mark.parametrize(
    ("name", "dtype"), daily(NAMES, DTYPES, lambda i, dtype: dtype == ["f32", "bf16", "f32", "f16"][i % 4])
)
def test_jit_and_eager_agree(name, dtype):  # CASES: J3, J64
    op = BY_NAME[name]
    given = inputs(op, DTYPES[dtype], mean=100.0)
    eager, whole = op.call(given.x, given.scale, given.bias), jax.jit(op.call)(given.x, given.scale, given.bias)
    ref = op.reference(given.x, given.scale, given.bias)
    apart = abs(reference.f64(eager) - reference.f64(whole)) / reference.ulp(ref.y_size, np.asarray(eager).dtype)
    assert apart.max() <= 4 if dtype == "f32" else (apart.max() <= 1 and (apart > 0).mean() <= 1e-2)


@pytest.mark.parametrize("empty", ["rows", "features", "both"])
@pytest.mark.parametrize("name", NAMES)
def test_empty_arrays_keep_their_shape_and_give_zero_gradients(name, empty):  # CASES: D24
    op = BY_NAME[name]
    features = set(op.feature_axes)
    shape = tuple(
        0 if (empty == "both" or (a in features) == (empty == "features")) else s for a, s in enumerate(op.shape)
    )
    op = op.at(shape)
    given = inputs(op)
    y, dx, dscale, dbias = value_and_grads(op, given)
    assert y.shape == shape and dx.shape == shape
    assert not np.asarray(dscale).any() and not np.asarray(dbias).any()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_measured_gives_bias_and_no_gradient(name):  # CASES: J21
    op = BY_NAME[name]
    given = inputs(op)
    given.where = np.zeros(op.shape, bool)
    given.x = given.x.at[(0,) * given.x.ndim].set(jnp.nan)
    y, dx, dscale, _ = value_and_grads(op, given)
    np.testing.assert_array_equal(y, np.broadcast_to(np.asarray(given.bias).reshape(op.kept_shape), op.shape))
    assert not np.asarray(dx).any() and not np.asarray(dscale).any()


@pytest.mark.parametrize("name", NAMES)
def test_integers_and_bools_are_computed_in_float32(name):  # CASES: J18
    op = BY_NAME[name]
    x = np.random.default_rng(0).integers(0, 255, op.shape).astype(np.uint8)
    y = jax.jit(op.call)(jnp.asarray(x))
    ref = op.reference(x, np.zeros(op.parameter_shape) if op.options.get("offset") else None, None)
    assert y.dtype == jnp.float32
    reference.assert_rounded(y, ref.y, ref.y_size)
    assert jax.eval_shape(op.call, jnp.asarray(x > 100)).dtype == jnp.float32


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_computed_in_float64(name):
    op = BY_NAME[name]
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=op.shape), rng.normal(size=op.shape)
    with jax.enable_x64(True):
        y, dx, _, _ = compiled(op.call)(jnp.asarray(x), None, None, jnp.asarray(dy), None)
    ref = op.reference(x, np.zeros(op.parameter_shape) if op.options.get("offset") else None, None, dy)
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, ref.y, atol=1e-13)
    np.testing.assert_allclose(dx, ref.dx, atol=1e-13)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm"])
def test_huge_values_are_never_silently_zero(name):  # CASES: J12, C12
    op = BY_NAME[name]
    given = inputs(op, mean=0.0)
    given.x = given.x * 1e30
    plain = np.asarray(value_and_grads(op, given)[0])
    assert not np.isfinite(plain).any()
    ref = op.reference(given.x, given.scale, given.bias, given.dy)
    y, dx, _, _ = value_and_grads(op, given, rescale=True)
    reference.assert_rounded(y, ref.y, ref.y_size)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")


@pytest.mark.parametrize("name", NAMES)
def test_rescale_leaves_ordinary_values_as_they_are(name):
    op = BY_NAME[name]
    given = inputs(op)
    check(op, given, value_and_grads(op, given, rescale=True))


@pytest.mark.parametrize("scale", [1e4, 6e4])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm"])
def test_half_precision_squares_do_not_overflow(name, scale):  # CASES: J13, C9
    op = BY_NAME[name]
    given = inputs(op, jnp.float16)
    given.x = (jnp.sign(given.x) * scale).astype(jnp.float16)
    check(op, given, value_and_grads(op, given))


@pytest.mark.parametrize("name", ["batch_norm", "layer_norm", "instance_norm"])
def test_parameters_may_be_per_sample(name):
    op = BY_NAME[name]
    given = inputs(op)
    rng = np.random.default_rng(1)
    shape = (op.shape[0], *(op.shape[a] if a in op.feature_axes else 1 for a in range(1, len(op.shape))))
    given.scale, given.bias = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    y, dx, dscale, dbias = value_and_grads(op, given)
    ref = reference.norm(given.x, given.scale, given.bias, given.dy, axes=op.reduce, **op.options)
    reference.assert_rounded(y, ref.y, ref.y_size)
    reference.assert_rounded(dx, ref.dx, ref.dx_size, what="dx")
    reference.assert_sum(dscale, ref.dscale, shape, what="dscale")
    reference.assert_sum(dbias, ref.dbias, shape, what="dbias")


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_complex_input_has_a_complex_mean_and_a_real_variance(name):
    op = BY_NAME[name]
    rng = np.random.default_rng(0)
    x = (rng.normal(size=op.shape) + 1j * rng.normal(size=op.shape) + (2 + 1j)).astype(np.complex64)
    mean = x.astype(np.complex128).mean(-1, keepdims=True) if name == "layer_norm" else 0
    var = (abs(x - mean) ** 2).mean(-1, keepdims=True)
    np.testing.assert_allclose(
        op.call(jnp.asarray(x)), (x - mean) / np.sqrt(var + op.options["eps"]), rtol=1e-5, atol=1e-6
    )


def test_gradients_are_the_same_bits_a_thousand_times():
    op = BY_NAME["batch_norm"]
    given = inputs(op)
    run = jax.jit(jax.grad(lambda x: (op.call(x, given.scale) ** 3).sum()))
    first = np.asarray(run(given.x))
    for _ in range(1000):
        np.testing.assert_array_equal(run(given.x), first)
