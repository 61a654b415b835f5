"""Every operator of several arrays against its formula in float64: dtypes, rules, transformations and memory."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.composite import check_rounded_once
from tests.composites import BY_NAME, COMPOSITES

pytestmark = pytest.mark.family

NAMES = [op.name for op in COMPOSITES]
OWN_RULE = [op.name for op in COMPOSITES if op.own_rule]
OTHER_RULES = [
    (op.name, rule)
    for i, op in enumerate(COMPOSITES)
    for j, rule in enumerate(op.rules[1:])
    if op.own_rule or i % 2 == j  # the engine's own tests cover its rules: one of them per operator
]
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def cotangents(op, arrays, **options):
    """Random cotangents of the compared outputs."""
    shapes = jax.eval_shape(functools.partial(op.run, **options), arrays)
    rng = np.random.default_rng(len(op.name))
    return tuple(jnp.asarray(rng.normal(size=s.shape), jnp.float32).astype(s.dtype) for s in shapes)


def value_and_grads(op, arrays, cts, **options):
    """(outputs, gradients by name), compiled."""

    @jax.jit
    def run(arrays, cts):
        y, vjp = jax.vjp(functools.partial(op.run, **options), arrays)
        return y, vjp(cts)[0]

    return run(arrays, cts)


def check(op, arrays, cts, found, *, slack=1.0):
    """Compare outputs and gradients: each rounded once from an accurate float32 value."""
    outputs, grads = found
    (values, sizes), want = op.expected(arrays, cts)
    slack = slack * op.slack
    for i, (y, ref, size) in enumerate(zip(outputs, values, sizes)):
        check_rounded_once(y, ref, size, np.asarray(y).dtype, slack=slack, what=f"output {i}")
    for name, g in grads.items():
        assert g.shape == arrays[name].shape and g.dtype == arrays[name].dtype
        size = abs(want[name])
        if not size.size:
            continue
        if name in op.data:
            # size of a row's gradient: of the pieces that cancel in it, none is larger by much
            axes = tuple(a for a in op.reduce if -size.ndim <= a < size.ndim)
            size = size.max(axes, keepdims=True)
        else:
            size = size.max() * np.sqrt(np.prod(cts[0].shape) / max(g.size, 1))
        check_rounded_once(g, want[name], size, np.asarray(g).dtype, slack=2 * slack, what=f"d({name})")


@pytest.mark.parametrize(("name", "dtype"), [(op.name, d) for op in COMPOSITES for d in op.dtypes])
def test_outputs_and_gradients_are_rounded_once(name, dtype):  # CASES: C5, D5, J56
    op = BY_NAME[name]
    arrays = op.inputs(DTYPES[dtype])
    cts = cotangents(op, arrays)
    check(op, arrays, cts, value_and_grads(op, arrays, cts))


@pytest.mark.parametrize(("name", "rule"), OTHER_RULES)
def test_the_other_rules_agree(name, rule):
    op = BY_NAME[name]
    arrays = op.inputs()
    cts = cotangents(op, arrays)
    check(op, arrays, cts, value_and_grads(op, arrays, cts, rule=rule), slack=2)


@pytest.mark.parametrize("name", OWN_RULE)
def test_vmap_equals_a_loop(name):
    op = BY_NAME[name]
    many = [op.inputs(seed=i) for i in range(2)]
    cts = cotangents(op, many[0])
    stacked = jax.tree.map(lambda *t: jnp.stack(t), *many)

    def grads(arrays):
        y, vjp = jax.vjp(op.run, arrays)
        return y, vjp(cts)[0]

    together = jax.jit(jax.vmap(grads))(stacked)
    for i, arrays in enumerate(many):
        check(op, arrays, cts, jax.tree.map(lambda t: t[i], together))


@pytest.mark.parametrize("name", [op.name for op in COMPOSITES if op.large])
def test_the_backward_keeps_little_and_needs_no_large_temporaries(name):
    op = BY_NAME[name]
    arrays = op.inputs(jnp.bfloat16, shapes=op.large)
    data = [arrays[n].nbytes for n in op.data]
    _, vjp = jax.vjp(op.run, arrays)
    kept = sum(t.nbytes for t in jax.tree.leaves(vjp) if hasattr(t, "nbytes"))
    assert kept <= op.keeps * sum(data)

    def step(arrays, cts):
        y, vjp = jax.vjp(op.run, arrays)
        return y, vjp(cts)

    memory = jax.jit(step).lower(arrays, cotangents(op, arrays)).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= op.temporaries * max(data)


# the dearest to compile, whose parts others have: their rule is that of the cheaper ones
DEAR = {"switchable_norm", "group_norm_silu", "packed_layer_norm", "add_layer_norm_round_first"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly if n in DEAR else ()) for n in OWN_RULE])
def test_gradient_of_gradient_matches_float64(name):
    op = BY_NAME[name]
    arrays = op.inputs()
    weights = [np.random.default_rng(i).normal(size=c.shape) for i, c in enumerate(cotangents(op, arrays))]

    def penalty(run, arrays):
        value = lambda a: sum((jnp.tanh(y) * w).sum() for y, w in zip(run(a), weights))  # noqa: E731
        return sum((g**2).sum() for g in jax.tree.leaves(jax.grad(value)(arrays)))

    found = jax.jit(jax.grad(functools.partial(penalty, op.run)))(arrays)
    with jax.enable_x64(True):
        plain = lambda a: op.formula(SimpleNamespace(np=jnp, dtype=np.dtype(np.float32), **a))[0]  # noqa: E731
        wide = {n: jnp.asarray(np.asarray(t), jnp.float64) for n, t in arrays.items()}
        want = jax.jit(jax.grad(functools.partial(penalty, plain)))(wide)
    for n in arrays:
        np.testing.assert_allclose(found[n], want[n], atol=2e-5 * float(abs(want[n]).max()) + 1e-30, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_computed_in_float64(name):
    op = BY_NAME[name]
    with jax.enable_x64(True):
        arrays = {n: jnp.asarray(np.asarray(t), jnp.float64) for n, t in op.inputs().items()}
        outputs = jax.jit(op.run)(arrays)
    (values, _), _ = op.expected(arrays)
    for y, ref in zip(outputs, values):
        assert y.dtype == np.float64
        np.testing.assert_allclose(y, ref, atol=1e-12, rtol=1e-12)


def test_the_bound_itself_refuses_a_second_rounding():
    op = BY_NAME["group_norm_silu"]
    arrays = op.inputs(jnp.bfloat16)
    (values, sizes), _ = op.expected(arrays)
    z = reference.norm(
        arrays["x"], *(np.asarray(arrays[n]) for n in ("scale", "bias")), axes=(1,), groups=4, channel=2, eps=1e-5
    ).y.astype(jnp.bfloat16)
    twice = jax.nn.silu(jnp.asarray(z))
    with pytest.raises(AssertionError, match="times the bound"):
        check_rounded_once(twice, values[0], sizes[0], jnp.bfloat16)
