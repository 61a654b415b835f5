"""What is particular to the fused operators: rounding order, residuals, donation, masks, activations, convolution."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import normlib as nl
from normlib import passes
from tests import reference
from tests.distributed import mesh

pytestmark = pytest.mark.family


def draw(*shape, dtype=jnp.float32, mean=0.0, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape) + mean, jnp.float32).astype(dtype)


ADD_NORMS = {"layer": nl.add_layer_norm, "rms": nl.add_rms_norm}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ADD_NORMS)
def test_the_residual_is_bit_exact_and_round_first_decides_what_is_measured(name, dtype):  # CASES: D4
    # sums that need the bits which rounding takes: a wave below half an ulp of 256
    x1 = jnp.asarray(np.where(np.arange(64) % 2, 256.0, -256.0)[None], dtype)
    x2 = jnp.asarray(np.linspace(-0.4, 0.4, 64)[None], dtype)
    x1 = jnp.where(jnp.arange(64) % 2, x1, 0)
    exact = np.float32(x1) + np.float32(x2)
    run = jax.jit(functools.partial(ADD_NORMS[name], eps=1e-6), static_argnames="residual_round_first")
    late, early = run(x1, x2), run(x1, x2, residual_round_first=True)
    np.testing.assert_array_equal(late.residual, exact.astype(dtype))
    np.testing.assert_array_equal(early.residual, exact.astype(dtype))
    for out, s in ((late, exact), (early, exact.astype(dtype))):
        ref = reference.norm(s, axes=(1,), eps=1e-6, centered=name == "layer")
        np.testing.assert_allclose(np.float64(out.moments.var), ref.var[:, 0], rtol=3e-7)
    assert float(late.moments.var[0]) != float(early.moments.var[0])
    plain = {"layer": nl.layer_norm, "rms": nl.rms_norm}[name]
    np.testing.assert_array_equal(early.y, jax.jit(functools.partial(plain, eps=1e-6))(early.residual))


@pytest.mark.parametrize("name", ADD_NORMS)
def test_the_residuals_cotangent_is_added_to_that_of_y(name):  # CASES: D5
    x1, x2, scale = draw(5, 33), draw(5, 33, seed=1), draw(33)
    dy, dr = draw(5, 33, seed=2), draw(5, 33, seed=3)
    _, vjp = jax.vjp(jax.jit(lambda a, b: ADD_NORMS[name](a, b, scale)[:2]), x1, x2)
    through_y, through_r, both = vjp((dy, 0 * dr))[0], vjp((0 * dy, dr))[0], vjp((dy, dr))[0]
    np.testing.assert_array_equal(through_r, dr)
    np.testing.assert_allclose(both, through_y + dr, atol=1e-6)
    ref = reference.norm(x1 + x2, scale[None], None, dy, axes=(1,), eps=1e-5, centered=name == "layer")
    np.testing.assert_allclose(both, ref.dx + np.float64(dr), atol=1e-4 if name == "rms" else 1e-5)


def test_gradients_of_the_moments_reach_the_summed_arrays():
    x1, x2 = draw(4, 16), draw(4, 16, seed=1)
    run = lambda a, b: (nl.add_layer_norm(a, b).moments.var ** 2).sum()  # noqa: E731
    dx1, dx2 = jax.jit(jax.grad(run, (0, 1)))(x1, x2)
    s = np.float64(x1 + x2)
    want = 2 * s.var(1, keepdims=True) * 2 * (s - s.mean(1, keepdims=True)) / 16
    np.testing.assert_allclose(dx1, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(dx1, dx2)


def test_the_cast_copy_widens_y_and_both_cotangents_count():
    x1, x2, scale = draw(4, 24, dtype=jnp.bfloat16), draw(4, 24, dtype=jnp.bfloat16, seed=1), draw(24)
    run = jax.jit(lambda a: nl.add_rms_norm_cast(a, x2, scale)[:3])
    (y, wide, residual), vjp = jax.vjp(run, x1)
    assert (y.dtype, wide.dtype, residual.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(y, wide)
    np.testing.assert_array_equal(y, jax.jit(nl.add_rms_norm)(x1, x2, scale).y)
    dy = draw(4, 24, dtype=jnp.bfloat16, seed=2)
    zero = jnp.zeros_like(dy)
    by_y, by_wide = vjp((dy, wide * 0, zero))[0], vjp((zero, dy.astype(jnp.float32), zero))[0]
    assert np.asarray(by_y, np.float32).any()
    np.testing.assert_array_equal(by_y, by_wide)


def aliases(compiled):
    """{output: donated argument} from a compiled module's header."""
    header = compiled.as_text().splitlines()[0]
    table = re.search(r"input_output_alias=\{(.*?)\}, entry", header)
    return {int(o): int(i) for o, i in re.findall(r"\{(\d+)\}: \((\d+),", table.group(1))} if table else {}


@pytest.mark.parametrize("name", ADD_NORMS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_donation_makes_the_add_norms_inplace(name, dtype):
    x1, x2, scale = draw(64, 128, dtype=dtype), draw(64, 128, dtype=dtype, seed=1), draw(128)
    run = lambda a, b, s: ADD_NORMS[name](a, b, s)[:2]  # noqa: E731
    table = aliases(jax.jit(run, donate_argnums=(0, 1)).lower(x1, x2, scale).compile())
    assert table.keys() == {0, 1} and set(table.values()) == {0, 1}
    assert aliases(jax.jit(run).lower(x1, x2, scale).compile()) == {}
    want = jax.jit(run)(x1, x2, scale)
    got = jax.jit(run, donate_argnums=(0, 1))(jnp.array(x1), jnp.array(x2), scale)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [1e4, 6e4])
def test_half_precision_sums_do_not_overflow(size):  # CASES: C9
    sign = np.where(np.random.default_rng(0).random((3, 64)) < 0.5, -1, 1)
    x = jnp.asarray(sign * size, jnp.float16)
    out = jax.jit(nl.add_rms_norm)(x, jnp.zeros_like(x))
    np.testing.assert_allclose(np.float64(out.y), sign, rtol=1e-3)
    # a float32 sum past the largest float16 is still measured; only the residual, which must be float16, is inf
    y, residual, _ = jax.jit(nl.add_rms_norm)(x, jnp.asarray(sign * 3e4, jnp.float16))
    np.testing.assert_allclose(np.float64(y), sign, rtol=1e-3)
    assert np.isinf(np.float32(residual)).all() == (size == 6e4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_a_fused_sum_is_as_accurate_as_the_norm_alone_at_large_means(mean, dtype):  # CASES: C5
    x1, x2 = draw(8, 512, mean=mean).astype(dtype), draw(8, 512, seed=1).astype(dtype)
    dy = draw(8, 512, seed=2).astype(dtype)
    y, vjp = jax.vjp(jax.jit(lambda a, b: nl.add_layer_norm(a, b).y), x1, x2)
    dx1, dx2 = vjp(dy)
    s = np.float32(x1) + np.float32(x2)
    ref = reference.norm(s, None, None, dy, axes=(1,), eps=1e-5)
    reference.assert_rounded(y, ref.y, ref.y_size)
    reference.assert_rounded(dx1, ref.dx, ref.dx_size, what="dx")
    np.testing.assert_array_equal(dx1, dx2)


@pytest.mark.parametrize("rule", ["reverse", "both", "autodiff"])
def test_masked_entries_behind_a_sum_enter_nothing(rule):  # CASES: J24
    where = np.random.default_rng(0).random((6, 20)) < 0.6
    where[:, :2] = True
    x1 = jnp.where(where, draw(6, 20), jnp.nan)
    x2, scale, dy = draw(6, 20, seed=1), draw(20), jnp.where(where, draw(6, 20, seed=2), 0)
    run = jax.jit(lambda a, b, s: nl.add_layer_norm(a, b, s, where=where, rule=rule).y)
    y, vjp = jax.vjp(run, x1, x2, scale)
    dx1, dx2, dscale = vjp(dy)
    ref = reference.norm(x1 + x2, scale[None], None, dy, axes=(1,), eps=1e-5, where=where)
    np.testing.assert_allclose(np.where(where, y, 0), np.where(where, ref.y, 0), atol=1e-5)
    np.testing.assert_allclose(np.where(where, dx2, 0), np.where(where, ref.dx, 0), atol=1e-5)
    np.testing.assert_allclose(np.where(where, dx1, 0), np.where(where, ref.dx, 0), atol=1e-5)
    np.testing.assert_allclose(dscale, ref.dscale.sum(0), atol=1e-5)


@pytest.mark.parametrize("rule", ["reverse", "both", "autodiff"])
def test_masked_entries_behind_an_activation_enter_nothing(rule):  # CASES: J24, J26
    where = np.random.default_rng(0).random((2, 4, 5, 1)) < 0.6
    where[:, :2, :2] = True
    x = jnp.where(where, draw(2, 4, 5, 6), jnp.nan)
    scale, dy = draw(6), jnp.where(where, draw(2, 4, 5, 6, seed=2), 0)
    run = jax.jit(lambda x, s: nl.group_norm_silu(x, s, num_groups=3, where=where, rule=rule))
    y, vjp = jax.vjp(run, x, scale)
    dx, dscale = vjp(dy)
    ref = reference.norm(x, scale, None, axes=(1, 2), groups=3, channel=3, eps=1e-5, where=where)
    sigmoid = 1 / (1 + np.exp(-ref.y))
    dz = np.where(where, np.float64(dy) * (sigmoid + ref.y * sigmoid * (1 - sigmoid)), 0)
    ref = reference.norm(x, scale, None, dz, axes=(1, 2), groups=3, channel=3, eps=1e-5, where=where)
    np.testing.assert_allclose(np.where(where, y, 0), np.where(where, ref.y * sigmoid, 0), atol=1e-5)
    if rule == "reverse":
        np.testing.assert_allclose(np.where(where, dx, 0), np.where(where, ref.dx, 0), atol=1e-5)
        np.testing.assert_allclose(dscale, np.where(where, ref.dscale, 0).sum((0, 1, 2)), atol=1e-5)


@pytest.mark.parametrize("z", [-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])
def test_swish_and_its_derivative_are_finite_far_out(z):
    bias = jnp.full(2, z)
    run = jax.jit(lambda x, b: nl.group_norm_silu(x, None, b, num_groups=2))
    x = draw(2, 8, 2)
    y, vjp = jax.vjp(run, x, bias)
    dx, db = vjp(jnp.ones_like(y))
    assert np.isfinite(np.asarray(y)).all() and np.isfinite(np.asarray(dx)).all()
    np.testing.assert_allclose(db, 16.0 if z > 0 else 0.0, atol=1e-3)


def test_empty_sums_keep_their_shape():  # CASES: D24
    for shape in ((0, 8), (3, 0), (0, 0)):
        x = jnp.zeros(shape, jnp.bfloat16)
        (y, s), vjp = jax.vjp(lambda a, b, w: nl.add_layer_norm(a, b, w)[:2], x, x, jnp.ones(shape[1]))
        assert y.shape == s.shape == shape
        dx1, _, dscale = vjp((y, s))
        assert dx1.shape == shape and not np.asarray(dscale).any()


def test_another_backend_gets_arrays_and_agrees(monkeypatch):
    seen = []

    class Dense:
        @staticmethod
        def spy(name, *args, **kwargs):
            seen.extend(isinstance(t, jax.Array) for t in args if t is not None)
            return getattr(passes.xla, name)(*args, **kwargs)

    for name in ("moments", "sums", "apply", "grad_sums", "grad_apply"):
        setattr(Dense, name, staticmethod(functools.partial(Dense.spy, name)))
    monkeypatch.setitem(passes.BACKENDS, "dense", Dense)
    x1, x2, scale = (draw(6, 32, dtype=jnp.bfloat16, seed=i) for i in range(3))

    def grads(backend):
        run = lambda a, b, s: nl.add_layer_norm(a, b, s[0], backend=backend)[:2]  # noqa: E731
        silu = lambda x: nl.group_norm_silu(x, num_groups=4, backend=backend)  # noqa: E731
        (y, s), vjp = jax.vjp(run, x1, x2, scale)
        z, vjp2 = jax.vjp(silu, x1)
        return y, s, *vjp((y, s)), z, *vjp2(y)

    for a, b in zip(jax.jit(grads, static_argnums=0)("dense"), jax.jit(grads, static_argnums=0)("xla")):
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=0.02)
    assert seen and all(seen)


def test_rows_of_a_sum_do_not_depend_on_the_batch():  # CASES: D26
    x1, x2 = draw(65, 100), draw(65, 100, seed=1)
    run = jax.jit(functools.partial(nl.add_layer_norm, batch_invariant=True))
    whole = np.asarray(run(x1, x2).y)
    for rows in (1, 3, 64):
        np.testing.assert_array_equal(run(x1[:rows], x2[:rows]).y, whole[:rows])


@pytest.mark.parametrize("vma", [True, False])
def test_a_split_normalised_axis_gives_the_whole_rows_result(vma):
    x1, x2, scale = draw(6, 32, dtype=jnp.bfloat16), draw(6, 32, dtype=jnp.bfloat16, seed=1), draw(32)
    dy, dr = draw(6, 32, dtype=jnp.bfloat16, seed=2), draw(6, 32, dtype=jnp.bfloat16, seed=3)

    def grads(norm, x1, x2, scale, dy, dr):
        out, vjp = jax.vjp(norm, x1, x2, scale)
        return *out, *vjp((dy, dr))

    split = lambda *a: nl.add_layer_norm(*a, axis_name="d")[:2]  # noqa: E731
    columns, whole = P(None, "d"), P("d")
    inside = jax.shard_map(
        functools.partial(grads, split), mesh=mesh(4), in_specs=(columns, columns, whole, columns, columns),
        out_specs=(columns, columns, columns, columns, whole), check_vma=vma,
    )  # fmt: skip
    found = jax.jit(inside)(x1, x2, scale, dy, dr)
    want = jax.jit(functools.partial(grads, lambda *a: nl.add_layer_norm(*a)[:2]))(x1, x2, scale, dy, dr)
    for a, b in zip(found, want):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-2, atol=2e-2)


def test_a_convolution_block_normalises_over_devices_and_takes_a_shift():
    x, kernel, scale = draw(8, 6, 3), draw(3, 3, 4), draw(4)
    shift = jnp.zeros(4)
    local = jax.jit(nl.conv_batch_norm_relu)(x, kernel, scale)
    run = lambda x: nl.conv_batch_norm_relu(x, kernel, scale, axis_name="d", shift=shift, method="adaptive")  # noqa: E731
    spec = nl.ConvBatchNormOutput(P("d"), P())
    out = jax.jit(jax.shard_map(run, mesh=mesh(4), in_specs=P("d"), out_specs=spec))(x)
    np.testing.assert_allclose(out.y, local.y, atol=2e-6)
    np.testing.assert_allclose(out.moments.var, local.moments.var, rtol=1e-5)
    assert local.y.min() == 0 and int(local.moments.count[0]) == 48


@pytest.mark.parametrize(("rank", "options"), [
    (3, {"strides": 2}), (4, {"padding": "VALID", "kernel_dilation": 2}), (5, {"padding": [(1, 0)] * 3}),
])  # fmt: skip
def test_a_convolution_block_takes_one_to_three_spatial_axes(rank, options):
    x, kernel = draw(3, *(6,) * (rank - 2), 4, dtype=jnp.bfloat16), draw(*(2,) * (rank - 2), 2, 6)
    out = jax.jit(lambda x, k: nl.conv_batch_norm_relu(x, k, feature_group_count=2, **options))(x, kernel)
    names = "DHW"[5 - rank :]
    z = jax.lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (options.get("strides", 1),) * (rank - 2), options.get("padding", "SAME"),
        rhs_dilation=(options.get("kernel_dilation", 1),) * (rank - 2), feature_group_count=2,
        dimension_numbers=(f"N{names}C", f"{names}IO", f"N{names}C"),
    )  # fmt: skip
    ref = reference.norm(z, axes=tuple(range(rank - 1)), eps=1e-5)
    reference.assert_rounded(out.y, np.maximum(ref.y, 0), ref.y_size)


X = jnp.ones((4, 8))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: nl.add_layer_norm(X, jnp.ones((4, 1))), r"`x2` must have the shape of `x1`, \(4, 8\); got \(4, 1\)"),
    (lambda: nl.add_rms_norm(X, X, jnp.ones((1, 1, 8))), r"`scale` must have shape \(8,\).*got \(1, 1, 8\)"),
    (lambda: nl.add_layer_norm(X, X, sum_bias=jnp.ones(4)), r"`sum_bias` must have shape \(8,\)"),
    (lambda: nl.add_layer_norm(X, X, eps=-1.0), "`eps` must be >= 0"),
    (lambda: nl.add_layer_norm(X, X, rule="backwards"), "`rule` must be one of"),
    (lambda: nl.multi_add_rms_norm([], X), "`x1` must be a list of 1 to 5 arrays; got 0"),
    (lambda: nl.multi_add_rms_norm([X] * 6, X), "got 6"),
    (lambda: nl.multi_add_rms_norm([X, X[:2]], X), r"`x1\[1\]` must have the shape of `x1\[0\]`"),
    (lambda: nl.deep_norm(X, X[0]), r"`gx` must have the shape of `x`, \(4, 8\); got \(8,\)"),
    (lambda: nl.group_norm_silu(X, num_groups=3), "`num_groups` must divide the 8 channels"),
    (lambda: nl.group_norm_silu(X, num_groups=8), "one value per set of statistics"),
    (lambda: nl.conv_batch_norm_relu(X, X), r"`x` must have shape \[N, spatial..., C\]"),
    (lambda: nl.conv_batch_norm_relu(X[None], jnp.ones((1, 3, 4))), "`kernel` of shape .* does not fit x's 8 channels"),
    (lambda: nl.conv_batch_norm_relu(X[:1, None], jnp.ones((1, 8, 4))), "one value per set of statistics"),
])  # fmt: skip
def test_wrong_values_are_refused(call, message):  # CASES: D19
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: nl.deep_norm(X, X, alpha=None), "`alpha` must be a number"),
    (lambda: nl.group_norm_silu(X, num_groups=2, beta="1"), "`beta` must be a number"),
    (lambda: nl.add_layer_norm(X, X, where=jnp.ones((4, 8))), "`where` must be boolean"),
    (lambda: nl.add_layer_norm("x", X), "`x1` must be an array"),
])  # fmt: skip
def test_wrong_types_are_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("operator", ["batch_norm", "batch_norm_act", "conv_batch_norm_relu"])
def test_a_wider_shift_does_not_widen_the_statistics(operator):
    x = np.random.default_rng(0).normal(size=(12, 8, 4)).astype(np.float32) + 3
    first = (jnp.eye(4, dtype=x.dtype)[None],) if operator == "conv_batch_norm_relu" else ()
    shift = np.float64(x).mean((0, 1)) + 0.01
    with jax.enable_x64(True):
        run = jax.jit(lambda x, k: jax.value_and_grad(lambda x: loss(x, k), has_aux=True)(x))

        def loss(x, k):
            out = getattr(nl, operator)(x, *first, shift=k)
            return (out.y**2).sum(), out.moments

        (_, moments), dx = run(jnp.asarray(x), jnp.asarray(shift))
        assert {t.dtype for t in moments[1:]} == {np.dtype("float32")} and dx.dtype == np.float32
    np.testing.assert_allclose(moments.var, np.float64(x).var((0, 1)), rtol=1e-6)
