"""State dicts and arguments of PyTorch by their documented layout, without PyTorch."""

import ml_dtypes
import numpy as np
import pytest

import normlib as nl


def state(**entries):
    rng = np.random.default_rng(0)
    return {name.replace("__", "."): rng.normal(size=shape).astype(np.float32) for name, shape in entries.items()}


L = nl.TorchLayer
LAYERS = [
    nl.TorchLayer("net.0", "Conv_0", "conv"), nl.TorchLayer("net.1", "Block/BatchNorm_0", "batch_norm"),
    nl.TorchLayer("up", "ConvTranspose_0", "conv_transpose"), nl.TorchLayer("fc", "Dense_0", "linear"),
    nl.TorchLayer("ln", "LayerNorm_0", "layer_norm"), nl.TorchLayer("rms", "RMSNorm_0", "rms_norm"),
]  # fmt: skip
ENTRIES = {
    "net.0.weight": (6, 3, 5, 2), "net.0.bias": (6,), "net.1.weight": (6,), "net.1.bias": (6,),
    "net.1.running_mean": (6,), "net.1.running_var": (6,), "up.weight": (3, 4, 2, 3), "fc.weight": (4, 7),
    "fc.bias": (4,), "ln.weight": (2, 3), "rms.weight": (8,),
}  # fmt: skip


def test_every_entry_goes_to_its_place_and_back():
    old = state(**{name.replace(".", "__"): shape for name, shape in ENTRIES.items()})
    found = nl.from_torch({**old, "net.1.num_batches_tracked": np.int64(3)}, LAYERS)
    params = found["params"]
    np.testing.assert_array_equal(params["Conv_0"]["kernel"][4, 1, 2, 5], old["net.0.weight"][5, 2, 4, 1])
    np.testing.assert_array_equal(params["ConvTranspose_0"]["kernel"][0, 2, 1, 3], old["up.weight"][1, 3, 1, 0])
    np.testing.assert_array_equal(params["Dense_0"]["kernel"], old["fc.weight"].T)
    np.testing.assert_array_equal(params["Block"]["BatchNorm_0"]["scale"], old["net.1.weight"])
    assert set(found["batch_stats"]["Block"]["BatchNorm_0"]) == {"mean", "var"}
    assert params["LayerNorm_0"]["scale"].shape == (2, 3)
    back = nl.to_torch(found, LAYERS)
    assert back.pop("net.1.num_batches_tracked").dtype == np.int64
    assert set(back) == set(old)
    for name in old:
        np.testing.assert_array_equal(back[name], old[name])


def test_the_number_of_batches_is_carried_where_it_is_stored():
    layer = nl.TorchLayer("", "", "batch_norm", count_batches=True)
    found = nl.from_torch({"running_mean": np.zeros(2), "running_var": np.ones(2), "num_batches_tracked": 7}, [layer])
    assert found["batch_stats"]["num_batches"].dtype == np.int32
    assert "params" not in found
    assert nl.to_torch(found, [layer])["num_batches_tracked"] == 7


def test_dtypes_stay():
    weights = {"weight": np.ones(3, ml_dtypes.bfloat16), "bias": np.ones(3, np.float64)}
    params = nl.from_torch(weights, [nl.TorchLayer("", "norm", "group_norm")])["params"]["norm"]
    assert (params["scale"].dtype, params["bias"].dtype) == (ml_dtypes.bfloat16, np.float64)


@pytest.mark.parametrize(("kind", "given", "expected"), [
    ("batch_norm", {}, {"epsilon": 1e-5, "momentum": 0.9, "unbiased": True}),
    ("batch_norm", {"momentum": None, "eps": 0.1}, {"epsilon": 0.1, "momentum": None, "unbiased": True}),
    ("batch_norm", {"affine": False, "track_running_stats": False},
     {"epsilon": 1e-5, "momentum": 0.9, "unbiased": True, "use_scale": False, "use_bias": False,
      "track_running_stats": False}),
    ("layer_norm", {"bias": False}, {"epsilon": 1e-5, "use_bias": False}),
    ("rms_norm", {}, {"epsilon": float(np.finfo(np.float32).eps)}),
    ("rms_norm", {"eps": 1e-6, "elementwise_affine": False}, {"epsilon": 1e-6, "use_scale": False}),
    ("instance_norm", {}, {"epsilon": 1e-5, "use_scale": False, "use_bias": False}),
    ("instance_norm", {"affine": True}, {"epsilon": 1e-5}),
    ("group_norm", {"num_groups": 4}, {"epsilon": 1e-5, "num_groups": 4}),
])  # fmt: skip
def test_arguments_become_those_of_the_flax_layer(kind, given, expected):  # CASES: J34, C15
    assert nl.layer_arguments(kind, **given) == expected


@pytest.mark.parametrize(("call", "error", "match"), [
    (lambda: L("a", "b", "bn"), ValueError, "`kind` must be one of batch_norm"),
    (lambda: L("a", "b", "conv", count_batches=True), ValueError, "`count_batches` belongs to running"),
    (lambda: nl.layer_arguments("conv"), ValueError, "`kind` must be one of"),
    (lambda: nl.layer_arguments("group_norm"), TypeError, "`num_groups`.*missing"),
    (lambda: nl.layer_arguments("rms_norm", bias=True), TypeError, "no argument 'bias'"),
    (lambda: nl.layer_arguments("instance_norm", track_running_stats=True), ValueError, "`track_running_stats`"),
    (lambda: nl.from_torch(state(a__weight=(3,)), []), ValueError, r"no layer uses: \['a.weight'\]"),
    (lambda: nl.from_torch({}, [L("a", "b", "conv")]), KeyError, "no 'a.weight'"),
    (lambda: nl.from_torch(state(a__running_mean=(3,)), [L("a", "b", "batch_norm")]), KeyError, "running_var"),
    (lambda: nl.from_torch(state(a__weight=(3, 3)), [L("a", "b", "conv")]), ValueError, r"kind conv has shape"),
    (lambda: nl.from_torch(state(a__weight=(3, 3, 1)), [L("a", "b", "linear")]), ValueError, "kind linear"),
    (lambda: nl.from_torch(state(a__weight=(3,), c__weight=(3,)), [L(n, "b", "layer_norm") for n in "ac"]),
     ValueError, "two layers go to 'b'"),
    (lambda: nl.to_torch({"params": {}}, [L("a", "b", "conv")]), KeyError, "no parameters and no statistics"),
    (lambda: nl.to_torch({"params": {"b": {"bias": 0}}}, [L("a", "b", "conv")]), KeyError, "no kernel at 'b'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_entries_may_be_left_over_if_asked():
    assert nl.from_torch(state(a__weight=(3,)), [], strict=False) == {}
