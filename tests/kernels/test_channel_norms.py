"""Batch and group norm of whole channels in one kernel: each tiling is the same norm, fits, and is taken if it pays."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl
import sim_npu
from normlib import kernels
from normlib.kernels.channel_cost import bytes_of
from normlib.kernels.channel_sets import sets_of
from normlib.kernels.channel_tiling import channel_tilings
from normlib.kernels.machine import MACHINES
from normlib.passes import tuner
from sim_npu import TilePlan

EPS = 1e-5
PLANS = {
    "kept at once": TilePlan(residency="row"),
    "kept, some rows at a time": TilePlan(rows=16, chunk=16, residency="row"),
    "streamed": TilePlan(rows=16, chunk=32, residency="stream"),
    "in parts": TilePlan(rows=32, chunk=16),
    "default": None,
}
FIRST = {"kept": TilePlan(rows=2, chunk=16, residency="row"), "streamed": TilePlan(rows=3, residency="stream")}
# name of the kernel, shape, number of groups, plan
CASES = {
    **{f"rows, {k}": ("batch_norm", (150, 40), None, p) for k, p in PLANS.items()},
    **{f"groups, {k}": ("group_norm", (2, 70, 60), 6, p) for k, p in PLANS.items()},
    **{f"spread, {k}": ("batch_norm", (5, 21, 49), None, p) for k, p in FIRST.items()},
    "instances": ("group_norm", (3, 37, 24), 24, TilePlan(residency="row")),
    "one group": ("group_norm", (3, 37, 24), 1, TilePlan(residency="row")),
    "one channel": ("batch_norm", (37, 1), None, TilePlan(residency="stream")),
}


def on_machines(*machines):
    """Every case on one machine, in turn; the product is for the night."""
    return pytest.mark.parametrize(("name", "shape", "groups", "plan", "machine"), [
        pytest.param(*case, machine, id=f"{k}-{machine}", marks=[] if i % len(machines) == j else [pytest.mark.nightly])
        for i, (k, case) in enumerate(CASES.items()) for j, machine in enumerate(machines)
    ])  # fmt: skip


def moments(x, groups):
    """Mean and variance of the sets of x (float64), in every channel, and the axes they are over."""
    if groups is None:
        axes = (0,) if x.ndim == 2 else (0, 2)
        return x.mean(axes, keepdims=True), x.var(axes, keepdims=True), axes
    split = x.reshape(*x.shape[:2], groups, -1)
    width = split.shape[3]
    found = (np.repeat(t(split, axis=(1, 3))[:, None], width, -1) for t in (np.mean, np.var))
    return *found, (1,)


def per_channel(t, x, groups):
    return t.reshape([-1 if i == (1 if groups is None else 2) else 1 for i in range(x.ndim)])


def options(groups):
    return {} if groups is None else {"num_groups": groups}


@on_machines("cpu", "tpu", "gpu")
def test_every_tiling_is_the_same_norm(name, shape, groups, plan, machine):
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=shape) + 100)
    scale, bias = (np.float32(rng.normal(size=shape[1 if groups is None else 2])) for _ in range(2))
    here = MACHINES[machine].replace(interpret=True)
    call = jax.jit(lambda *t: getattr(kernels, name)(*t, plan=plan, machine=here, **options(groups)))

    y, mean, m2, rstd = call(x, scale, bias)

    want_mean, want_var, _ = moments(np.float64(x), groups)
    want_rstd = 1 / np.sqrt(want_var + EPS)
    want = (x - want_mean) * want_rstd * per_channel(scale, x, groups) + per_channel(bias, x, groups)
    np.testing.assert_allclose(y, want, atol=4e-6)
    n = x.size // want_var.size if groups is None else x[0].size // groups
    for found, wanted in ((mean, want_mean), (m2, want_var * n), (rstd, want_rstd)):
        np.testing.assert_allclose(found, wanted.reshape(found.shape), rtol=2e-6)


@on_machines("gpu", "cpu")
def test_every_tiling_is_the_same_backward(name, shape, groups, plan, machine):
    rng = np.random.default_rng(0)
    x, dy = (np.float32(rng.normal(size=shape) + m) for m in (3, 0))
    scale = np.float32(rng.normal(size=shape[1 if groups is None else 2]))
    mean, var, axes = moments(np.float64(x), groups)
    rstd = 1 / np.sqrt(var + EPS)
    kept = [n for i, n in enumerate(shape) if i not in axes]
    statistics = (np.float32(np.broadcast_to(t, mean.shape).reshape(kept)) for t in (mean, rstd))
    here = MACHINES[machine].replace(interpret=True)
    call = jax.jit(lambda *t: getattr(kernels, f"{name}_grad")(*t, plan=plan, machine=here, **options(groups)))

    dx, dscale, dbias = call(x, dy, *statistics, scale)

    xhat = (np.float64(x) - mean) * rstd
    g = dy * per_channel(scale, x, groups)
    through = moments(g, groups)[0] + xhat * moments(g * xhat, groups)[0]
    np.testing.assert_allclose(dx, (g - through) * rstd, atol=6e-6)
    for found, terms in ((dscale, dy * xhat), (dbias, np.float64(dy))):
        np.testing.assert_allclose(found, terms.sum(axes), atol=2e-5)


@pytest.mark.parametrize("plan", [TilePlan(residency="row"), TilePlan(rows=50, residency="stream"), None])
def test_a_mean_far_above_the_spread_is_kept_to_two_words(plan):
    """mean / sigma = 1e4: statistics are about the rows' own mean and merged, never of squares."""
    x = np.float32(np.random.default_rng(1).normal(size=(400, 8)) + 1e4)
    y, mean, m2, _ = jax.jit(lambda x: kernels.batch_norm(x, plan=plan, machine="cpu"))(x)
    wide = np.float64(x)
    np.testing.assert_allclose(m2, wide.var(0) * 400, rtol=2e-6)
    np.testing.assert_allclose(mean, wide.mean(0), rtol=1e-7)
    np.testing.assert_allclose(y, (wide - wide.mean(0)) / np.sqrt(wide.var(0) + EPS), atol=3e-6)


SHAPES = [
    (0, (7, 1)), (0, (100, 3)), (0, (4099, 17)), (0, (98, 2048)), (0, (25_088, 64)), (0, (1568, 5000)),
    ((0, 2), (2, 2048, 49)), ((0, 2), (32, 2048, 49)), ((0, 2), (3, 5, 4095)), ((0, 2), (64, 7, 1)),
    (1, (2, 4096, 320)), (1, (8, 64, 1280)), (1, (1, 1023, 96)), (1, (2, 5, 33)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("axes", "shape"), SHAPES)
def test_every_tiling_that_is_offered_fits_the_buffer(axes, shape, dtype):
    """Forward and backward; `simulate` raises CapacityError otherwise."""
    name = "group_norm" if axes == 1 else "batch_norm"
    fixed = {"num_groups": max(g for g in (1, 3, 32) if shape[2] % g == 0)} if axes == 1 else {}
    offered = 0
    for fn in (getattr(kernels, name), getattr(kernels, f"{name}_grad")):
        arrays = fn.example_arrays(shape, jnp.dtype(dtype))
        sets = sets_of(shape, (axes,) if isinstance(axes, int) else axes)
        full = [t for t in arrays[1:] if t.shape == shape]
        tile = channel_tilings(sets, MACHINES["npu"], bytes_of(sets, arrays[0], full, [arrays[0].dtype], 16))
        plans = [(None, None)] + [(t.chunk, "stream" if t.streamed else "row") for t in (tile, *tile.others)]
        for chunk, residency in dict.fromkeys(plans):
            plan = TilePlan(chunk=chunk, residency=residency)
            try:
                report = sim_npu.simulate(fn, *arrays, plan=plan, explain_capacity=False, **fixed)
            except ValueError as none:  # what fits beside other operands, or one group, may not fit here
                assert "no whole channel" in str(none)
                continue
            assert all(k.ub.fits for k in report.kernels)
            offered += 1
    assert offered


# [rows, C], [N, C, space] or [N, space, C] of ResNet-50's and a UNet's norms, and what is fastest by far
FASTER = [
    ("batch_norm", (98, 2048)), ("batch_norm", (392, 1024)), ("batch_norm", (2, 2048, 49)),
    ("batch_norm", (32, 2048, 49)), ("batch_norm", (2, 256, 3136)), ("group_norm", (2, 64, 1280)),
    ("group_norm", (8, 256, 1280)),
]  # fmt: skip
IN_PARTS = [("batch_norm", (401_408, 64)), ("batch_norm", (25_088, 512)), ("group_norm", (2, 4096, 320))]


def launches(fn, arrays, plan=None):
    report = sim_npu.simulate(fn, *arrays, plan=plan)
    return [k.name for k in report.kernels], report.total_us


@pytest.mark.parametrize(("name", "shape"), FASTER)
def test_few_rows_and_many_channels_are_one_launch_and_faster(name, shape):
    for fn in (getattr(kernels, name), getattr(kernels, f"{name}_grad")):
        arrays = fn.example_arrays(shape, jnp.dtype("bfloat16"))
        names, us = launches(fn, arrays)
        parts, slower = launches(fn, arrays, TilePlan(chunk=512))
        assert len(names) == 1 < len(parts)
        assert us < slower


@pytest.mark.parametrize(("name", "shape"), IN_PARTS)
def test_many_rows_and_few_channels_are_taken_in_parts(name, shape):
    fn = getattr(kernels, name)
    arrays = fn.example_arrays(shape, jnp.dtype("bfloat16"))
    names, us = launches(fn, arrays)
    whole, slower = launches(fn, arrays, TilePlan(residency="stream"))
    assert len(whole) == 1 < len(names)
    assert us < slower


def test_a_tuned_norm_takes_the_faster_way_and_remembers_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tuner, "_table", {})
    few, many = (jax.ShapeDtypeStruct(s, jnp.float16) for s in ((98, 2048), (4096, 64)))

    for x in (few, many):
        with nl.use_backend("npu", tune=True):
            jax.eval_shape(lambda x: nl.batch_norm(x).y, x)
    ways = {k.split()[-1]: t.in_parts for k, t in tuner.tuned().items() if "channel_norm_over" in k}
    assert ways == {"float16[98,2048]": False, "float16[4096,64]": True}
    tuner.save(tmp_path / "table.json")
    saved = tuner.tuned()
    monkeypatch.setattr(tuner, "_table", {})
    tuner.load(tmp_path / "table.json")
    assert {k: t.in_parts for k, t in tuner.tuned().items()} == {k: t.in_parts for k, t in saved.items()}
    bad = {"k": {"rows": 1, "chunk": 1, "streamed": True, "in_parts": 1}}
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    with pytest.raises(ValueError, match="in_parts"):
        tuner.load(tmp_path / "bad.json")


def test_a_loaded_choice_that_does_not_fit_is_made_anew(tmp_path, monkeypatch):
    """Of an older version, say, or edited by hand."""
    monkeypatch.setattr(tuner, "_table", {})
    keys = ("910b2 channel_norm_over_0 float32[1024,64]", "910b2 rms_norm float32[1,96,512]")
    huge = {"rows": 1 << 20, "chunk": 1 << 20, "streamed": False}
    (tmp_path / "huge.json").write_text(json.dumps(dict.fromkeys(keys, huge)))
    tuner.load(tmp_path / "huge.json")
    columns, rows = (np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((1024, 64), (96, 512)))
    with nl.use_backend("npu", tune=True):
        y, z = jax.jit(lambda x: nl.batch_norm(x).y)(columns), jax.jit(nl.rms_norm)(rows)
    np.testing.assert_allclose(y, (columns - columns.mean(0)) / np.sqrt(columns.var(0) + EPS), atol=4e-6)
    np.testing.assert_allclose(z, rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-6), atol=4e-6)
    assert set(tuner.tuned()) == set(keys) and all(t.rows <= 1024 for t in tuner.tuned().values())


def test_choices_for_results_of_different_dtypes_are_kept_apart(monkeypatch):
    """What fits beside bfloat16 results may not fit beside float32 ones."""
    monkeypatch.setattr(tuner, "_table", {})
    x, rows = jax.ShapeDtypeStruct((120, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((96, 512), jnp.bfloat16)
    with nl.use_backend("npu", tune=True):
        for dtype in (None, "float32", None):
            jax.eval_shape(lambda x: nl.batch_norm(x, out_dtype=dtype).y, x)  # noqa: B023
            jax.eval_shape(lambda x: nl.rms_norm(x, out_dtype=dtype), rows)  # noqa: B023
    names = [k.split()[1] for k in tuner.tuned()]
    assert names == [
        "channel_norm_over_0", "rms_norm", "channel_norm_to_float32_over_0", "rms_norm_to_float32",
    ]  # fmt: skip


# How many kernels a norm launches


def names_of(call, *arrays):
    with nl.use_backend("npu"), nl.profile() as found:
        jax.block_until_ready(jax.jit(call)(*arrays))
    return [op.name for op in found.operators for _ in range(op.launches)]


ONE = {
    "batch_norm with a guess": (lambda x, s, b: nl.batch_norm(x, s, b, shift=s).y, (8, 3, 3, 32), 0),
    "batch_norm": (lambda x, s, b: nl.batch_norm(x, s, b).y, (8, 3, 3, 32), 0),
    "batch_norm_first": (lambda x, s, b: nl.batch_norm(x, s, b, axis=1).y, (8, 32, 3, 3), 0),
    "batch_norm_act": (lambda x, s, b: nl.batch_norm_act(x, s, b, residual=x).y, (8, 3, 3, 32), 0),
    "group_norm": (lambda x, s, b: nl.group_norm(x, s, b, num_groups=4), (2, 5, 5, 32), 1),
    "group_norm_silu": (lambda x, s, b: nl.group_norm_silu(x, s, b, num_groups=4), (2, 5, 5, 32), 1),
    "instance_norm": (nl.instance_norm, (2, 5, 5, 32), 1),
}


@pytest.mark.parametrize(("call", "shape", "merges"), ONE.values(), ids=ONE)
def test_a_norm_over_channels_is_one_kernel_each_way(call, shape, merges):
    """Where parameters are shared between samples, their cotangents are merged by one more."""
    x, parameter = jnp.ones(shape), jnp.ones(32)
    forward = names_of(call, x, parameter, parameter)
    both = names_of(jax.grad(lambda *t: (call(*t) ** 2).sum(), (0, 1, 2)), x, parameter, parameter)
    assert len(forward) == 1
    assert len(both) == 2 + merges and sum("merge" in name for name in both) == merges


# What is refused


@pytest.mark.parametrize(("call", "message"), [
    (lambda x: kernels.batch_norm(x[0, 0], machine="cpu"), r"`x` must be a float array \[N, C\]"),
    (lambda x: kernels.group_norm(x[0], num_groups=1, machine="cpu"), r"`x` must be a float array \[N, S, C\]"),
    (lambda x: kernels.group_norm(x, num_groups=3, machine="cpu"), "`num_groups` must divide the 4 channels"),
    (lambda x: kernels.batch_norm(x, jnp.ones(7), machine="cpu"), r"`scale` must have shape \(3,\)"),
    (lambda x: kernels.batch_norm_grad(x, x[:1], jnp.ones(3), jnp.ones(3), machine="cpu"), "`dy` must have x's shape"),
    (lambda x: kernels.batch_norm_grad(x, x, jnp.ones(4), jnp.ones(3), machine="cpu"), "`mean` must have shape"),
    (lambda x: kernels.batch_norm(x), "'npu' is a simulated core"),
    (lambda x: kernels.batch_norm(x, machine="abacus"), "`machine` must be one of"),
    (lambda x: kernels.batch_norm(jnp.ones((9, 2, 9)), plan=TilePlan(residency="row"),
                                  machine=MACHINES["cpu"].replace(tile_bytes=64)), "no whole channel"),
])  # fmt: skip
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((2, 3, 4)))
