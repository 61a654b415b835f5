"""One wrong argument at a time: each is refused with its name, what was seen and what was expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl
from normlib.scope import Scope

pytestmark = pytest.mark.fast

X = jnp.ones((4, 6, 8))
NORMS = {
    "batch": nl.batch_norm, "layer": nl.layer_norm, "rms": nl.rms_norm, "instance": nl.instance_norm,
    "group": lambda x, *a, **k: nl.group_norm(x, *a, num_groups=2, **k),
}  # fmt: skip


@pytest.fixture(params=NORMS)
def norm(request):
    return NORMS[request.param]


@pytest.mark.parametrize("name", ["scale", "bias"])
@pytest.mark.parametrize("shape", [(7,), (4,), (6, 8), (1, 1, 9), (1, 1, 1, 8)])
def test_a_parameter_of_another_shape(norm, name, shape):  # CASES: D19
    with pytest.raises(ValueError, match=rf"`{name}` must have shape \(8,\).*got \({shape[0]}"):
        norm(X, **{name: jnp.ones(shape)})


def test_a_parameter_of_rank_one_above_x_is_refused_for_empty_x_too(norm):
    with pytest.raises(ValueError, match="`scale` must have shape"):
        norm(jnp.ones((0, 6, 8)), jnp.ones(3))


@pytest.mark.parametrize("axis", [3, -4, (0, 3)])
def test_an_axis_out_of_range(norm, axis):  # CASES: D18
    if norm is NORMS["group"] and isinstance(axis, tuple):
        axis = 3
    with pytest.raises(ValueError, match=r"`axis` -?\d is out of range for x of rank 3"):
        norm(X, axis=axis)


@pytest.mark.parametrize("name", ["batch", "layer", "rms", "instance"])
def test_an_axis_named_twice(name):  # CASES: D18
    with pytest.raises(ValueError, match=r"`axis` \(2, -1\) names an axis of x \(rank 3\) twice"):
        NORMS[name](X, axis=(2, -1))


def test_an_axis_that_is_no_integer(norm):
    with pytest.raises(TypeError, match="`axis` must be an integer"):
        norm(X, axis=1.5)


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")])
def test_a_negative_epsilon(norm, eps):
    with pytest.raises(ValueError, match="`eps` must be >= 0"):
        norm(X, eps=eps)


@pytest.mark.parametrize("eps", [1j, jnp.ones(3), [1e-5], "a", True])
def test_an_epsilon_that_is_no_number(norm, eps):
    with pytest.raises(TypeError, match="`eps` must be a number; got"):
        norm(X, eps=eps)


def test_a_traced_epsilon(norm):
    with pytest.raises(TypeError, match="`eps` must be known while tracing; got a traced"):
        jax.eval_shape(lambda eps: norm(X, eps=eps), 1e-5)


def test_an_epsilon_of_numpy_or_jax_is_a_number_too():
    for eps in (np.float32(0.5), jnp.float32(0.5)):
        np.testing.assert_allclose(nl.layer_norm(np.array([[1.0, 3.0]]), eps=eps), [[-(1.5**-0.5), 1.5**-0.5]], 1e-6)


@pytest.mark.parametrize("offset", [jnp.ones(8), "a", None])
def test_a_scale_offset_that_is_no_number(norm, offset):
    for scale in (None, jnp.ones(8)):
        with pytest.raises(TypeError, match="`scale_offset` must be a number; got"):
            norm(X, scale, scale_offset=offset)


@pytest.mark.parametrize("call", [
    lambda **k: nl.batch_norm_inference(X, jnp.zeros(8), jnp.ones(8), jnp.ones(8), **k),
    lambda **k: nl.ada_layer_norm(X, jnp.zeros((4, 8)), jnp.zeros((4, 8)), **k),
    lambda **k: nl.ada_layer_norm(X, None, jnp.zeros((4, 8)), **k),
    lambda **k: nl.modulate(X, None, jnp.zeros((4, 6, 8)), **k),
    lambda **k: nl.fold_dense_batch_norm(jnp.ones((2, 8)), None, jnp.zeros(8), jnp.ones(8), jnp.ones(8), **k),
])  # fmt: skip
def test_an_array_for_a_scale_offset_is_refused_beyond_the_engine_too(call):
    with pytest.raises(TypeError, match="`scale_offset` must be a number; got Array"):
        call(scale_offset=jnp.ones(8))


@pytest.mark.parametrize("dtype", [jnp.int8, bool])
def test_an_integer_result_would_be_truncated(norm, dtype):
    with pytest.raises(ValueError, match="`out_dtype` must be a floating or complex type; got (int8|bool)"):
        norm(X, out_dtype=dtype)


@pytest.mark.parametrize("call", [
    lambda **k: nl.batch_norm_inference(X, jnp.zeros(8), jnp.ones(8), **k), lambda **k: nl.batch_norm_act(X, **k),
    lambda **k: nl.ada_layer_norm(X, jnp.zeros((4, 8)), jnp.zeros((4, 8)), **k),
    lambda **k: nl.dynamic_tanh(X, 0.5, **k), lambda **k: nl.group_norm_silu(X, num_groups=2, **k),
    lambda **k: nl.batch_norm_act_inference(X, jnp.zeros(8), jnp.ones(8), **k),
])  # fmt: skip
def test_an_integer_result_of_a_composed_operator(call):
    with pytest.raises(ValueError, match="`out_dtype` must be a floating or complex type; got int8"):
        call(out_dtype=jnp.int8)


def test_a_result_that_is_no_dtype(norm):
    with pytest.raises(TypeError, match="`out_dtype` must be a dtype; got 'best'"):
        norm(X, out_dtype="best")


def test_a_real_result_of_complex_values(norm):
    with pytest.raises(ValueError, match="`out_dtype` must be complex, as x is"):
        norm(X + 1j, out_dtype=jnp.float32)


@pytest.mark.parametrize("name", ["scale", "bias"])
def test_a_complex_parameter_of_a_real_array(norm, name):
    with pytest.raises(TypeError, match=f"`{name}` is complex64, but x is float32"):
        norm(X, **{name: jnp.ones(8, jnp.complex64)})


def test_random_keys_are_no_numbers(norm):
    with pytest.raises(TypeError, match="`x` must be an array of numbers; got dtype key"):
        norm(jax.random.split(jax.random.key(0), 4))


@pytest.mark.parametrize("name", [3, 1.5, {"d"}, ["d", 3]])
def test_an_axis_name_that_is_no_name(norm, name):
    with pytest.raises(TypeError, match="`axis_name` must name a mesh axis"):
        norm(X, axis_name=name)


@pytest.mark.parametrize("groups", [[0, 1], 3, "ab", [["a"]], [[0.5, 1]]])
def test_groups_that_are_no_groups_of_indices(norm, groups):
    with pytest.raises(TypeError, match="`axis_index_groups` must be a sequence of groups"):
        norm(X, axis_name="d", axis_index_groups=groups)


def test_no_epsilon_is_picked_silently(norm):  # CASES: C15
    with pytest.raises(TypeError, match="`eps` must be a number; got None"):
        norm(X, eps=None)


def test_a_mask_of_numbers(norm):
    with pytest.raises(TypeError, match="`where` must be boolean; got float32"):
        norm(X, where=jnp.ones((4, 6, 1)))


@pytest.mark.parametrize("shape", [(5, 6, 1), (3,), (4, 6, 8, 1)])
def test_a_mask_that_does_not_fit(norm, shape):
    with pytest.raises(ValueError, match="`where` of shape"):
        norm(X, where=jnp.ones(shape, bool))


def test_a_mask_that_fits_both_ways(norm):
    with pytest.raises(ValueError, match=r"fits both the first and the last axes.*\(8, 1, 1\) or \(1, 1, 8\)"):
        norm(jnp.ones((8, 6, 8)), where=jnp.ones(8, bool))


@pytest.mark.parametrize("option", ["rule", "method", "backend"])
def test_an_unknown_choice(norm, option):
    with pytest.raises(ValueError, match=rf"`{option}` must be one of .*got 'best'"):
        norm(X, **{option: "best"})


def test_a_thing_that_is_no_array(norm):
    with pytest.raises(TypeError, match="`x` must be an array; got dict"):
        norm({})


def test_a_mesh_axis_named_twice(norm):
    with pytest.raises(ValueError, match="`axis_name`.*twice"):
        norm(X, axis_name=("d", "d"))


@pytest.mark.parametrize("groups", [3, 0, -2, 2.0])
def test_channels_that_do_not_divide_into_groups(groups):
    with pytest.raises(ValueError, match=rf"`num_groups` must divide the 8 channels of x.*got {groups}"):
        nl.group_norm(X, num_groups=groups)


def test_reduction_axes_without_the_channels():
    with pytest.raises(ValueError, match=r"`reduction_axes` \(1,\) must contain the channel axis 2"):
        nl.group_norm(X, num_groups=2, reduction_axes=(1,))


@pytest.mark.parametrize(("call", "shape"), [
    (nl.batch_norm, (1, 3)), (nl.instance_norm, (4, 3)), (lambda x: nl.group_norm(x, num_groups=3), (4, 3)),
    (lambda x: nl.batch_norm(x, virtual_batch_size=1), (4, 3)),
])  # fmt: skip
def test_one_entry_per_set_of_statistics(call, shape):  # CASES: B1, A9
    with pytest.raises(ValueError, match=r"one value per set of statistics.*on_single"):
        call(jnp.ones(shape))
    with pytest.raises(ValueError, match="one value per set"):
        jax.eval_shape(call, jnp.ones(shape))


def test_one_entry_gives_the_bias_if_asked():
    bias = jnp.arange(3.0)
    for y in (
        nl.batch_norm(7 * jnp.ones((1, 3)), None, bias, on_single="zero").y[0],
        nl.instance_norm(7 * jnp.ones((1, 3)), None, bias, on_single="zero")[0],
        nl.group_norm(7 * jnp.ones((1, 3)), None, bias, num_groups=3, on_single="zero")[0],
    ):
        np.testing.assert_array_equal(y, bias)
    assert nl.layer_norm(jnp.ones((2, 1))).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("size", [0, -1, 3, 16, 2.0])
def test_a_virtual_batch_that_does_not_fit(size):
    with pytest.raises(ValueError, match="`virtual_batch_size`"):
        nl.batch_norm(jnp.ones((8, 3)), virtual_batch_size=size)


def test_the_legal_virtual_batches_are_listed():
    with pytest.raises(ValueError, match=r"legal are \[1, 2, 4, 8\] within a device"):
        nl.batch_norm(jnp.ones((8, 3)), virtual_batch_size=3)


def test_virtual_batches_of_channels():
    with pytest.raises(ValueError, match="axis 0, which is a channel axis"):
        nl.batch_norm(X, axis=0, virtual_batch_size=2)


def test_virtual_batches_and_groups_together():
    with pytest.raises(ValueError, match="give one"):
        nl.batch_norm(X, axis_name="d", axis_index_groups=[[0, 1]], virtual_batch_size=2)


@pytest.mark.parametrize(("options", "match"), [
    ({"method": "best"}, "`method` must be one of"), ({"tau": 0.0}, "`tau` must be positive"),
    ({"groups": ((0, 1),)}, "needs `axis_name`"),
    ({"names": ("d",), "groups": ((0, 1), (2,))}, "groups of one size"),
    ({"names": ("d",), "groups": ((0, 1), (1, 2))}, "exactly once"),
    ({"names": ("d",), "groups": ((0, 1), (2, 3)), "method": "adaptive"}, "does not work with device groups"),
])  # fmt: skip
def test_a_scope_is_checked_when_built(options, match):
    with pytest.raises(ValueError, match=match):
        Scope(**options)


def test_groups_that_do_not_cover_the_axis():
    f = jax.vmap(lambda x: nl.batch_norm(x, axis_name="d", axis_index_groups=[[0, 1]]).y, axis_name="d")
    with pytest.raises(ValueError, match="must cover the 4 indices"):
        f(X)


def test_shifted_needs_a_shift():
    with pytest.raises(ValueError, match="'shifted' needs `shift`"):
        nl.batch_norm(X, method="shifted")


def test_a_shift_with_channel_groups():
    with pytest.raises(ValueError, match="`shift` does not combine"):
        nl.normalize(X, axes=(1,), eps=0.0, scope=Scope(channels=2, channel_axis=2), shift=jnp.zeros((1, 1, 8)))


def test_the_engine_refuses_parameters_that_would_grow_y():
    with pytest.raises(ValueError, match=r"`scale` of shape \(5, 1, 1, 1\) does not broadcast"):
        nl.normalize(X, jnp.ones((5, 1, 1, 1)), axes=(1,), eps=0.0)


@pytest.mark.parametrize("momentum", [-0.1, 1.5, np.float32(1.5), jnp.float32(1.5), float("nan")])
def test_a_momentum_outside_of_zero_to_one(momentum):
    moments = nl.Moments.of(jnp.ones((3, 2)), 0)
    with pytest.raises(ValueError, match=r"`momentum` is the weight of the old value.*\[0, 1\]"):
        nl.update_running(jnp.zeros(2), jnp.ones(2), moments, momentum=momentum)


@pytest.mark.parametrize("momentum", ["a", None, 1j, True, [0.9]])
def test_a_momentum_that_is_no_number(momentum):
    moments = nl.Moments.of(jnp.ones((3, 2)), 0)
    with pytest.raises(TypeError, match="`momentum` must be a number"):
        nl.update_running(jnp.zeros(2), jnp.ones(2), moments, momentum=momentum)


def test_a_traced_momentum_is_taken_as_it_is():
    moments = nl.Moments.of(jnp.array([[1.0], [3.0]]), 0)
    run = jax.jit(lambda m: nl.update_running(jnp.zeros(1), jnp.ones(1), moments, momentum=m))
    assert [t.tolist() for t in run(0.5)] == [[1.0], [1.0]]


def test_inference_without_statistics():
    with pytest.raises(TypeError, match="`mean` and `var` must be arrays"):
        nl.batch_norm_inference(X, None, jnp.ones(8))


def test_a_set_too_large_for_its_count():
    with pytest.raises(ValueError, match="too large"):
        jax.eval_shape(lambda x: nl.batch_norm(x).y, jax.ShapeDtypeStruct((2**16, 2**16, 2), jnp.bfloat16))
