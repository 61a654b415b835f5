"""Random shapes, axes, parameters and masks: the tile passes against the XLA pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normlib.engine import normalize
from tests.passes import on


@st.composite
def problems(draw):
    """Shape, axes, dtype, shapes of scale, bias and mask (or None), seed, pass."""
    rank = draw(st.integers(1, 4))
    sizes = st.sampled_from([1, 2, 3, 5, 8, 17])
    shape = tuple(draw(sizes) for _ in range(rank))
    axes = tuple(sorted(draw(st.sets(st.integers(0, rank - 1), min_size=1, max_size=rank))))
    part = st.tuples(*(st.sampled_from([1, n]) for n in shape))
    scale, bias, where = (draw(st.none() | part) for _ in range(3))
    return (
        shape, axes, draw(st.sampled_from(["float32", "bfloat16", "float16"])), scale, bias, where,
        draw(st.booleans()), draw(st.integers(0, 2**16)), draw(st.sampled_from(["cpu", "gpu", "tpu", "npu"])),
    )  # fmt: skip


def check_agrees(problem):
    shape, axes, dtype, scale, bias, where, centered, seed, to = problem
    rng = np.random.default_rng(seed)
    draw = lambda s: None if s is None else jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
    x, dy = draw(shape).astype(dtype), draw(shape).astype(dtype)
    parameters = draw(scale), draw(bias)
    mask = None if where is None else jnp.asarray(rng.random(where) < 0.7)
    # eps keeps constant rows (1 entry, or all equal) from being a quotient of roundings
    options = {"axes": axes, "eps": 1e-2, "centered": centered, "where": mask}

    def run(x, parameters, dy):
        y, vjp = jax.vjp(lambda x, p: normalize(x, *p, **options).y, x, parameters)
        return y, vjp(dy)

    want = jax.jit(run)(x, parameters, dy)
    with on(to):
        found = jax.jit(run)(x, parameters, dy)
    for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert f.dtype == w.dtype and f.shape == w.shape
        f, w = np.asarray(f, np.float64), np.asarray(w, np.float64)
        ulp = {"float32": 2e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
        np.testing.assert_allclose(f, w, rtol=ulp, atol=ulp * max(1.0, abs(w).max(initial=0)))


@given(problems())
@settings(max_examples=12, derandomize=True, deadline=None)
def test_random_problems_agree(problem):
    check_agrees(problem)


@pytest.mark.nightly
@given(problems())
@settings(max_examples=400, derandomize=True, deadline=None)
def test_many_random_problems_agree(problem):
    check_agrees(problem)
