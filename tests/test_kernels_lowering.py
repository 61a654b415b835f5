"""Every kernel lowers for TPU and for GPU (Triton), on a machine that has neither."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normlib as nl
from benchmarks.cases import cases
from normlib.kernels.machine import MACHINES
from sim_npu.lowering import LoweringFailed, lower_check

CASES = list(cases())
PLATFORMS = {"tpu": ("tpu", "tpu_custom_call"), "gpu": ("cuda", "__gpu$xla.gpu.triton")}
SAMPLE = CASES[::19]  # 19 is prime to every period of the table


def check_lowers(case, machine):
    platform, call = PLATFORMS[machine]
    found = lower_check(functools.partial(case.call, MACHINES[machine]), *case.structs(), platform=platform)
    assert call in found.custom_calls


@pytest.mark.family
@pytest.mark.parametrize("machine", PLATFORMS)
@pytest.mark.parametrize("case", SAMPLE, ids=lambda c: c.name)
def test_a_sample_of_kernels_lowers(case, machine):
    check_lowers(case, machine)


@pytest.mark.nightly
@pytest.mark.parametrize("machine", PLATFORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_kernel_lowers(case, machine):
    check_lowers(case, machine)


@pytest.mark.family
@pytest.mark.parametrize("machine", ["cpu", "gpu"])
@pytest.mark.parametrize("case", CASES[5::61], ids=lambda c: c.name)
def test_a_sample_of_kernels_is_right_when_interpreted(case, machine):
    arrays = case.arrays()
    found = jax.jit(functools.partial(case.call, MACHINES[machine].replace(interpret=True)))(*arrays)
    assert case.error(arrays, found) <= 1


@pytest.mark.nightly
@pytest.mark.parametrize("machine", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_kernel_is_right_when_interpreted(case, machine):
    arrays = case.arrays()
    found = jax.jit(functools.partial(case.call, MACHINES[machine].replace(interpret=True)))(*arrays)
    assert case.error(arrays, found) <= 1


def test_the_bound_of_a_case_refuses_a_wrong_result():
    case = next(c for c in CASES if c.name == "rms_norm/resident/f32")
    arrays = case.arrays()
    right = [t.astype(np.float32) for t in case.expected(*(a.astype(np.float64) for a in arrays))]
    assert case.error(arrays, right) <= 1
    assert case.error(arrays, [right[0] * 1.00001, right[1]]) > 1
    assert case.error(arrays, [np.where(right[0] > 1, np.nan, right[0]), right[1]]) == np.inf


def norms():
    x, scale = jax.ShapeDtypeStruct((16, 24, 256), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.float32)
    layer = lambda x, scale: jax.vjp(nl.layer_norm, x, scale)[1](x)  # noqa: E731
    batch = lambda x, scale: jax.vjp(lambda *a: nl.batch_norm(*a).y, x, scale)[1](x)  # noqa: E731
    return x, scale, {"layer_norm": layer, "batch_norm": batch}


@pytest.mark.family
@pytest.mark.parametrize("machine", PLATFORMS)
@pytest.mark.parametrize("name", ["layer_norm", "batch_norm"])
@pytest.mark.parametrize("transform", ["plain", "vmap"])
def test_operators_and_their_gradients_lower(name, transform, machine):
    x, scale, calls = norms()
    call = calls[name] if transform == "plain" else jax.vmap(calls[name], (0, None))
    with nl.use_backend("pallas", platform=machine, interpret=False):
        found = lower_check(call, x, scale, platform=PLATFORMS[machine][0])
    assert PLATFORMS[machine][1] in found.custom_calls


@pytest.mark.family
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["layer_norm", "batch_norm"])
def test_operators_lower_for_tpu_inside_shard_map(name, check_vma):
    x, scale, calls = norms()
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def local(x, scale):
        dx, dscale = calls[name](x, scale)
        return dx, dscale if check_vma else jax.lax.psum(dscale, "d")

    call = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P()), out_specs=(P("d"), P()), check_vma=check_vma)
    with nl.use_backend("pallas", platform="tpu", interpret=False):
        found = jax.jit(call).trace(x, scale).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in found


def test_what_does_not_lower_is_refused():
    """A tile of 3 rows is no multiple of the TPU's 8."""
    case = next(c for c in CASES if c.name == "layer_norm/resident/f32")
    with pytest.raises((LoweringFailed, ValueError)):
        bad = MACHINES["tpu"].replace(row_multiple=3, lane_multiple=3, tile_bytes=1000)
        lower_check(functools.partial(case.call, bad), *case.structs(), platform="tpu")
