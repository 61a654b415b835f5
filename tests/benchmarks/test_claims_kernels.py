"""The kernels that the claims compare compute what they say, in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.claims import channel_kernels, channels, resnet_step, row_kernels
from benchmarks.claims.resnet_step import NoNorm
from normlib import kernels
from normlib import linen as norm
from train.models import Bottleneck, DeepResNet

RNG = np.random.default_rng(0)
X, R = (RNG.normal(size=(13, 96)).astype(np.float32) + 0.5 for _ in range(2))
G, B = RNG.normal(size=(2, 96)).astype(np.float32)


def jitted(fn, **options):
    return jax.jit(functools.partial(fn, interpret=True, **options))


def rms(x):
    x = np.float64(x)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * G


def layer(x):
    x = np.float64(x)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * G + B


@pytest.mark.parametrize(
    ("kernel", "arguments", "want"),
    [
        (row_kernels.add, (X, R), (X + R,)),
        (row_kernels.rms_norm, (X, G), (rms(X),)),
        (row_kernels.layer_norm, (X, G, B), (layer(X),)),
        (row_kernels.add_rms_norm, (X, R, G), (rms(X + R), X + R)),
        (row_kernels.add_layer_norm, (X, R, G, B), (layer(X + R), X + R)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_row_kernels_compute_their_formula(kernel, arguments, want):
    found = jitted(kernel)(*arguments)

    for got, expected in zip(found if isinstance(found, tuple) else (found,), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_quantised_rows_are_within_half_a_step(fused):
    if fused:
        codes, scale, total = jitted(row_kernels.add_rms_norm_quant)(X, R, G)
        want = rms(X + R)
        np.testing.assert_allclose(total, X + R, atol=1e-6)
    else:
        codes, scale = jitted(row_kernels.quantise)(X)
        want = np.float64(X)

    assert codes.dtype == jnp.int8 and np.abs(np.int32(codes)).max(-1).tolist() == [127] * len(X)
    np.testing.assert_allclose(scale, np.abs(want).max(-1, keepdims=True) / 127, rtol=1e-5)
    assert (np.abs(np.float64(codes) * scale - want) <= 0.501 * np.float64(scale)).all()


def channel_norm(x, axes, g, b):
    x = np.float64(x)
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5) * g + b


@pytest.mark.parametrize("rows", [5, 300, 1031])  # fewer than parts, whole blocks, and a ragged last block
def test_fused_and_separate_batch_norm_agree_with_numpy(rows):
    x = RNG.normal(size=(rows, 96)).astype(np.float32) * 2 + 0.5
    want = channel_norm(x, 0, G, B)

    y, mean, rstd = jitted(channel_kernels.batch_norm)(x, G, B)
    six = jitted(channel_kernels.batch_norm_in_six)(x, G, B)

    np.testing.assert_allclose(y, want, atol=3e-5)
    np.testing.assert_allclose(six, want, atol=3e-5)
    np.testing.assert_allclose(mean, np.float64(x).mean(0), atol=1e-5)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(np.float64(x).var(0) + 1e-5), rtol=1e-4)


def test_gradient_of_the_fused_batch_norm_agrees_with_numpy():
    x, dy = (RNG.normal(size=(301, 96)).astype(np.float32) for _ in range(2))
    xhat = channel_norm(x, 0, 1, 0)
    rstd = 1 / np.sqrt(np.float64(x).var(0) + 1e-5)
    g = np.float64(dy)

    dx, dscale, dbias = jitted(channel_kernels.batch_norm_grad)(x, dy, np.float32(x.mean(0)), np.float32(rstd), G)

    np.testing.assert_allclose(dx, G * rstd * (g - g.mean(0) - xhat * (g * xhat).mean(0)), atol=3e-5)
    np.testing.assert_allclose(dscale, (g * xhat).sum(0), atol=1e-3)
    np.testing.assert_allclose(dbias, g.sum(0), atol=1e-3)


@pytest.mark.parametrize("shape", [(3, 8, 40), (2, 5, 700)])
@pytest.mark.parametrize("way", channels.WAYS)
def test_channel_split_and_two_scans_compute_the_same_norm(way, shape):
    x = RNG.normal(size=shape).astype(np.float32) + 1
    g, b = G[: shape[1]], B[: shape[1]]

    y = jax.jit(functools.partial(kernels.batch_norm, plan=channels.WAYS[way][0], machine="cpu"))(x, g, b)[0]

    np.testing.assert_allclose(y, channel_norm(x, (0, 2), g[:, None], b[:, None]), atol=3e-5)


def test_the_layer_of_kernels_is_normlibs_layer():
    x, dy = (RNG.normal(size=(6, 4, 4, 96)).astype(np.float32) for _ in range(2))

    def run(factory):
        layer = factory()
        variables = layer.init(jax.random.key(0), x)
        variables = jax.tree.map(lambda v: v + 0.5, variables)

        @jax.jit
        def both(variables, x):
            y, vjp, stats = jax.vjp(functools.partial(layer.apply, mutable=["batch_stats"]), variables, x, has_aux=True)
            gradients, dx = vjp(dy)
            return y, gradients["params"], dx, stats

        return both(variables, x)

    ours = run(functools.partial(resnet_step.KernelNorm, interpret=True))
    theirs = run(functools.partial(norm.BatchNorm, use_running_average=False, momentum=0.9))

    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        np.testing.assert_allclose(got, want, atol=2e-4)


def test_without_norms_the_step_has_no_statistics():
    model = DeepResNet(stage_sizes=(1,), block=Bottleneck, norm=NoNorm, width=8, classes=3, stem="cifar")

    params, stats, state, *_ = resnet_step.abstract_state(model, optax.sgd(0.1), batch=2, size=8)

    assert stats == {} and not [path for path, _ in jax.tree.leaves_with_path(params) if "norm" in str(path)]


def test_a_kernel_that_does_not_fit_is_an_error_and_not_a_note(monkeypatch):
    monkeypatch.setattr(channel_kernels, "UB", 1024 * 1024)
    monkeypatch.setattr(resnet_step, "resnet50", functools.partial(DeepResNet, stage_sizes=(1,), block=Bottleneck))

    with pytest.raises(resnet_step.CapacityError, match="needs .* unified buffer"):
        resnet_step.lay_out.__wrapped__("lean", batch=2)
