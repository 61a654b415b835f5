"""Profiles: every kernel of a step with its launches, bytes and time, and the norms' share of a whole step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import normlib as nl
import sim_npu

X = jnp.asarray(np.random.default_rng(0).normal(size=(64, 256)), jnp.float32)


def train_step(x, scale):
    return jax.value_and_grad(lambda s: jnp.sum(nl.rms_norm(x, s) ** 2))(scale)


def test_a_profile_counts_every_launch_with_its_bytes():
    step = jax.jit(train_step)
    step(X, jnp.ones(256))  # compiled before: traced anew inside

    with nl.use_backend("npu"), nl.profile() as found:
        for _ in range(3):
            step(X, jnp.ones(256))

    by_name = {op.name: op for op in found.operators}
    assert by_name["rms_norm"].launches == 3
    cores = 32  # 64 rows, two to a tile
    read_and_written = 2 * X.nbytes + cores * 256 * 4 + 64 * 2 * 4  # x and y, scale by every core, two columns
    assert by_name["rms_norm"].bytes == 3 * read_and_written
    assert found.launches == sum(op.launches for op in found.operators) > 3
    assert found.us == pytest.approx(sum(op.us for op in found.operators))
    assert "rms_norm" in str(found) and "64x256" in str(found)


def test_turns_of_a_loop_count_and_other_backends_do_not():
    def looped(x):
        return jax.lax.fori_loop(0, 5, lambda _, x: nl.layer_norm(x), x)

    with nl.use_backend("npu"), nl.profile() as found:
        jax.jit(looped)(X)
    assert [(op.name, op.launches) for op in found.operators] == [("layer_norm", 5)]

    with nl.profile() as nothing:
        jax.jit(looped)(X)
    assert nothing.operators == []


def test_a_step_is_laid_out_with_the_share_of_its_norms():
    w = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)

    def layer(x, w):
        return nl.layer_norm(x @ w)

    found = nl.profile_step(layer, ((4096, 256), "bfloat16"), w, chip="910b2")

    assert found.launches == 1
    assert found.bytes >= 2 * 4096 * 512 * 2
    assert 0 < found.norm_us < found.us and found.norm_share == pytest.approx(found.norm_us / found.us)
    assert "norms:" in str(found).splitlines()[0]


def test_an_unknown_chip_is_refused():
    with pytest.raises(ValueError, match="910b2"):
        nl.profile_step(lambda x: nl.layer_norm(x), X, chip="tpu")


def counted(fn, *args):
    with nl.use_backend("npu"), nl.profile() as found:
        jax.jit(fn)(*args)
    return {op.name: op.launches for op in found.operators}


def turns(x):
    """Each needs the last one's result."""
    return jax.lax.scan(lambda c, _: (nl.rms_norm(c) * 1.1, None), x, None, length=3)[0]


def test_turns_of_a_loop_count_where_it_is_differentiated():
    found = counted(jax.value_and_grad(lambda x: jnp.sum(turns(x) ** 2)), X[:4, :16])
    assert found == {"rms_norm": 3, "rms_norm_grad": 3}


def test_what_is_computed_again_is_in_the_layout_of_a_step_only():
    step = jax.value_and_grad(lambda x: jnp.sum(jax.checkpoint(turns)(x) ** 2))
    assert counted(step, X[:4, :16]) == {"rms_norm": 3, "rms_norm_grad": 3}
    assert nl.profile_step(step, X[:4, :16]).launches == 9


def test_members_of_a_vmap_count_once_within_another_too():
    x = jnp.stack([X[:4, :16]] * 3)
    assert counted(jax.vmap(nl.rms_norm), x) == {"rms_norm": 1}
    assert counted(jax.vmap(jax.vmap(nl.rms_norm)), jnp.stack([x, x])) == {"rms_norm": 1}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_program_split_between_devices_counts_once(kind):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType[kind],))
    x = jax.device_put(X[:8, :16], NamedSharding(mesh, P("d")))
    assert counted(nl.rms_norm, x) == {"rms_norm": 1}


@pytest.mark.parametrize("check_vma", [False, True])
def test_every_device_of_a_shard_map_counts(check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(nl.rms_norm, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma)
    assert counted(fn, X[:8, :16]) == {"rms_norm": 4}


def test_chips_of_one_name_are_told_apart():
    chip = sim_npu.get_chip("910b2")
    slow = dataclasses.replace(chip, clock_mhz=chip.clock_mhz / 4)
    norm = jax.jit(nl.rms_norm)
    with nl.profile() as found:
        for one in (chip, slow):
            with nl.use_backend("npu", chip=one):
                norm(X[:4, :16])
    assert [op.launches for op in found.operators] == [1, 1]
    assert found.operators[0].us > found.operators[1].us
    assert str(found).count("910b2") == 2


def test_what_runs_without_kernels_is_named():
    with nl.use_backend("npu"), nl.profile() as found:
        nl.layer_norm(X[:2, :4] + 1j)
    assert found.operators == [] and found.elsewhere == ["complex64 2x4"]
    assert "no kernel ran" in str(found) and "complex64 2x4" in str(found)
    step = nl.profile_step(nl.layer_norm, X[:2, :4] + 1j)
    assert step.launches == 0 and "complex64 2x4" in str(step)


def test_a_profile_inside_of_jit_is_refused():
    def inner(x):
        with nl.profile():
            return nl.layer_norm(x)

    with pytest.raises(RuntimeError, match="around the jitted call"):
        jax.jit(inner)(X)


def test_a_profile_that_ends_in_an_error_keeps_what_ran_and_nested_ones_count_their_own():
    norm = jax.jit(nl.rms_norm)
    with pytest.raises(ZeroDivisionError), nl.use_backend("npu"), nl.profile() as outer:
        norm(X[:4, :16])
        with nl.profile() as inner:
            norm(X[:4, :16])
            norm(X[:4, :16])
        raise ZeroDivisionError
    assert (outer.launches, inner.launches) == (1, 2)


def test_a_batch_norm_by_stored_statistics_is_a_kernel_forward():
    x, c = X[:8, :16], jnp.arange(1.0, 17.0)
    infer = jax.jit(jax.value_and_grad(lambda x: jnp.sum(nl.batch_norm_inference(x, c, c**2, c, -c, eps=0.0) ** 2) / 2))
    with nl.use_backend("npu"), nl.profile() as found:
        value, dx = infer(x)
    assert [(op.name, op.launches) for op in found.operators] == [("affine", 1)]
    y = np.float64(x) - c - c  # scale * rstd is 1
    np.testing.assert_allclose(value, np.sum(y**2) / 2, rtol=1e-6)
    np.testing.assert_allclose(dx, y, rtol=1e-6, atol=1e-5)


def test_the_map_by_given_statistics_is_a_kernel():
    with nl.use_backend("npu"), nl.profile() as found:
        y = nl.engine.affine(X, jnp.ones((64, 1)), jnp.full((64, 1), 2.0))
    assert [op.name for op in found.operators] == ["affine"]
    np.testing.assert_allclose(y, (np.float64(X) - 1) * 2, rtol=1e-6, atol=1e-6)
