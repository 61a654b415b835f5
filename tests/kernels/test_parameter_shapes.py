"""A scale, a bias or a vector in the sum may vary along any axes: its gradient is right on every machine."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl
from normlib.passes import NpuPass, PallasPass

pytestmark = [pytest.mark.family]
MACHINES = {"cpu": PallasPass("cpu"), "gpu": PallasPass("gpu"), "npu": NpuPass()}
FULL = (3, 4, 10)
SHAPES = list(itertools.product(*((1, n) for n in FULL)))


def summed(t, shape):
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    return t.sum(axes, keepdims=True)


@pytest.mark.parametrize("machine", MACHINES)
def test_gradients_of_parameters_of_every_shape(machine):
    rng = np.random.default_rng(0)
    x, r, dy = (rng.normal(size=FULL).astype(np.float32) for _ in range(3))
    given = [[rng.normal(size=s).astype(np.float32) for _ in range(3)] for s in SHAPES]

    @jax.jit
    def gradients(x, r, dy, given):
        def of(scale, bias, added):
            norm = lambda *p: nl.add_layer_norm(x, r, p[0], p[1], sum_bias=p[2], backend=MACHINES[machine]).y  # noqa: E731
            return jax.vjp(norm, scale, bias, added)[1](dy)

        return [of(*p) for p in given]

    found = gradients(jnp.asarray(x), jnp.asarray(r), jnp.asarray(dy), given)
    for shape, (scale, _, added), got in zip(SHAPES, given, found):
        s = np.float64(x) + r + added
        mean, var = s.mean(-1, keepdims=True), s.var(-1, keepdims=True)
        rstd = 1 / np.sqrt(var + 1e-5)
        xhat, g = (s - mean) * rstd, np.float64(dy) * scale
        ds = (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True)) * rstd
        for part, want in zip(got, (dy * xhat, np.float64(dy), ds)):
            np.testing.assert_allclose(part, summed(want, shape), atol=2e-5, err_msg=str(shape))
