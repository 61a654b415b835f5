"""Kernels of fused norms, forward and backward in one each: sums before, activations behind, groups of channels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl
import sim_npu
from normlib.passes.npu import NpuPass
from normlib.passes.pallas import PallasPass
from tests import reference
from tests.kernels.bare import Laid, lowered_for
from tests.reference import assert_rounded, assert_sum

MACHINES = {"cpu": PallasPass("cpu"), "gpu": PallasPass("gpu"), "npu": NpuPass()}
on_machines = pytest.mark.parametrize("backend", MACHINES.values(), ids=MACHINES)


def with_grads(norm, backend):
    """Outputs and gradients of `norm(*arrays)`, the outputs' cotangents being the arrays before them."""

    def run(cotangents, *arrays):
        out, pull = jax.vjp(lambda *t: norm(*t, backend=backend), *arrays)
        return out, pull(cotangents)

    return run


def draw(seed, shapes, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(s) + 0.5, dtype) for s in shapes]


def silu_pull(dy, z):
    gate = 1 / (1 + np.exp(-z))
    return dy * (gate + z * gate * (1 - gate))


def added(x1, x2, scale, bias, sum_bias, **options):
    out = nl.add_layer_norm(x1, x2, scale, bias, sum_bias=sum_bias, **options)
    return out.y, out.residual


@on_machines
@pytest.mark.parametrize(
    ("full", "dtype"),
    [
        ((37, 50), np.float32),
        ((6, 3000), jnp.bfloat16),
        pytest.param((37, 50), jnp.bfloat16, marks=pytest.mark.nightly),
        pytest.param((6, 3000), np.float32, marks=pytest.mark.nightly),
    ],
)
def test_a_sum_is_normalised_and_pulled_back_with_its_residual(backend, full, dtype):
    row = full[1:]
    x1, x2, dy, ds = draw(1, [full] * 4, dtype)
    scale, bias, third = draw(2, [row] * 3)

    (y, s), grads = jax.jit(with_grads(added, backend))((dy, ds), x1, x2, scale, bias, third)

    total = sum(np.asarray(t, np.float64) for t in (x1, x2, third))
    want = reference.norm(total, scale, bias, dy, axes=(1,), eps=1e-5)
    terms = want.dx + np.asarray(ds, np.float64)
    size = want.dx_size + abs(np.asarray(ds, np.float64))
    assert_rounded(y, want.y, want.y_size)
    assert_rounded(s, total, sum(abs(np.asarray(t, np.float64)) for t in (x1, x2, third)))
    for found in grads[:2]:
        assert_rounded(found, terms, size)
    for found, summands in zip(grads[2:], (want.dscale, want.dbias, terms)):
        assert_sum(found, summands, (1, *row))


@on_machines
def test_two_weights_give_two_gradients(backend):
    x, gx, dy = draw(3, [(21, 70)] * 3)
    scale, bias = draw(4, [(70,)] * 2)

    y, grads = jax.jit(with_grads(lambda *t, **k: nl.deep_norm(*t, alpha=0.81, **k), backend))(dy, x, gx, scale, bias)

    total = 0.81 * np.asarray(x, np.float64) + np.asarray(gx, np.float64)
    want = reference.norm(total, scale, bias, dy, axes=(1,), eps=1e-6)
    assert_rounded(y, want.y, want.y_size)
    assert_rounded(grads[0], 0.81 * want.dx, want.dx_size)
    assert_rounded(grads[1], want.dx, want.dx_size)
    assert_sum(grads[2], want.dscale, (1, 70))


@on_machines
@pytest.mark.parametrize(
    "shape", [(3, 12, 5, 7), (2, 12, 1100), pytest.param((5, 12), marks=pytest.mark.nightly), (3, 12, 1)], ids=str
)
def test_groups_of_channels_first_and_their_activation(backend, shape):
    x, dy = draw(5, [shape] * 2)
    scale, bias = draw(6, [(12,)] * 2)
    norm = lambda *t, **k: nl.group_norm_silu(*t, num_groups=3, axis=1, **k)  # noqa: E731

    y, (dx, dscale, dbias) = jax.jit(with_grads(norm, backend))(dy, x, scale, bias)

    sides = (1, 12, *(1,) * (len(shape) - 2))
    options = {"axes": tuple(range(2, len(shape))), "groups": 3, "channel": 1, "eps": 1e-5}
    scale, bias = np.reshape(scale, sides), np.reshape(bias, sides)
    z = reference.norm(x, scale, bias, **options)
    want = reference.norm(x, scale, bias, silu_pull(np.asarray(dy, np.float64), z.y), **options)
    assert_rounded(y, z.y / (1 + np.exp(-z.y)), 2 * z.y_size)
    assert_rounded(dx, want.dx, 4 * want.dx_size)
    for found, terms in ((dscale, want.dscale), (dbias, want.dbias)):
        assert_sum(np.reshape(found, sides), 1.0 * terms, sides)


@on_machines
def test_what_is_added_behind_a_norm_gets_its_cotangent_through_the_activation(backend):
    x, behind, dy = draw(7, [(9, 7, 4)] * 3)
    scale, bias = draw(8, [(4,)] * 2)
    norm = lambda x, r, s, b, **k: nl.batch_norm_act(x, s, b, residual=r, activation="silu", **k)[0]  # noqa: E731

    y, (dx, d_behind, dscale, dbias) = jax.jit(with_grads(norm, backend))(dy, x, behind, scale, bias)

    z = reference.norm(x, scale, bias, axes=(0, 1), eps=1e-5)
    whole = z.y + np.asarray(behind, np.float64)
    dz = silu_pull(np.asarray(dy, np.float64), whole)
    want = reference.norm(x, scale, bias, dz, axes=(0, 1), eps=1e-5)
    size = z.y_size + abs(np.asarray(behind, np.float64))
    assert_rounded(y, whole / (1 + np.exp(-whole)), 2 * size)
    assert_rounded(d_behind, dz, 4 * size)
    assert_rounded(dx, want.dx, 4 * want.dx_size)
    assert_sum(dscale, want.dscale, (1, 1, 4))


FUSED = {
    "add_layer_norm": (added, lambda n, d: [(n, d)] * 2 + [(d,)] * 3, 2),
    "group_norm_silu": (
        lambda *t, **k: nl.group_norm_silu(*t, num_groups=4, axis=1, **k), lambda n, d: [(n, 16, d), (16,), (16,)], 1,
    ),
    "group_norm_silu_last": (
        lambda *t, **k: nl.group_norm_silu(*t, num_groups=4, **k), lambda n, d: [(n, d, 16), (16,), (16,)], 1,
    ),
}  # fmt: skip


def kernels_of(name, lanes, dtype, rows=60):
    norm, shapes, outputs = FUSED[name]
    arrays = [jax.ShapeDtypeStruct(s, dtype) for s in shapes(rows, lanes)]
    cotangents = (arrays[0],) * outputs if outputs > 1 else arrays[0]
    return sim_npu.simulate(with_grads(norm, Laid()), cotangents, *arrays).kernels


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(
    "lanes, dtype", [(1, "float32"), (63, "bfloat16"), (2048, "float32"), (8192, "bfloat16"), (65537, "float32")]
)
def test_tiles_fit_the_unified_buffer(name, lanes, dtype):
    """`simulate` raises CapacityError otherwise."""
    assert all(k.ub.fits for k in kernels_of(name, lanes, dtype))


def test_a_residual_block_is_one_kernel_each_way():
    names = [k.name for k in kernels_of("add_layer_norm", 512, "bfloat16")]
    assert names == ["add_layer_norm", "add_layer_norm_grad", "grad_sums_merge"]


def test_a_group_norm_with_its_activation_is_one_kernel_each_way():
    names = [k.name for k in kernels_of("group_norm_silu", 64, "bfloat16")]
    assert names[:2] == ["group_norm_act", "group_norm_act_grad"]
    assert set(names[2:]) <= {"grad_sums_merge", "grad_sums_merge_merge"}


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", FUSED)
def test_they_lower_without_hardware(name, platform):
    norm, shapes, outputs = FUSED[name]
    arrays = [jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes(64, 300)]
    cotangents = (arrays[0],) * outputs if outputs > 1 else arrays[0]
    assert sim_npu.lower_check(
        with_grads(norm, lowered_for(platform)), cotangents, *arrays, platform=platform
    ).custom_calls


def test_an_activation_that_loses_nan_does_not_hide_one_on_a_gpu():
    """A ReLU in Triton is a maximum, which gives 0 for NaN: here one that does so in the interpreter too."""
    x = np.float32(np.random.default_rng(0).normal(size=(8, 32)))
    x[3, 5], x[6] = np.nan, x[6] * 1e30  # a variance that overflows
    run = PallasPass("gpu", interpret=True)
    rows = {"axes": (1,), "eps": 1e-5, "centered": True, "dtype": jnp.float32}

    def lossy(z):
        return jnp.where(z > 0, z, 0.0)

    whole = jax.jit(lambda x: run.forward([x], None, None, None, activation=lossy, **rows).y)(x)
    one = np.float32([[1.0]])
    apart = jax.jit(lambda x: run.apply_behind(x, 0 * one, 0 * one, one, None, None, None, None, activation=lossy,
                                               dtype=jnp.float32))(x)  # fmt: skip
    assert np.isnan(np.asarray(whole)[[3, 6]]).all() and np.isfinite(np.delete(whole, [3, 6], 0)).all()
    np.testing.assert_array_equal(apart, np.where(x <= 0, 0, x))
