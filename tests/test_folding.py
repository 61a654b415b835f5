"""Folding equals the unfolded layers, for every kind of convolution, layout and missing parameter."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import normlib as nl

LAYOUTS = {1: ("WIO", "OIW"), 2: ("HWIO", "OIHW", "IHWO"), 3: ("DHWIO", "OIDHW")}


def statistics(channels, seed=0, missing=()):
    rng = np.random.default_rng([seed, channels])
    found = {
        "mean": rng.normal(size=channels), "var": rng.uniform(0.1, 3, channels),
        "scale": rng.normal(size=channels), "norm_bias": rng.normal(size=channels),
    }  # fmt: skip
    return {name: None if name in missing else value.astype(np.float32) for name, value in found.items()}


def normed(x, s, axis, eps=1e-5):
    """Batch norm by statistics in float64, channels along `axis`."""
    at = [-1 if a == axis % x.ndim else 1 for a in range(x.ndim)]
    get = lambda name, default: default if s[name] is None else np.float64(s[name]).reshape(at)  # noqa: E731
    return (x - get("mean", 0)) / np.sqrt(get("var", 1) + eps) * get("scale", 1) + get("norm_bias", 0)


def conv(x, kernel, layout, *, stride=1, padding="SAME", groups=1, transposed=False):
    """x [N, *space, I] by XLA in float64; a transposed one dilates x, in PyTorch's way for groups."""
    space = "".join(c for c in layout if c not in "IO")
    numbers = (f"N{space}C", layout, f"N{space}C")
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    if not transposed:
        return lax.conv_general_dilated(x, kernel, (stride,) * len(space), padding, dimension_numbers=numbers,
                                        feature_group_count=groups)  # fmt: skip
    i = layout.index("I")
    size = x.shape[-1] // groups
    parts = [
        lax.conv_general_dilated(
            x[..., g * size : (g + 1) * size], lax.slice_in_dim(kernel, g * size, (g + 1) * size, axis=i),
            (1,) * len(space), [(2, 2)] * len(space), lhs_dilation=(stride,) * len(space), dimension_numbers=numbers,
        ) for g in range(groups)
    ]  # fmt: skip
    return jnp.concatenate(parts, -1)


def kernel_of(layout, sizes, seed=0, dtype=np.float32):
    rng = np.random.default_rng([seed, *map(ord, layout)])
    return rng.normal(size=[sizes.get(c, 3) for c in layout]).astype(dtype)


def assert_close(actual, expected, rtol=2e-6):
    expected = np.asarray(expected)
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * abs(expected).max())


CASES = [(d, layout, g) for d in (1, 2, 3) for layout in LAYOUTS[d] for g in ((1, 2, 4) if d == 2 else (1, 4))]


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("dims", "layout", "groups"), CASES)
def test_convolution_then_norm(dims, layout, groups):  # CASES: F4
    """Dense, grouped and depthwise (groups 4 of 4 channels), padded and with stride."""
    x = np.random.default_rng(1).normal(size=(2, *(5,) * dims, 4))
    kernel = kernel_of(layout, {"I": 4 // groups, "O": 8})
    s = statistics(8)
    options = {"layout": layout, "groups": groups, "stride": 2}
    plain = conv(x, np.float64(kernel), **options)
    for bias in (None, np.linspace(-1, 1, 8, dtype=np.float32)):
        folded = nl.fold_conv_batch_norm(kernel, bias, *s.values(), layout=layout, groups=groups)
        y = conv(x, np.float64(folded.kernel), **options) + np.float64(folded.bias)
        assert_close(y, normed(plain + (0 if bias is None else bias), s, -1))
        assert folded.kernel.dtype == folded.bias.dtype == np.float32


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    ("outputs", "groups", "layout"), list(itertools.product((4, 8), (1, 2, 4), ("IOHW", "HWIO", "HWOI")))
)
def test_transposed_convolution_then_norm(outputs, groups, layout):  # CASES: F1, F2
    """Groups 1, 2 and all, stride 2, and as many output as input channels, where a shape cannot tell the axes."""
    x = np.random.default_rng(1).normal(size=(2, 5, 5, 4))
    kernel = kernel_of(layout, {"I": 4, "O": outputs // groups})
    s = statistics(outputs)
    options = {"layout": layout, "groups": groups, "transposed": True}
    plain = conv(x, np.float64(kernel), stride=2, **options)
    for bias in (None, np.linspace(-1, 1, outputs, dtype=np.float32)):
        folded = nl.fold_conv_batch_norm(kernel, bias, *s.values(), **options)
        y = conv(x, np.float64(folded.kernel), stride=2, **options) + np.float64(folded.bias)
        assert_close(y, normed(plain + (0 if bias is None else bias), s, -1))


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("layout", "groups"), list(itertools.product(("HWIO", "OIHW"), (1, 2, 4))))
@pytest.mark.parametrize("padding", ["VALID", [(0, 0), (0, 0)]])
def test_norm_then_convolution_without_padding(layout, groups, padding):  # CASES: F4
    x = np.random.default_rng(1).normal(size=(2, 6, 6, 4))
    kernel, bias = kernel_of(layout, {"I": 4 // groups, "O": 8}), np.linspace(-1, 1, 8, dtype=np.float32)
    s = statistics(4)
    expected = conv(normed(x, s, -1), np.float64(kernel), layout, padding="VALID", groups=groups) + bias
    folded = nl.fold_batch_norm_conv(kernel, bias, *s.values(), layout=layout, groups=groups, padding=padding)
    options = {"padding": "VALID", "groups": groups}
    assert_close(conv(x, np.float64(folded.kernel), layout, **options) + np.float64(folded.bias), expected)


@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR", [(1, 1), (0, 0)], [(0, 0), (0, 1)]])
def test_norm_then_padded_convolution_is_refused(padding):  # CASES: F4
    with pytest.raises(ValueError, match="`padding` must be 'VALID'"):
        nl.fold_batch_norm_conv(kernel_of("HWIO", {"I": 4, "O": 8}), None, *statistics(4).values(), padding=padding)


@pytest.mark.parametrize("missing", [("scale",), ("norm_bias",), ("scale", "norm_bias")])
@pytest.mark.parametrize("layout", ["IO", "OI"])
def test_dense_with_norms_around_it(missing, layout):  # CASES: F5
    x = np.random.default_rng(2).normal(size=(7, 4))
    kernel = kernel_of(layout, {"I": 4, "O": 6})
    matrix = np.float64(kernel) if layout == "IO" else np.float64(kernel).T
    after, before = statistics(6, missing=missing), statistics(4, missing=missing)
    for folded, expected in (
        (nl.fold_dense_batch_norm(kernel, None, *after.values(), layout=layout), normed(x @ matrix, after, -1)),
        (nl.fold_batch_norm_dense(kernel, None, *before.values(), layout=layout), normed(x, before, -1) @ matrix),
    ):
        new = np.float64(folded.kernel) if layout == "IO" else np.float64(folded.kernel).T
        assert_close(x @ new + np.float64(folded.bias), expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_folding_is_in_float32_and_rounds_once(dtype):  # CASES: F5
    """A gain of 300 from var 1e-5: products in 16 bits would be off by several roundings."""
    kernel = jnp.asarray(kernel_of("IO", {"I": 4, "O": 6}), dtype)
    s = statistics(6) | {"var": np.full(6, 1e-5, np.float32), "mean": np.full(6, 0.01, np.float32)}
    folded = nl.fold_dense_batch_norm(kernel, None, *s.values(), eps=1e-6)
    a = np.float64(s["scale"]) / np.sqrt(np.float64(np.float32(1e-5)) + 1e-6)
    assert folded.kernel.dtype == folded.bias.dtype == dtype
    exact = np.asarray(kernel, np.float64) * a
    half = float(jnp.finfo(dtype).eps) / 2
    assert (abs(np.asarray(folded.kernel, np.float64) - exact) <= 1.01 * half * abs(exact)).all()
    exact = s["norm_bias"] - np.float64(s["mean"]) * a
    assert (abs(np.asarray(folded.bias, np.float64) - exact) <= 1.01 * half * abs(exact) + 1e-5).all()


def test_a_zero_variance_folds_and_is_left_alone():  # CASES: B17
    var = np.zeros(6, np.float32)
    folded = nl.fold_dense_batch_norm(np.ones((4, 6), np.float32), None, np.zeros(6, np.float32), var)
    np.testing.assert_allclose(folded.kernel, 1 / np.sqrt(1e-5), rtol=1e-6)
    assert not var.any()


@pytest.mark.parametrize(("var", "eps"), [(-1e-7, 1e-5), (-1.0, 1e-5), (0.0, 0.0), (np.nan, 1e-5)])
def test_an_impossible_variance_is_refused(var, eps):  # CASES: B17
    variance = np.array([1, 1, var, 1], np.float32)
    with pytest.raises(ValueError, match="`var` must not be negative.*channel 2 has"):
        nl.fold_dense_batch_norm(np.ones((3, 4)), None, np.zeros(4), variance, eps=eps)
    if var < 0:
        folded = jax.jit(lambda v: nl.fold_dense_batch_norm(np.ones((3, 4)), None, np.zeros(4), v, eps=eps))(variance)
        assert np.isnan(folded.kernel[:, 2]).all()
        assert np.isfinite(folded.kernel[:, [0, 1, 3]]).all()


@pytest.mark.parametrize("layout", ["HWIO", "OIHW"])
def test_one_output_channel(layout):  # CASES: F5
    kernel, s = kernel_of(layout, {"I": 4, "O": 1}), statistics(1)
    folded = nl.fold_conv_batch_norm(kernel, None, *s.values(), layout=layout)
    assert folded.bias.shape == (1,)
    np.testing.assert_allclose(folded.kernel, kernel * s["scale"] / np.sqrt(s["var"] + 1e-5), rtol=1e-6)
    with pytest.raises(ValueError, match=r"`mean` must have shape \(4,\)"):
        nl.fold_conv_batch_norm(kernel_of(layout, {"I": 4, "O": 4}), None, *s.values(), layout=layout)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_norms_scale_moves_into_the_dense_layer(offset, with_bias):
    rng = np.random.default_rng(3)
    x, kernel = rng.normal(size=(5, 8)), rng.normal(size=(8, 3)).astype(np.float32)
    scale, shift, bias = (rng.normal(size=n).astype(np.float32) for n in (8, 8, 3))
    n = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    expected = (n * (np.float64(scale) + offset) + (shift if with_bias else 0)) @ np.float64(kernel)
    expected = expected + (bias if with_bias else 0)
    folded = nl.fold_rms_norm_dense(
        kernel, bias if with_bias else None, scale, shift if with_bias else None, scale_offset=offset
    )
    assert_close(n @ np.float64(folded.kernel) + np.float64(folded.bias), expected)


@pytest.mark.parametrize("missing", [(), (0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 3)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_an_affine_pair_moves_into_the_norm(missing, offset):
    rng = np.random.default_rng(4)
    n, arrays = rng.normal(size=(5, 8)), [rng.normal(size=8).astype(np.float32) for _ in range(4)]
    arrays = [None if i in missing else t for i, t in enumerate(arrays)]
    defaults = (1.0, 0.0, 1.0, 0.0)
    scale, bias, outer_scale, outer_bias = (d if t is None else np.float64(t) for t, d in zip(arrays, defaults))
    y = (n * (scale + offset) + bias) * outer_scale + outer_bias
    if arrays[0] is None and offset:
        with pytest.raises(ValueError, match="`scale_offset` 1.0 is added to `scale`, which is None"):
            nl.fold_affine(*arrays, scale_offset=offset)
        return
    folded = nl.fold_affine(*arrays, scale_offset=offset)
    assert_close(n * (np.float64(folded.scale) + offset) + np.float64(folded.bias), y)


@pytest.mark.parametrize(("change", "match"), [
    ({"layout": "HWI"}, "`layout` must name the 4 axes"), ({"layout": "HHII"}, "I and O once each"),
    ({"eps": -1.0}, "`eps` must be >= 0"), ({"scale": None, "scale_offset": 1.0}, "`scale_offset` 1.0 is added"),
    ({"bias": np.ones(3)}, r"`bias` must have shape \(8,\).*\(3,\)"),
    ({"scale": np.ones((1, 8))}, r"`scale` must have shape \(8,\)"),
    ({"norm_bias": np.ones(4)}, r"`norm_bias` must have shape \(8,\)"),
    ({"var": np.ones(4)}, r"`var` must have shape \(8,\)"),
    ({"transposed": True, "groups": 3}, "`groups` must divide the 4 channels along axis 2"),
    ({"transposed": True, "groups": 0}, "`groups` must divide"),
    ({"kernel": np.ones(4)}, "`kernel` must have an input and an output axis; got rank 1"),
])  # fmt: skip
def test_arguments_that_do_not_fit(change, match):
    arguments = {"kernel": kernel_of("HWIO", {"I": 4, "O": 8}), "bias": None, **statistics(8), **change}
    with pytest.raises(ValueError, match=match):
        nl.fold_conv_batch_norm(**arguments)


def test_affines_of_different_shapes():
    with pytest.raises(ValueError, match="one shape"):
        nl.fold_affine(np.ones(3), None, np.ones(4), None)
    with pytest.raises(ValueError, match="one shape"):
        nl.fold_affine(None, None, None, None)
