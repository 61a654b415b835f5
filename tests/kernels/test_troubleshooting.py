"""What half precision does to training with norms, on the simulated core: each trouble on a short run, and its cure."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normlib as nl
from normlib.linen import BatchNorm

ROWS, STEPS = 256, 12


class Classifier(nn.Module):
    """Raw pixels, a batch norm on them, one hidden layer."""

    @nn.compact
    def __call__(self, x):
        x = BatchNorm(use_running_average=False)(x)
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(10)(x)


@pytest.fixture(scope="module")
def digits():
    datasets = pytest.importorskip("sklearn.datasets")  # an extra
    x, y = datasets.load_digits(return_X_y=True)
    return np.float32(x) * 15.9375, y  # 0..255, as image files have them


def losses(digits, backend, **options):
    """Training losses of a short run from the same start."""
    x, y = digits
    net, optimizer = Classifier(), optax.sgd(0.2, momentum=0.9)
    variables = jax.jit(net.init)(jax.random.key(0), x[:ROWS])
    params, state = variables["params"], variables["batch_stats"]
    opt = optimizer.init(params)

    @jax.jit
    def step(params, state, opt, x, y):
        def loss(params):
            out, new = net.apply({"params": params, "batch_stats": state}, x, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(out, y).mean(), new["batch_stats"]

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = optimizer.update(grads, opt)
        return optax.apply_updates(params, updates), state, opt, value

    found = []
    order = np.random.default_rng(0)
    with nl.use_backend(backend, **options):
        for _ in range(STEPS):
            rows = order.permutation(len(x))[:ROWS]
            params, state, opt, value = step(params, state, opt, x[rows], y[rows])
            found.append(float(value))
    return found


def test_training_with_float32_accumulation_is_as_good_as_float32(digits):
    exact, half = losses(digits, "xla"), losses(digits, "npu", precision="fp16_fp32acc")

    np.testing.assert_allclose(half, exact, rtol=0.02)
    assert half[-1] < 0.3 * half[0]


def test_training_with_all_fp16_statistics_is_lost(digits):
    """Sums of squares of pixels pass 65504: the variance is infinite, and everything after it NaN."""
    found = losses(digits, "npu", precision="fp16_sequential")

    assert not np.isfinite(found).any()


def test_a_long_fp16_sum_swallows_its_summands():
    """Beyond 2048 the steps of fp16 are 2: ones are no longer counted, and a mean of ones is below 1."""
    x = jnp.ones((4, 8192), jnp.float16)

    def mean(precision):
        _, moments = nl.layer_norm(x, return_moments=True, backend=nl.passes.NpuPass(precision=precision))
        return np.asarray(moments.mean)

    np.testing.assert_array_equal(mean("fp16_fp32acc"), 1.0)
    assert (mean("fp16_sequential") <= 0.5).all()


def test_gradients_of_scale_and_bias_are_flushed_to_zero_in_fp16_unless_the_loss_is_scaled():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 64)), jnp.float32)
    dy = jnp.full((32, 64), 1e-8, jnp.float32)  # below half of 2**-24, fp16's smallest

    def gradients(dy, precision):
        with nl.use_backend("npu", precision=precision):
            backward = jax.jit(lambda dy, *p: jax.vjp(lambda *p: nl.layer_norm(x, *p), *p)[1](dy))
            return [np.asarray(t) for t in backward(dy, jnp.ones(64), jnp.zeros(64))]

    exact = np.float64(dy).sum(0)
    for found in gradients(dy, "fp16"):
        np.testing.assert_array_equal(found, 0)
    scaled = gradients(dy * 2.0**14, "fp16_fp32acc")[1] / 2.0**14
    np.testing.assert_allclose(scaled, exact, rtol=1e-2)
    np.testing.assert_allclose(gradients(dy, "fp32")[1], exact, rtol=1e-6)


@pytest.mark.parametrize(("eps", "survives"), [(1e-8, False), (1e-4, True)])
def test_an_epsilon_below_fp16s_smallest_is_none(eps, survives):
    """1e-8 is 0 in fp16, and a constant row divides by it; normlib.recommended_eps(float16) is 1e-4."""
    x = jnp.ones((2, 64), jnp.float16)

    with nl.use_backend("npu", precision="fp16"):
        y = np.asarray(nl.layer_norm(x, eps=eps), np.float32)

    assert np.isfinite(y).all() == survives
    assert nl.recommended_eps(jnp.float16) == 1e-4
    with nl.use_backend("npu", precision="fp16_fp32acc"):
        np.testing.assert_array_equal(nl.layer_norm(x, eps=1e-8), 0)


@pytest.mark.parametrize(
    ("size", "precision", "survives"),
    [(30, "fp16", False), (30, "fp16_fp32acc", True), (2000, "fp16_fp32acc", False), (2000, "bf16_fp32acc", True)],
)
def test_overflowing_squares_are_nan_and_what_helps_depends_on_what_overflows(size, precision, survives):
    """The sum of squares of 256 values of 30, or a single square of 2000; never a silent 0."""
    x = (np.random.default_rng(0).normal(size=(2, 256)) * size).astype(np.float16)
    y = np.asarray(jax.jit(nl.layer_norm, static_argnames="backend")(x, backend=nl.passes.NpuPass(precision=precision)))
    assert np.isfinite(y).all() if survives else np.isnan(y).all()
