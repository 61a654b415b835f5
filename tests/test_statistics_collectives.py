"""How many collectives a batch norm runs: one forward and one backward for the statistics, in every mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normlib.collectives import count_collectives
from tests.distributed import MANUAL_MODES, step

pytestmark = pytest.mark.fast

ROWS, SPACE, C = 16, 3, 5
PARAMETERS = [jax.ShapeDtypeStruct((C,), jnp.float32)] * 2


def counted(mode, **options):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, ROWS, SPACE, C)).astype(np.float32)
    scale, bias = rng.normal(size=(2, C)).astype(np.float32)
    lowered = step(mode, x, scale, bias, dy, lower=True, **options)
    manual = mode in MANUAL_MODES
    text = lowered.as_text() if manual else lowered.compile().as_text()
    return count_collectives(text, parameters=PARAMETERS)


SHIFT = (0.1,) * C


@pytest.mark.parametrize("mode", MANUAL_MODES)
@pytest.mark.parametrize(("method", "statistics", "conditional"), [
    ("gather", 2, 0), ("shifted", 2, 0), ("adaptive", 2, 2), ("two_phase", 3, 0),
])  # fmt: skip
def test_one_collective_forward_and_one_backward(mode, method, statistics, conditional):
    count = counted(mode, method=method, shift=None if method in ("gather", "two_phase") else SHIFT)
    # replicated parameters and check_vma=True: the sums of dx are dscale and dbias, pooled once for both
    parameters = 0 if mode in ("vma", "vma_out") else 2
    # the mean alone, in two_phase, has a parameter's shape, so only their sum tells
    assert count.statistics + count.gradients == statistics + parameters
    assert count.conditional == conditional
    if method != "two_phase":
        assert count.gradients == parameters


@pytest.mark.parametrize("mode", MANUAL_MODES)
def test_groups_cost_one_gather_forward_and_one_backward(mode):
    count = counted(mode, axis_index_groups=((0, 1), (2, 3)))
    assert (count.statistics, count.conditional) == (2, 0)


@pytest.mark.parametrize("mode", MANUAL_MODES)
def test_virtual_batches_inside_a_device_pool_running_statistics_only(mode):
    assert counted(mode, virtual_batch_size=2).statistics <= 1


@pytest.mark.parametrize("mode", MANUAL_MODES)
def test_a_mask_travels_in_the_same_collective(mode):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, ROWS, SPACE, C)).astype(np.float32)
    where = rng.random((ROWS, SPACE, 1)) < 0.5
    for method in ("gather", "adaptive"):
        lowered = step(mode, x, np.ones(C, "f"), np.ones(C, "f"), dy, where, lower=True, method=method, shift=SHIFT)
        assert count_collectives(lowered.as_text(), parameters=PARAMETERS).statistics == 2


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_a_globally_sharded_batch_costs_one_and_one_with_a_shift(mode):
    count = counted(mode, shift=SHIFT)
    # the backward's all-reduce serves dx and the parameters: the partitioner sees one pair of sums
    assert count.statistics + count.gradients == 2
    assert counted(mode).statistics + counted(mode).gradients == 3  # two phases forward
