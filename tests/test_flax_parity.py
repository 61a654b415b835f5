"""The layers beside Flax's own: arguments, parameters, keys, values, gradients, state and checkpoints."""

import dataclasses
import inspect

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from flax import serialization

import normlib.linen
import normlib.nnx

NAMES = ["BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"]
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
# One rounding of y apart, in units of the largest |y| (about 4) seen here.
TOLERANCE = {F32: 2e-5, BF16: 2**-6, F16: 2**-9}


def inputs(shape, dtype=F32, seed=0):
    """Mean 0.3, sigma 1: where Flax's one-pass variance is accurate."""
    return jnp.asarray(np.random.default_rng(seed).normal(0.3, 1, shape), dtype)


def assert_close(got, expected, dtype=F32, err_msg=""):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype, (got.dtype, expected.dtype, err_msg)
    as64 = [np.asarray(a.astype(F32), np.float64) for a in (got, expected)]
    size = max(1.0, float(np.abs(as64[1]).max(initial=0)))
    np.testing.assert_allclose(*as64, atol=TOLERANCE[dtype] * size, rtol=0, err_msg=err_msg)


def assert_trees_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("name", NAMES)
def test_linen_arguments_are_flax_s_in_order_and_default_and_ours_come_after(name):
    ours, theirs = (
        [(f.name, f.default) for f in dataclasses.fields(getattr(m, name)) if f.name not in ("parent", "name")]
        for m in (normlib.linen, flax_linen)
    )
    assert [n for n, _ in ours[: len(theirs)]] == [n for n, _ in theirs]
    assert [d for _, d in ours[: len(theirs)]] == [d for _, d in theirs]
    assert not {n for n, _ in ours[len(theirs) :]} & {n for n, _ in theirs}


@pytest.mark.fast
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["__init__", "__call__"])
def test_nnx_arguments_are_flax_s_in_order_kind_and_default_and_ours_come_after(name, method):
    ours, theirs = (
        list(inspect.signature(getattr(getattr(m, name), method)).parameters.values()) for m in (normlib.nnx, flax_nnx)
    )
    assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(theirs) :])
    for mine, flax_s in zip(ours, theirs, strict=False):
        if mine.name in ("bias_init", "scale_init"):
            both = [f.default(jax.random.key(0), (2,), F32) for f in (mine, flax_s)]
            np.testing.assert_array_equal(*both)
        else:
            assert mine.default == flax_s.default, mine.name


@pytest.mark.parametrize("name", NAMES)
def test_linen_call_arguments_are_flax_s(name):
    ours, theirs = (inspect.signature(getattr(m, name).__call__).parameters for m in (normlib.linen, flax_linen))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


# ---- values, gradients, state ----------------------------------------------------------------------------------------

IMAGE, ROWS = (4, 5, 6, 8), (6, 7, 8)
LAST = np.random.default_rng(1).random((*IMAGE[:-1], 8)) < 0.7

CASES = {
    # (class, layer arguments, x shape, x dtype, mask)
    "bn": ("BatchNorm", {}, IMAGE, F32, None),
    "bn momentum epsilon": ("BatchNorm", {"momentum": 0.7, "epsilon": 1e-2}, ROWS, F32, None),
    "bn axis 1, J60": ("BatchNorm", {"axis": 1}, IMAGE, F32, None),
    "bn axis -3 no scale": ("BatchNorm", {"axis": -3, "use_scale": False}, IMAGE, F32, None),
    "bn no bias": ("BatchNorm", {"use_bias": False, "use_fast_variance": False}, IMAGE, F32, None),
    "bn bf16 x": ("BatchNorm", {}, IMAGE, BF16, None),
    "bn bf16 x and y": ("BatchNorm", {"dtype": BF16}, IMAGE, BF16, None),
    "bn bf16 params": ("BatchNorm", {"param_dtype": BF16}, IMAGE, BF16, None),
    "bn integers": ("BatchNorm", {}, (40, 3), jnp.int32, None),
    "bn mask": ("BatchNorm", {}, IMAGE, F32, LAST),
    "ln": ("LayerNorm", {}, ROWS, F32, None),
    "ln epsilon, no scale": ("LayerNorm", {"epsilon": 1e-2, "use_scale": False}, ROWS, F32, None),
    "ln all but batch": ("LayerNorm", {"reduction_axes": (1, 2), "feature_axes": (1, 2)}, ROWS, F32, None),
    "ln features elsewhere": ("LayerNorm", {"reduction_axes": (1, -1), "feature_axes": -1}, IMAGE, F32, None),
    "ln features apart": ("LayerNorm", {"reduction_axes": -1, "feature_axes": 1, "use_bias": False}, ROWS, F32, None),
    "ln mask": ("LayerNorm", {}, IMAGE, F32, LAST | (np.arange(8) == 0)),
    "ln f16 x and y": ("LayerNorm", {"dtype": F16}, ROWS, F16, None),
    "rms": ("RMSNorm", {}, ROWS, F32, None),
    "rms no scale": ("RMSNorm", {"use_scale": False, "epsilon": 1e-3}, ROWS, F32, None),
    "rms bf16": ("RMSNorm", {"dtype": BF16, "param_dtype": BF16}, ROWS, BF16, None),
    "rms mask": ("RMSNorm", {}, ROWS, F32, np.arange(8) < 5),
    "gn": ("GroupNorm", {"num_groups": 4}, IMAGE, F32, None),
    "gn size": ("GroupNorm", {"num_groups": None, "group_size": 4, "use_bias": False}, IMAGE, F32, None),
    "gn rank 2": ("GroupNorm", {"num_groups": 2, "epsilon": 1e-3}, (5, 8), F32, None),
    "gn mask": ("GroupNorm", {"num_groups": 2}, IMAGE, F32, LAST),
    "in": ("InstanceNorm", {}, IMAGE, F32, None),
    "in channels first": ("InstanceNorm", {"feature_axes": 1, "use_scale": False}, IMAGE, F32, None),
    "in mask": ("InstanceNorm", {}, IMAGE, F32, LAST | (np.arange(5) == 0)[:, None, None]),
}
FAST = ("bn", "bn mask", "bn bf16 x", "ln", "rms", "gn", "in")
cases = pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.fast] * (c in FAST)) for c in CASES])


# The arithmetic is shared with linen: here the cases in which nnx has code, or a rule of promotion, of its own.
nnx_cases = pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.fast) for case in FAST),
        *("bn axis -3 no scale", "bn bf16 x and y", "bn bf16 params", "bn integers", "ln epsilon, no scale"),
        *("ln features elsewhere", "ln f16 x and y", "rms bf16", "rms mask", "gn size", "gn rank 2", "gn mask"),
        *("in channels first", "in mask"),
    ],
)


def features(layer, shape):
    axis = layer.get("axis", layer.get("feature_axes", -1))
    return tuple(shape[a] for a in ((axis,) if isinstance(axis, int) else axis))


def parameters(name, layer, shape):
    """Scale and bias unlike the initial ones, in the layer's parameter dtype."""
    rng, dtype = np.random.default_rng(3), layer.get("param_dtype", F32)
    size = features(layer, shape)
    made = {"scale": rng.normal(1, 0.3, size), "bias": rng.normal(0, 1, size)}
    used = {"scale": layer.get("use_scale", True), "bias": layer.get("use_bias", True) and name != "RMSNorm"}
    return {key: jnp.asarray(value, dtype) for key, value in made.items() if used[key]}


def loss(y):
    """Of a y of any dtype, with a different weight for each entry."""
    return jnp.sum(y.astype(F32) * jnp.sin(jnp.arange(y.size, dtype=F32)).reshape(y.shape)) / 10


def linen_run(module, variables, x, mask, train):
    """y, gradients and new state of one layer, compiled."""

    def run(params, x):
        mode = {"use_running_average": not train} if "batch_stats" in variables else {}
        y, state = module.apply({**variables, "params": params}, x, mask=mask, mutable=["batch_stats"], **mode)
        return loss(y), (y, state)

    arguments = (0, 1) if jnp.issubdtype(x.dtype, jnp.inexact) else (0,)
    (_, (y, state)), gradients = jax.jit(jax.value_and_grad(run, argnums=arguments, has_aux=True))(
        variables["params"], x
    )
    return y, gradients, state


@cases
def test_linen_values_gradients_and_state_are_flax_s(case):
    name, layer, shape, dtype, mask = CASES[case]
    x = inputs(shape) * 5 if dtype == jnp.int32 else inputs(shape)
    x, mask = x.astype(dtype), None if mask is None else jnp.asarray(mask)
    ours, theirs = (getattr(m, name)(**layer) for m in (normlib.linen, flax_linen))
    mode = {"use_running_average": False} if name == "BatchNorm" else {}
    variables = jax.jit(lambda k, x: theirs.init(k, x, **mode))(jax.random.key(0), x)
    assert_trees_equal(jax.jit(lambda k, x: ours.init(k, x, **mode))(jax.random.key(0), x), variables)
    variables = {"batch_stats": {}, **variables} if name == "BatchNorm" else dict(variables)
    variables["params"] = parameters(name, layer, shape)
    for train in (True, False) if name == "BatchNorm" and case in FAST else (True,):
        mine, flax_s = (linen_run(module, variables, x, mask, train) for module in (ours, theirs))
        coarse = dtype if dtype in TOLERANCE else F32
        jax.tree.map(lambda a, b: assert_close(a, b, coarse, case), mine[:2], flax_s[:2])
        jax.tree.map(lambda a, b: assert_close(a, b, F32, case), mine[2], flax_s[2])


@nnx_cases
def test_nnx_values_gradients_and_state_are_flax_s(case):
    name, layer, shape, dtype, mask = CASES[case]
    x = inputs(shape) * 5 if dtype == jnp.int32 else inputs(shape)
    x, mask = x.astype(dtype), None if mask is None else jnp.asarray(mask)
    size = int(np.prod(features(layer, shape)))
    made = {k: v.ravel() for k, v in parameters(name, layer, shape).items()}

    def build(module):
        built = getattr(module, name)(size, rngs=flax_nnx.Rngs(0), **layer)
        for key, value in made.items():
            getattr(built, key)[...] = value
        return built

    @flax_nnx.jit(static_argnums=2)
    def run(model, x, train):
        def scalar(model, x):
            y = model(x, mask=mask, **({"use_running_average": not train} if name == "BatchNorm" else {}))
            return loss(y), y

        arguments = (0, 1) if jnp.issubdtype(x.dtype, jnp.inexact) else (0,)
        gradients, y = flax_nnx.grad(scalar, argnums=arguments, has_aux=True)(model, x)
        return y, gradients

    ours, theirs = build(normlib.nnx), build(flax_nnx)
    assert_trees_equal(
        *(flax_nnx.to_pure_dict(flax_nnx.state(built)) for built in (ours, theirs)),
    )
    coarse = dtype if dtype in TOLERANCE else F32
    for train in (True, False) if name == "BatchNorm" and case in FAST else (True,):
        mine, flax_s = run(ours, x, train), run(theirs, x, train)
        jax.tree.map(lambda a, b: assert_close(a, b, coarse, case), *map(jax.tree.leaves, (mine, flax_s)))
        states = (jax.tree.leaves(flax_nnx.state(built)) for built in (ours, theirs))
        jax.tree.map(lambda a, b: assert_close(a, b, F32, case), *states)


def test_synchronised_layers_agree_with_flax_s_under_vmap_with_an_axis_name():
    x = inputs((4, 6, 8))
    ours, theirs = (m.BatchNorm(use_running_average=False, axis_name="d") for m in (normlib.linen, flax_linen))
    variables = theirs.init(jax.random.key(0), x[0])

    def run(module, x):
        def one(x):
            y, state = module.apply(variables, x, mutable=["batch_stats"])
            return loss(y), (y, state)

        return jax.vmap(jax.value_and_grad(one, has_aux=True), axis_name="d")(x)

    mine, flax_s = (jax.jit(lambda x, m=m: run(m, x))(x) for m in (ours, theirs))
    jax.tree.map(lambda a, b: assert_close(a, b), mine, flax_s)


def test_complex_input_has_a_complex_mean_and_a_real_variance_as_in_flax():
    x = jax.lax.complex(inputs(ROWS, seed=4), inputs(ROWS, seed=5))
    ours, theirs = (m.BatchNorm(use_running_average=False) for m in (normlib.linen, flax_linen))
    variables = jax.jit(theirs.init)(jax.random.key(0), x)
    (y, new), (z, flax_s) = (
        jax.jit(lambda x, m=m: m.apply(variables, x, mutable=["batch_stats"]))(x) for m in (ours, theirs)
    )
    np.testing.assert_allclose(y, z, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), new, flax_s)
    assert jax.tree.map(lambda t: t.dtype, new) == jax.tree.map(lambda t: t.dtype, flax_s)

    layer = normlib.nnx.BatchNorm(8, rngs=flax_nnx.Rngs(0))
    flax_nnx.jit(lambda m, x: m(x))(layer, x)
    np.testing.assert_allclose(layer.mean[...], new["batch_stats"]["mean"], rtol=1e-5)


# ---- models, keys, checkpoints ---------------------------------------------------------------------------------------


def linen_model(norms):
    """A model whose parts get their names by class, the norms of `norms` between Flax's layers."""

    class Model(flax_linen.Module):
        @flax_linen.compact
        def __call__(self, x, train):
            x = norms.BatchNorm(use_running_average=not train)(flax_linen.Dense(8)(x))
            x = flax_linen.Dense(8)(flax_linen.relu(x))
            x = norms.GroupNorm(num_groups=2, use_bias=False, scale_init=flax_linen.initializers.normal(0.1))(x)
            x = norms.InstanceNorm(use_scale=False, bias_init=flax_linen.initializers.normal(0.1))(x)
            x = flax_linen.Dense(16)(x.mean((1, 2)))
            x = norms.LayerNorm(scale_init=flax_linen.initializers.normal(1.0))(x)
            x = norms.BatchNorm(use_running_average=not train, use_scale=False, use_bias=False)(x)
            return flax_linen.Dense(3)(norms.RMSNorm()(x))

    return Model()


def nnx_model(norms, seed=0):
    class Model(flax_nnx.Module):
        def __init__(self, rngs):
            normal = flax_nnx.initializers.normal(0.1)
            self.first = flax_nnx.Linear(4, 8, rngs=rngs)
            self.bn = norms.BatchNorm(8, rngs=rngs)
            self.second = flax_nnx.Linear(8, 8, rngs=rngs)
            self.gn = norms.GroupNorm(8, num_groups=2, use_bias=False, scale_init=normal, rngs=rngs)
            self.third = flax_nnx.Linear(8, 8, rngs=rngs)
            self.ln = norms.LayerNorm(8, use_scale=False, bias_init=normal, rngs=rngs)
            self.plain = norms.BatchNorm(8, use_scale=False, use_bias=False, rngs=rngs)
            self.fourth = flax_nnx.Linear(8, 8, rngs=rngs)
            self.rms = norms.RMSNorm(8, scale_init=normal, rngs=rngs)
            self.instance = norms.InstanceNorm(8, scale_init=normal, bias_init=normal, rngs=rngs)
            self.last = flax_nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            x = self.gn(self.second(flax_nnx.relu(self.bn(self.first(x)))))
            x = self.plain(self.ln(self.third(x)))
            return self.last(self.instance(self.rms(self.fourth(x))))

    return Model(flax_nnx.Rngs(seed))


@pytest.mark.fast
def test_a_whole_linen_model_starts_bit_equal_after_the_import_swap():
    x = inputs((2, 6, 6, 3))
    models = [linen_model(norms) for norms in (normlib.linen, flax_linen)]
    assert_trees_equal(*(jax.jit(lambda k, m=m: m.init(k, x, train=False))(jax.random.key(7)) for m in models))


@pytest.mark.fast
def test_a_whole_nnx_model_starts_bit_equal_after_the_import_swap():
    pure = [flax_nnx.to_pure_dict(flax_nnx.state(nnx_model(norms, seed=7))) for norms in (normlib.nnx, flax_nnx)]
    assert_trees_equal(*pure)


@pytest.mark.parametrize("swap", [False, True])
def test_a_linen_checkpoint_loads_in_both_directions(swap):
    source, target = (normlib.linen, flax_linen)[:: -1 if swap else 1]
    x = inputs((8, 6, 6, 3))
    written, read = linen_model(source), linen_model(target)
    start = jax.jit(lambda k: written.init(k, x, train=False))(jax.random.key(0))
    _, trained = jax.jit(lambda v: written.apply(v, x, train=True, mutable=["batch_stats"]))(start)
    saved = serialization.to_bytes({"params": start["params"], **trained})

    empty = jax.tree.map(jnp.zeros_like, jax.jit(lambda k: read.init(k, x, train=False))(jax.random.key(1)))
    loaded = serialization.from_bytes(empty, saved)

    y, z = (
        jax.jit(lambda v, m=m: m.apply(v, x, train=False))(v)
        for m, v in ((written, {"params": start["params"], **trained}), (read, loaded))
    )
    assert_close(z, y)
    assert jax.tree.structure(loaded) == jax.tree.structure(empty)


@pytest.mark.parametrize("swap", [False, True])
def test_an_nnx_state_loads_in_both_directions(swap):
    source, target = (normlib.nnx, flax_nnx)[:: -1 if swap else 1]
    x = inputs((8, 5, 4))
    written, read = nnx_model(source, 0), nnx_model(target, 1)
    flax_nnx.jit(lambda m, x: m(x))(written, x)
    flax_nnx.update(read, flax_nnx.state(written))
    again = nnx_model(target, 2)
    state = flax_nnx.state(again)
    flax_nnx.replace_by_pure_dict(state, flax_nnx.to_pure_dict(flax_nnx.state(written)))
    flax_nnx.update(again, state)
    for model in (written, read, again):
        model.eval()
    y, *others = (flax_nnx.jit(lambda m, x: m(x))(m, x) for m in (written, read, again))
    for z in others:
        assert_close(z, y)


def test_partitioned_boxes_pass_through_the_linen_layers():
    x = inputs((6, 8))
    boxed = {
        "scale_init": flax_linen.with_partitioning(flax_linen.initializers.ones, ("model",)),
        "bias_init": flax_linen.with_partitioning(flax_linen.initializers.zeros, ("model",)),
    }
    for name in NAMES[:2]:
        mode = {"use_running_average": False} if name == "BatchNorm" else {}
        made = [getattr(m, name)(**boxed, **mode) for m in (normlib.linen, flax_linen)]
        ours, theirs = (jax.jit(m.init)(jax.random.key(0), x) for m in made)
        assert isinstance(ours["params"]["scale"], flax_linen.Partitioned)
        assert flax_linen.get_partition_spec(ours) == flax_linen.get_partition_spec(theirs)
        assert_trees_equal(ours, theirs)
        y, z = (jax.jit(lambda v, m=m: m.apply(v, x, mutable=["batch_stats"])[0])(ours) for m in made)
        assert_close(y, z)


def test_nnx_metadata_passes_through():
    layer = normlib.nnx.LayerNorm(
        4, rngs=flax_nnx.Rngs(0), scale_metadata={"note": "rows"}, bias_metadata={"note": "columns"}
    )
    assert layer.scale.note == "rows"
    assert layer.bias.note == "columns"


def test_a_custom_promote_dtype_gets_the_documented_tuple_and_decides_the_dtype():
    seen = []

    def promote(arrays, *, dtype):
        seen.append((len(arrays), dtype))
        return tuple(None if a is None else a.astype(F16) for a in arrays)

    rngs, x = flax_nnx.Rngs(0), inputs((6, 8))
    made = {
        5: normlib.nnx.BatchNorm(8, promote_dtype=promote, dtype=F16, rngs=rngs),
        3: normlib.nnx.LayerNorm(8, promote_dtype=promote, dtype=F16, rngs=rngs),
        2: normlib.nnx.RMSNorm(8, promote_dtype=promote, dtype=F16, rngs=rngs),
    }
    for layer in made.values():
        assert layer(x).dtype == F16
    assert seen == [(n, F16) for n in made]
    assert made[5].mean[...].dtype == F32


@pytest.mark.fast
@pytest.mark.parametrize("package", [normlib.linen, normlib.nnx])
def test_j57_group_norm_of_one_group_is_layer_norm_over_all_but_the_batch(package):
    x = inputs((3, 4, 5, 6))

    def apply(name, **layer):
        if package is normlib.linen:
            module = getattr(package, name)(**layer)
            return jax.jit(lambda x: module.init_with_output(jax.random.key(0), x)[0])(x)
        return flax_nnx.jit(lambda m, x: m(x))(getattr(package, name)(6, rngs=flax_nnx.Rngs(0), **layer), x)

    whole = apply("LayerNorm", reduction_axes=(1, 2, 3), feature_axes=-1)
    assert_close(apply("GroupNorm", num_groups=1), whole)
    each = apply("LayerNorm", reduction_axes=(1, 2), feature_axes=-1)
    assert_close(apply("GroupNorm", num_groups=6), each)
    assert_close(apply("InstanceNorm"), each)
    rows = apply("LayerNorm")
    assert np.abs(np.asarray(rows - whole)).max() > 0.1
