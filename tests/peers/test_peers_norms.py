"""Forward, backward and running statistics of every norm against PyTorch's modules, in float32 and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl
from tests.peers.against import assert_close, torch_or_skip

torch = torch_or_skip()


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def modules(dtype):
    """name -> (PyTorch module, x's shape, normlib function of (x, scale, bias))."""
    kind = {"dtype": getattr(torch, dtype)}
    nn = torch.nn
    return {
        "batch": (nn.BatchNorm1d(5, **kind), (12, 5), lambda *a: nl.batch_norm(*a).y),
        "batch_2d": (nn.BatchNorm2d(5, **kind), (4, 5, 3, 2), lambda *a: nl.batch_norm(*a, axis=1).y),
        "batch_3d": (nn.BatchNorm3d(5, **kind), (3, 5, 2, 3, 2), lambda *a: nl.batch_norm(*a, axis=1).y),
        "layer": (nn.LayerNorm(33, **kind), (4, 33), nl.layer_norm),
        "layer_two_axes": (nn.LayerNorm((5, 7), **kind), (4, 5, 7), lambda *a: nl.layer_norm(*a, axis=(1, 2))),
        "rms": (nn.RMSNorm(33, eps=1e-6, **kind), (4, 33), nl.rms_norm),
        "group": (nn.GroupNorm(4, 12, **kind), (3, 12, 5), lambda *a: nl.group_norm(*a, num_groups=4, axis=1)),
        "instance": (
            nn.InstanceNorm2d(5, affine=True, **kind), (3, 5, 4, 3), lambda *a: nl.instance_norm(*a, axis=1),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("mean", [0.0, 10.0])
@pytest.mark.parametrize("name", list(modules("float32")))
def test_forward_and_backward(name, dtype, mean):
    module, shape, function = modules(dtype)[name]
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=shape) + mean).astype(dtype), rng.normal(size=shape).astype(dtype)
    parameters = [rng.normal(size=p.shape).astype(dtype) for p in module.parameters()]
    with torch.no_grad():
        for old, new in zip(module.parameters(), parameters):
            old.copy_(torch.from_numpy(new))
    t = torch.from_numpy(x).requires_grad_()
    expected = module(t)
    expected.backward(torch.from_numpy(dy))

    def both(x, dy, *parameters):
        y, vjp = jax.vjp(function, x, *parameters)
        return y, vjp(dy)

    y, (dx, *grads) = jax.jit(both)(x, dy, *parameters)
    assert y.dtype == dx.dtype == dtype
    assert_close(y, expected.detach().numpy(), dtype, ulps=8 * (1 + mean))
    assert_close(dx, t.grad.numpy(), dtype, ulps=8 * (1 + mean))
    for mine, theirs in zip(grads, module.parameters()):
        assert_close(mine, theirs.grad.numpy(), dtype, ulps=8 * (1 + mean))


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
@pytest.mark.parametrize("rows", [(4, 6, 5), (2, 2)])
def test_running_statistics_in_pytorchs_convention(momentum, rows, dtype):  # CASES: J30, J34, B6
    """momentum_torch = 1 - momentum, the unbiased variance is stored; None is the cumulative average."""
    rng = np.random.default_rng(1)
    module = torch.nn.BatchNorm1d(3, momentum=momentum, dtype=getattr(torch, dtype))
    mean, var = jnp.zeros(3, dtype), jnp.ones(3, dtype)
    for t, n in enumerate(rows, 1):
        x = (rng.normal(size=(n, 3)) + 2).astype(dtype)
        module(torch.from_numpy(x))
        weight = nl.running_weight(t) if momentum is None else momentum
        mean, var = nl.update_running(mean, var, nl.batch_moments(x), weight=weight, unbiased=True)
    # 1/3 is a float32 in the cumulative average, here as in PyTorch's momentum of Python's double
    kind = "float32" if momentum is None else dtype
    assert_close(mean, module.running_mean.numpy(), kind, ulps=8)
    assert_close(var, module.running_var.numpy(), kind, ulps=8)


def test_flaxs_convention_differs_by_the_divisor_alone():  # CASES: J30
    x = np.random.default_rng(2).normal(size=(5, 3)).astype(np.float32)
    module = torch.nn.BatchNorm1d(3, momentum=1.0)
    module(torch.from_numpy(x))
    _, biased = nl.update_running(jnp.zeros(3), jnp.ones(3), nl.batch_moments(x), momentum=0.0)
    assert_close(biased * 5 / 4, module.running_var.numpy(), np.float32, ulps=8)
