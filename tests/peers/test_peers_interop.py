"""PyTorch state dicts in Flax models and back, and folding against PyTorch's own where that works."""

import jax
import numpy as np
import pytest
from flax import linen as nn

import normlib as nl
from normlib import linen
from tests.peers.against import assert_close, channels_last, torch_or_skip

torch = torch_or_skip()
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval  # noqa: E402


def randomised(module, seed=0):
    """`module` in evaluation mode with random parameters and statistics."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator) + (0.2 if "var" in name else -0.5))
    return module.eval()


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        t = torch.nn
        self.conv, self.bn = t.Conv2d(3, 8, 3, stride=2, padding=1), t.BatchNorm2d(8, eps=0.02, momentum=0.3)
        self.grouped, self.gn = t.Conv2d(8, 8, 3, groups=4, bias=False), t.GroupNorm(2, 8)
        self.up, self.inorm = t.ConvTranspose2d(8, 4, 3, stride=2), t.InstanceNorm2d(4, affine=True)
        self.fc, self.ln, self.rms = t.Linear(4, 6), t.LayerNorm(6), t.RMSNorm(6)

    def forward(self, x):
        x = self.gn(self.grouped(self.bn(self.conv(x))))
        x = self.inorm(self.up(x)).mean((2, 3))
        return self.rms(self.ln(self.fc(x)))


class FlaxNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        args = nl.layer_arguments
        x = nn.Conv(8, (3, 3), strides=2, padding=1, name="conv")(x)
        x = linen.BatchNorm(not train, **args("batch_norm", eps=0.02, momentum=0.3), name="bn")(x)
        x = nn.Conv(8, (3, 3), feature_group_count=4, use_bias=False, padding="VALID", name="grouped")(x)
        x = linen.GroupNorm(**args("group_norm", num_groups=2), name="gn")(x)
        x = nn.ConvTranspose(4, (3, 3), strides=(2, 2), padding=[(2, 2), (2, 2)], name="up")(x)
        x = linen.InstanceNorm(**args("instance_norm", affine=True), name="inorm")(x).mean((1, 2))
        x = nn.Dense(6, name="fc")(x)
        return linen.RMSNorm(**args("rms_norm"), name="rms")(linen.LayerNorm(**args("layer_norm"), name="ln")(x))


KINDS = {
    "conv": "conv", "bn": "batch_norm", "grouped": "conv", "gn": "group_norm", "up": "conv_transpose",
    "inorm": "instance_norm", "fc": "linear", "ln": "layer_norm", "rms": "rms_norm",
}  # fmt: skip
LAYERS = [nl.TorchLayer(name, name, kind) for name, kind in KINDS.items()]
X = np.random.default_rng(0).normal(size=(2, 3, 11, 11)).astype(np.float32)


def test_a_checkpoint_runs_in_flax_and_goes_back():
    module = randomised(TorchNet())
    variables = nl.from_torch(module.state_dict(), LAYERS)
    expected = module(torch.from_numpy(X)).detach().numpy()
    y = jax.jit(FlaxNet().apply)(variables, np.moveaxis(X, 1, -1))
    np.testing.assert_allclose(y, expected, atol=2e-4)

    back = {name: torch.from_numpy(value) for name, value in nl.to_torch(variables, LAYERS).items()}
    other = TorchNet().eval()
    other.load_state_dict(back)
    np.testing.assert_array_equal(other(torch.from_numpy(X)).detach().numpy(), expected)


def test_training_goes_on_with_the_same_statistics():  # CASES: J34
    module = randomised(TorchNet()).train()
    variables = nl.from_torch(module.state_dict(), LAYERS)
    module(torch.from_numpy(X))
    run = jax.jit(lambda v, x: FlaxNet().apply(v, x, True, mutable="batch_stats"))
    _, updates = run(variables, np.moveaxis(X, 1, -1))
    assert_close(updates["batch_stats"]["bn"]["mean"], module.bn.running_mean.numpy(), np.float32, ulps=64)
    assert_close(updates["batch_stats"]["bn"]["var"], module.bn.running_var.numpy(), np.float32, ulps=64)


def test_a_bfloat16_tensor_is_read():
    state = {"weight": torch.arange(3, dtype=torch.bfloat16), "bias": torch.zeros(3)}
    params = nl.from_torch(state, [nl.TorchLayer("", "", "layer_norm")])["params"]
    assert str(params["scale"].dtype) == "bfloat16"
    assert params["scale"].astype(np.float32).tolist() == [0, 1, 2]


def statistics(bn):
    return (
        *(t.detach().numpy() for t in (bn.running_mean, bn.running_var)),
        *(None if t is None else t.detach().numpy() for t in (bn.weight, bn.bias)),
    )


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_folding_against_pytorch(transposed, groups, bias, affine):  # CASES: F1, F2, F5
    """Equal to the unfused modules always, and to PyTorch's fusion where that runs."""
    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    conv = randomised(kind(4, 4, 3, stride=2, groups=groups, bias=bias), seed=1)
    bn = randomised(torch.nn.BatchNorm2d(4, affine=affine), seed=2)
    weights = (conv.weight.detach().numpy(), None if conv.bias is None else conv.bias.detach().numpy())
    folded = nl.fold_conv_batch_norm(
        *weights, *statistics(bn), layout="IOHW" if transposed else "OIHW", groups=groups, transposed=transposed
    )
    x = torch.randn(2, 4, 7, 7, generator=torch.Generator().manual_seed(3))
    expected = bn(conv(x)).detach().numpy()
    if affine and not (transposed and groups > 1):  # where PyTorch 2.13 raises
        fused = fuse_conv_bn_eval(conv, bn, transpose=transposed)
        assert_close(folded.kernel, fused.weight.detach().numpy(), np.float32, ulps=4)
        assert_close(folded.bias, fused.bias.detach().numpy(), np.float32, ulps=4)
    own = randomised(kind(4, 4, 3, stride=2, groups=groups), seed=1)
    with torch.no_grad():
        own.weight.copy_(torch.from_numpy(np.array(folded.kernel)))
        own.bias.copy_(torch.from_numpy(np.array(folded.bias)))
    assert_close(own(x).detach().numpy(), expected, np.float32)


def test_dense_folding_against_pytorch():
    linear, bn = randomised(torch.nn.Linear(5, 4), seed=1), randomised(torch.nn.BatchNorm1d(4), seed=2)
    fused = fuse_linear_bn_eval(linear, bn)
    folded = nl.fold_dense_batch_norm(
        linear.weight.detach().numpy(), linear.bias.detach().numpy(), *statistics(bn), layout="OI"
    )
    assert_close(folded.kernel, fused.weight.detach().numpy(), np.float32, ulps=4)
    assert_close(folded.bias, fused.bias.detach().numpy(), np.float32, ulps=4)


def test_a_converted_evaluation_equals_pytorchs_channels_last():
    bn = randomised(torch.nn.BatchNorm2d(4), seed=2)
    variables = nl.from_torch(bn.state_dict(), [nl.TorchLayer("", "", "batch_norm")])
    layer = linen.BatchNorm(use_running_average=True, **nl.layer_arguments("batch_norm"))
    x = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(3))
    assert_close(layer.apply(variables, np.moveaxis(x.numpy(), 1, -1)), channels_last(bn(x)), np.float32, ulps=8)
