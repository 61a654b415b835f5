"""The kernels in Pallas' TPU interpreter: no read out of bounds, of memory nobody wrote, and no race between cores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.cases import cases
from normlib.kernels.machine import MACHINES

CHECKED = [c for c in cases() if all(d != jnp.float16 for _, d in c.shapes)]
SAFE = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", num_cores_or_threads=2
)


@pytest.fixture
def no_race(capfd):
    """A race raises on JAX 0.12; on 0.10 it is printed."""
    yield
    jax.effects_barrier()
    out, err = capfd.readouterr()
    assert "RACE" not in out + err


def check_interpreted(case):
    machine = MACHINES["tpu"].replace(interpret=SAFE)
    arrays = case.arrays()
    found = jax.block_until_ready(jax.jit(functools.partial(case.call, machine))(*arrays))
    assert case.error(arrays, found) <= 1


@pytest.mark.parametrize("case", CHECKED[3::97], ids=lambda c: c.name)
def test_a_sample_of_kernels_is_safe(case, no_race):
    check_interpreted(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", CHECKED[::2], ids=lambda c: c.name)
def test_every_other_case_is_safe(case, no_race):
    check_interpreted(case)


def test_the_interpreter_sees_a_race(capfd):
    """Two cores that add into one tile: what the check is for."""

    def kernel(x, y):
        y[...] += x[...]

    call = pl.pallas_call(
        kernel, grid=(4,), in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))], name="race",
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)), out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)), interpret=SAFE,
    )  # fmt: skip
    try:
        jax.block_until_ready(jax.jit(call)(np.ones((32, 128), np.float32)))
        seen = "RACE" in "".join(capfd.readouterr())
    except jax.errors.JaxRuntimeError as error:  # JAX 0.12
        seen = "race" in str(error).lower()
    assert seen
