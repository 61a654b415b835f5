"""The counter of collectives: programs whose collectives are known by construction, as StableHLO and as HLO."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from normlib.collectives import Collective, CollectiveCount, count_collectives, list_collectives

FEATURES, HIDDEN = 5, 3


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def lower(function, *arguments, in_specs, out_specs, check_vma=True):
    mapped = jax.shard_map(function, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return jax.jit(mapped).lower(*arguments)


SPLIT, SAME = PartitionSpec("data"), PartitionSpec()
ROWS = jax.ShapeDtypeStruct((16, FEATURES), jnp.float32)


class OneCollective(nn.Module):
    """Batch norm by sums of x and x² in one psum; its transpose is one psum too."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        if self.is_initializing():
            return x * scale
        sums = lax.psum(jnp.stack([x.sum(0), (x * x).sum(0)]), "data") / 16
        # Read once, as a varying value, so that the transpose is a single psum of [2, C].
        mean, square = lax.pcast(sums, "data", to="varying")
        return (x - mean) / jnp.sqrt(square - mean**2 + 1e-5) * scale


class TwoCollectives(nn.Module):
    """Batch norm by a psum for the mean and another about it."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        if self.is_initializing():
            return x * scale
        mean = lax.pcast(lax.psum(jnp.stack([x.sum(0)] * 2), "data") / 16, "data", to="varying")[0]
        variance = lax.pcast(lax.psum(jnp.stack([((x - mean) ** 2).sum(0)] * 2), "data") / 16, "data", to="varying")[0]
        return (x - mean) / jnp.sqrt(variance + 1e-5) * scale


def lower_step(layer):
    """Loss and gradients of dense, norm, dense on 8 devices; also its parameters."""
    model = nn.Sequential([nn.Dense(HIDDEN), layer, nn.Dense(1)])
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.ones((2, FEATURES)))["params"])

    def step(params, x):
        return jax.value_and_grad(lambda p: lax.pmean(jnp.mean(model.apply({"params": p}, x) ** 2), "data"))(params)

    return lower(step, params, ROWS, in_specs=(SAME, SPLIT), out_specs=SAME), params


@pytest.mark.parametrize("layer, expected", [(OneCollective, 2), (TwoCollectives, 4)])
def test_statistics_are_told_from_gradients_and_the_loss(layer, expected):
    lowered, params = lower_step(layer())

    count = count_collectives(lowered.as_text(), parameters=params)

    # five parameters: two kernels, two biases, one scale; one of the biases has a single element
    assert count == CollectiveCount(statistics=expected, conditional=0, gradients=4, scalars=2)


def test_two_collectives_are_two_in_compiled_code():
    """XLA may merge gradients with one another, but not two statistics of which one needs the other."""
    one, params = lower_step(OneCollective())
    two, _ = lower_step(TwoCollectives())

    counts = [count_collectives(step.compile().as_text(), parameters=params).statistics for step in (one, two)]

    assert counts[1] - counts[0] == 2


def branching(x):
    total = lax.psum(x.sum(0), "data")
    again = lax.cond(total[0] > 0, lambda x: lax.psum(x.sum(0) * 2, "data"), lambda x: total, x)
    return again + lax.fori_loop(0, 3, lambda _, carry: lax.psum(carry, "data") / 8, total)


@pytest.mark.parametrize("form", ["StableHLO", "HLO"])
def test_branches_and_loops_are_marked(form):
    lowered = lower(branching, ROWS, in_specs=SPLIT, out_specs=SAME, check_vma=False)
    text = lowered.as_text() if form == "StableHLO" else lowered.compile().as_text()

    found = list_collectives(text)

    shape = ((FEATURES,),)
    assert sorted(found) == [
        Collective("all_reduce", shape),
        Collective("all_reduce", shape, looped=True),
        Collective("all_reduce", shape, conditional=True),
    ]
    assert count_collectives(text) == CollectiveCount(statistics=2, conditional=1)


@pytest.mark.parametrize("form", ["StableHLO", "HLO"])
def test_a_function_called_twice_counts_twice(form):
    inner = jax.jit(lambda x: lax.psum(jnp.sin(x), "data"))

    def twice(x):
        return inner(inner(x))

    lowered = lower(twice, ROWS, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    text = lowered.as_text() if form == "StableHLO" else lowered.compile().as_text()

    assert list_collectives(text) == (Collective("all_reduce", ((2, FEATURES),)),) * 2


@pytest.mark.parametrize("form", ["StableHLO", "HLO"])
def test_gathers_are_listed_with_their_operands(form):
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def gather(x):
        table = lax.all_gather(x.sum(0), "data", axis_index_groups=groups)
        return lax.psum_scatter(table, "data", axis_index_groups=groups)

    lowered = lower(gather, ROWS, in_specs=SPLIT, out_specs=SPLIT)
    text = lowered.as_text() if form == "StableHLO" else lowered.compile().as_text()

    (gathered, scattered) = list_collectives(text)
    assert gathered.kind == "all_gather"
    assert gathered.shapes in (((1, FEATURES),), ((FEATURES,),))
    assert scattered == Collective("reduce_scatter", ((4, FEATURES),))


def test_a_globally_sharded_program_is_counted_once_compiled():
    """Under jit the compiler makes the collectives: a mean, a variance about it, and nothing in the lowered text."""

    def normalise(x):
        return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)

    lowered = jax.jit(normalise, in_shardings=NamedSharding(mesh(), SPLIT)).lower(ROWS)

    assert list_collectives(lowered.as_text()) == ()
    assert count_collectives(lowered.compile().as_text()).statistics == 2


def test_a_gradient_is_given_to_each_parameter_once():
    def sums(x):
        return lax.psum(x.sum(0), "data"), lax.psum((x * x).sum(0), "data")

    text = lower(sums, ROWS, in_specs=SPLIT, out_specs=SAME).as_text()

    assert count_collectives(text, parameters=[jnp.ones(FEATURES)]) == CollectiveCount(statistics=1, gradients=1)


@pytest.mark.parametrize("text", ["", "def f(): pass", "HloModule empty"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="`text`"):
        count_collectives(text)
