"""Operators with more arrays than x, scale and bias: one line each, with its formula. Fused and adaptive norms."""

from __future__ import annotations

import jax.numpy as jnp

import normlib as nl
from tests.composite import Composite, moments, normal, rounded
from tests.composites_other import OTHERS


def _add_norm(a, eps, *, centered=True, first=False):
    third = getattr(a, "sum_bias", 0.0)
    s = a.x1 + a.x2 + third
    measured = rounded(a, s) if first else s
    y, size = normal(a, measured, (-1,), eps, a.scale, a.bias, centered=centered)
    return (y, s), (size, abs(a.x1) + abs(a.x2) + abs(a.np.asarray(third)))


def _multi_add(a):
    s = a.xa + a.xb + a.xc + a.x2
    y, size = normal(a, s, (-1,), 1e-6, a.scale, centered=False)
    return (y, s), (size, abs(a.xa) + abs(a.xb) + abs(a.xc) + abs(a.x2))


def _deep(a):
    y, size = normal(a, a.x * 0.3 + a.gx, (-1,), 1e-6, a.scale, a.bias)
    return (y,), (size,)


def _silu(a, beta):
    z, size = normal(a, a.x, (1,), 1e-5, a.scale, a.bias, groups=4)
    return (z / (1 + a.np.exp(-beta * z)),), (size * (1 + abs(beta)),)


def _batch_act(a, act):
    z, size = normal(a, a.x, (0, 1), 1e-5, a.scale, a.bias)
    z = z + a.residual
    return (act(a, z),), (size + abs(a.residual),)


def _conv_relu(a):
    """A valid 1 x 3 convolution by hand, z rounded to x's dtype."""
    taps = [a.np.einsum("nlc,co->nlo", a.x[:, i : i + 5], rounded(a, a.kernel)[i]) for i in range(3)]
    z = rounded(a, taps[0] + taps[1] + taps[2])
    y, size = normal(a, z, (0, 1), 1e-5, a.scale, a.bias)
    return (a.np.maximum(y, 0),), (size,)


ROWS, FEATURES = (9, 37), (37,)
ADDED = {"x1": ROWS, "x2": ROWS}
AFFINE = {"scale": FEATURES, "bias": FEATURES}
BIG = {"x1": (512, 1024), "x2": (512, 1024), "scale": (1024,), "bias": (1024,)}
SPACE = {"x": (8, 512, 64), "scale": (64,), "bias": (64,)}

FUSED = [
    Composite(
        "add_layer_norm", nl.add_layer_norm, lambda a: _add_norm(a, 1e-5), ADDED, AFFINE | {"sum_bias": FEATURES},
        outputs=2, large=BIG | {"sum_bias": (1024,)}, own_rule=True,
    ),
    Composite(
        "add_layer_norm_round_first", lambda **k: nl.add_layer_norm(**k, residual_round_first=True),
        lambda a: _add_norm(a, 1e-5, first=True), ADDED, AFFINE, outputs=2, keeps=0.6, large=BIG, own_rule=True,
    ),
    Composite(
        "add_rms_norm", nl.add_rms_norm, lambda a: _add_norm(a, 1e-6, centered=False), ADDED, AFFINE, outputs=2,
        large=BIG,
    ),
    Composite(
        "multi_add_rms_norm", lambda xa, xb, xc, x2, scale, **k: nl.multi_add_rms_norm([xa, xb, xc], x2, scale, **k),
        _multi_add, dict.fromkeys(("xa", "xb", "xc", "x2"), ROWS), {"scale": FEATURES}, outputs=2,
        large=dict.fromkeys(("xa", "xb", "xc", "x2"), (512, 1024)) | {"scale": (1024,)},
    ),
    Composite(
        "deep_norm", nl.deep_norm, _deep, {"x": ROWS, "gx": ROWS}, AFFINE,
        large={"x": (512, 1024), "gx": (512, 1024), "scale": (1024,), "bias": (1024,)},
    ),
    Composite(
        "group_norm_silu", lambda **k: nl.group_norm_silu(**k, num_groups=4), lambda a: _silu(a, 1.0),
        {"x": (3, 7, 12)}, {"scale": (12,), "bias": (12,)}, reduce=(1, 2), large=SPACE, own_rule=True,
    ),
    Composite(
        "group_norm_swish", lambda **k: nl.group_norm_silu(**k, num_groups=4, beta=1.7), lambda a: _silu(a, 1.7),
        {"x": (3, 7, 12)}, {"scale": (12,), "bias": (12,)}, reduce=(1, 2),
    ),
    Composite(
        "batch_norm_act_relu", nl.batch_norm_act, lambda a: _batch_act(a, lambda a, z: a.np.maximum(z, 0)),
        {"x": (6, 7, 4), "residual": (6, 7, 4)}, {"scale": (4,), "bias": (4,)}, reduce=(0, 1),
        large=SPACE | {"residual": SPACE["x"]}, own_rule=True,
    ),
    Composite(
        "batch_norm_act_silu", lambda **k: nl.batch_norm_act(**k, activation="silu"),
        lambda a: _batch_act(a, lambda a, z: z / (1 + a.np.exp(-z))),
        {"x": (6, 7, 4), "residual": (6, 7, 4)}, {"scale": (4,), "bias": (4,)}, reduce=(0, 1),
        large=SPACE | {"residual": SPACE["x"]},
    ),
    Composite(
        "conv_batch_norm_relu", lambda **k: nl.conv_batch_norm_relu(**k, padding="VALID"), _conv_relu,
        {"x": (6, 7, 4)}, {"kernel": (3, 4, 5), "scale": (5,), "bias": (5,)}, reduce=(0, 1, 2), slack=4.0, mean=0.0,
        dtypes=("f32",),
    ),
]  # fmt: skip


def _ada(a, *, offset=1.0, token=False):
    m, t = (a.mod_scale, a.mod_shift) if token else (a.mod_scale[:, None], a.mod_shift[:, None])
    scale, bias = getattr(a, "scale", 1.0), getattr(a, "bias", 0.0)
    y, size = normal(a, a.x, (-1,), 1e-5, scale, bias)
    return (y * (offset + m) + t,), (size * (abs(offset) + abs(m)) + abs(t),)


def _ada_zero(a):
    shift, scale, gate = (a.modulation[:, None, i : i + 11] for i in (0, 11, 22))
    y, size = normal(a, a.x, (-1,), 1e-5)
    return (y * (1 + scale) + shift, gate), (size * (1 + abs(scale)) + abs(shift), 0 * gate)


def _modulate(a):
    m, t = a.scale[:, None], a.shift[:, None]
    return (a.x * (1 + m) + t,), (abs(a.x) * (1 + abs(m)) + abs(t),)


def _gate(a):
    return (a.x + a.gate[:, None] * a.branch,), (abs(a.x) + abs(a.gate[:, None] * a.branch),)


def _conditional(a):
    raised = lambda t: t[a.np.asarray([2, 0, 1, 1])][:, None]  # noqa: E731
    y, size = normal(a, a.x, (0, 1), 1e-5)
    return (y * (1 + raised(a.scale)) + raised(a.bias),), (size * (1 + abs(raised(a.scale))) + abs(raised(a.bias)),)


def _modulated_group(a, *, spatial=False):
    m, t = (a.mod_scale, a.mod_shift) if spatial else (a.mod_scale[:, None], a.mod_shift[:, None])
    y, size = normal(a, a.x, (1,), 1e-5, getattr(a, "scale", 1.0), getattr(a, "bias", 0.0), groups=4)
    return (y * (1 + m) + t,), (size * (1 + abs(m)) + abs(t),)


def _adain(a):
    mean, var = moments(a, a.style, (1,))
    std, mean = a.np.sqrt(var[:, :1] + 1e-5), mean[:, :1]
    y, size = normal(a, a.x, (1,), 1e-5)
    return (y * std + mean,), (size * std + abs(mean) + std,)


def _adain_given(a):
    y, size = normal(a, a.x, (1,), 1e-5)
    std, mean = a.style_std[:, None], a.style_mean[:, None]
    return (y * std + mean,), (size * abs(std) + abs(mean),)


def _video(a, axes):
    y, size = normal(a, a.x, axes, 1e-5, a.scale, a.bias, groups=3)
    return (y,), (size,)


TOKENS, SAMPLES = {"x": (3, 5, 11)}, (3, 11)
ADAPTIVE = [
    Composite(
        "ada_layer_norm", nl.ada_layer_norm, _ada, TOKENS, {"mod_scale": SAMPLES, "mod_shift": SAMPLES},
        large={"x": (4, 256, 512), "mod_scale": (4, 512), "mod_shift": (4, 512)},
    ),
    Composite(
        "ada_layer_norm_affine", nl.ada_layer_norm, _ada, TOKENS,
        {"mod_scale": SAMPLES, "mod_shift": SAMPLES, "scale": (11,), "bias": (11,)}, slack=2.0,
    ),
    Composite(
        "ada_layer_norm_whole_factor", lambda **k: nl.ada_layer_norm(**k, scale_offset=0.0),
        lambda a: _ada(a, offset=0.0), TOKENS, {"mod_scale": SAMPLES, "mod_shift": SAMPLES},
    ),
    Composite(
        "ada_layer_norm_token", nl.ada_layer_norm, lambda a: _ada(a, token=True),
        dict.fromkeys(("x", "mod_scale", "mod_shift"), (3, 5, 11)), {"scale": (11,), "bias": (11,)}, slack=2.0,
    ),
    Composite("ada_layer_norm_zero", nl.ada_layer_norm_zero, _ada_zero, TOKENS, {"modulation": (3, 33)}, outputs=2),
    Composite(
        "modulate", nl.modulate, _modulate, TOKENS, {"scale": SAMPLES, "shift": SAMPLES}, rules=(),
        large={"x": (4, 256, 512), "scale": (4, 512), "shift": (4, 512)}, temporaries=2.1,
    ),
    Composite(
        "gate_residual", nl.gate_residual, _gate, {"x": (3, 5, 11), "branch": (3, 5, 11)}, {"gate": SAMPLES}, rules=(),
        large={"x": (4, 256, 512), "branch": (4, 256, 512), "gate": (4, 512)}, temporaries=2.1,
    ),
    Composite(
        "conditional_batch_norm", lambda **k: nl.conditional_batch_norm(**k, labels=jnp.array([2, 0, 1, 1])),
        _conditional, {"x": (4, 6, 5)}, {"scale": (3, 5), "bias": (3, 5)}, reduce=(0, 1),
    ),
    Composite(
        "modulated_group_norm", lambda **k: nl.modulated_group_norm(**k, num_groups=4), _modulated_group,
        {"x": (3, 7, 12)}, {"mod_scale": (3, 12), "mod_shift": (3, 12), "scale": (12,), "bias": (12,)}, reduce=(1, 2),
        slack=2.0,
    ),
    Composite(
        "modulated_group_norm_spatial", lambda **k: nl.modulated_group_norm(**k, num_groups=4),
        lambda a: _modulated_group(a, spatial=True), dict.fromkeys(("x", "mod_scale", "mod_shift"), (3, 7, 12)),
        reduce=(1, 2),
    ),
    Composite(
        "adaptive_instance_norm", nl.adaptive_instance_norm, _adain, {"x": (3, 7, 5), "style": (3, 9, 5)}, reduce=(1,),
        slack=3.0,
    ),
    Composite(
        "adaptive_instance_norm_given", nl.adaptive_instance_norm, _adain_given, {"x": (3, 7, 5)},
        {"style_mean": (3, 5), "style_std": (3, 5)}, reduce=(1,),
    ),
    Composite(
        "st_group_norm", lambda **k: nl.st_group_norm(**k, num_groups=3), lambda a: _video(a, (1, 2, 3)),
        {"x": (2, 3, 4, 2, 6)}, {"scale": (6,), "bias": (6,)}, reduce=(1, 2, 3, 4),
    ),
    Composite(
        "st_group_norm_per_frame", lambda **k: nl.st_group_norm(**k, num_groups=3, mode="per_frame"),
        lambda a: _video(a, (2, 3)), {"x": (2, 3, 4, 2, 6)}, {"scale": (6,), "bias": (6,)}, reduce=(2, 3, 4),
    ),
]  # fmt: skip

COMPOSITES = FUSED + ADAPTIVE + OTHERS
BY_NAME = {op.name: op for op in COMPOSITES}
