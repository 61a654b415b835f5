"""Profiles: every kernel of a step with its launches, bytes and time, and the norms' share of a whole step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl

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
