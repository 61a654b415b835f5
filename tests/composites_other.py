"""Dynamic norms, lengths, weights and packed rows: one line each, with its formula."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import normlib as nl
from tests.composite import Composite, moments

SPACE = {"x": (8, 512, 64), "scale": (64,), "bias": (64,)}


def _softmax(a, t):
    e = a.np.exp(t - t.max())
    return e / e.sum()


def _switchable(a):
    means, variances = zip(*(moments(a, a.x, axes) for axes in ((1,), (1, 2), (0, 1))))
    mean = sum(w * m for w, m in zip(_softmax(a, a.mean_logits), means))
    var = sum(w * v for w, v in zip(_softmax(a, a.var_logits), variances))
    y = (a.x - mean) / a.np.sqrt(var + 1e-5) * a.scale
    return (y + a.bias,), (abs(y) + abs(a.scale) + abs(a.bias),)


RUNNING = np.linspace(0.5, 1.5, 5)


def _renormalized(a):
    """Batch renorm with corrections inside and outside their bounds, which take no gradient."""
    mean, var = moments(a, a.x, (0, 1))
    stop = (lambda t: t) if a.np is np else jax.lax.stop_gradient
    running = RUNNING + 0.0  # a new object: jax 0.12 remembers a NumPy constant in the dtype it first saw it in
    old = np.sqrt(running + 1e-5)
    r = a.np.clip(stop(a.np.sqrt(var + 1e-5)) / old, 1 / 1.2, 1.2)
    d = a.np.clip((stop(mean) - running) / old, -0.3, 0.3)
    y = ((a.x - mean) / a.np.sqrt(var + 1e-5) * r + d) * a.scale
    return (y + a.bias,), (abs(y) + 2 * abs(a.scale) + abs(a.bias),)


def _tanh(a):
    y = a.np.tanh(a.x * a.alpha) * a.scale
    return (y + a.bias,), (abs(y) + abs(a.scale) * (1 + abs(a.x * a.alpha)) + abs(a.bias),)


def _mvn(a):
    mean, var = moments(a, a.x, (0, 2, 3))
    y = (a.x - mean) / (a.np.sqrt(var) + 1e-9)
    return (y,), (abs(y) + 1,)


def _power(a, p, axes):
    y = (abs(a.x) ** p).sum(axes) ** (1 / p)
    return (y,), (abs(y),)


def _unit(a):
    y = a.x / a.np.sqrt((a.x**2).sum(-1, keepdims=True))
    return (y,), (abs(y),)


def _renorm(a):
    norm = (abs(a.x) ** 3).sum((0, 2), keepdims=True) ** (1 / 3)
    y = a.x * a.np.where(norm > 5.0, 5.0 / (norm + 1e-7), 1.0)
    return (y,), (2 * abs(y),)


def _weight(a):
    y = a.kernel / a.np.sqrt((a.kernel**2).sum((0, 1), keepdims=True) + 1e-12) * a.scale
    return (y,), (abs(y) + abs(a.scale) / 6,)


def _spectral(a):
    matrix = a.kernel.reshape(-1, 5)
    left = SPECTRAL_U.astype(np.float64)
    stop = (lambda t: t) if a.np is np else jax.lax.stop_gradient
    for _ in range(2):
        right = left @ stop(matrix).T
        right = right / a.np.sqrt((right**2).sum() + 1e-12)
        left = right @ stop(matrix)
        left = left / a.np.sqrt((left**2).sum() + 1e-12)
    sigma = (right @ matrix @ left.T)[0, 0]
    return (a.kernel / sigma,), (abs(a.kernel / sigma) + 1,)


SPECTRAL_U = np.random.default_rng(0).normal(size=(1, 5)).astype(np.float32)
SEGMENTS = np.random.default_rng(1).integers(0, 4, 40)
SEGMENTS[[3, 17]] = -1, 4  # padding
COLUMNS = np.random.default_rng(2).integers(0, 9, 40)


def _packed(a, *, centered=True):
    inside = (SEGMENTS >= 0) & (SEGMENTS < 4)
    same = (SEGMENTS[:, None] == SEGMENTS) & inside * inside[:, None]
    n = np.maximum(same.sum(1), 1)
    mean = (same @ a.x) / n if centered else 0.0
    about = mean[:, None] if centered else 0.0
    var = (same * (a.x[None] - about) ** 2).sum(1) / n
    y = (a.x - mean) / a.np.sqrt(var + (1e-5 if centered else 1e-6)) * a.scale[COLUMNS]
    size = abs(y) + abs(a.scale[COLUMNS]) + abs(a.bias[COLUMNS])
    return (a.np.where(inside, y + a.bias[COLUMNS], 0.0),), (size,)


def _packed_call(norm):
    ids = {"segment_ids": jnp.asarray(SEGMENTS), "num_segments": 4, "feature_ids": jnp.asarray(COLUMNS)}
    return lambda **k: norm(**k, **ids)


OTHERS = [
    Composite(
        "switchable_norm", nl.switchable_norm, _switchable, {"x": (4, 6, 5)},
        {"mean_logits": (3,), "var_logits": (3,), "scale": (5,), "bias": (5,)}, reduce=(0, 1, 2), slack=2.0,
        own_rule=True, large=SPACE | {"mean_logits": (3,), "var_logits": (3,)},
    ),
    Composite(
        "batch_renorm",
        lambda **k: nl.batch_renorm(running_mean=RUNNING, running_var=RUNNING, r_max=1.2, d_max=0.3, **k),
        _renormalized, {"x": (4, 6, 5)}, {"scale": (5,), "bias": (5,)}, reduce=(0, 1), slack=2.0, own_rule=True,
    ),
    Composite(
        "dynamic_tanh", nl.dynamic_tanh, _tanh, {"x": (4, 6, 5)}, {"alpha": (), "scale": (5,), "bias": (5,)}, rules=(),
        slack=2.0, large={"x": (64, 512, 64), "alpha": (), "scale": (64,), "bias": (64,)},
    ),
    Composite(
        "mean_variance_norm", nl.mean_variance_norm, _mvn, {"x": (3, 4, 5, 2)}, reduce=(0, 2, 3), rules=(), slack=2.0
    ),
    Composite("lp_norm_2", nl.lp_norm, lambda a: _power(a, 2, None), {"x": (5, 7)}, reduce=(0, 1), rules=()),
    Composite(
        "lp_norm_3", lambda **k: nl.lp_norm(**k, p=3.0, axis=1), lambda a: _power(a, 3, 1), {"x": (5, 7)}, rules=(),
        slack=3.0,
    ),
    Composite(
        "lp_norm_1", lambda **k: nl.lp_norm(**k, p=1, axis=-1), lambda a: _power(a, 1, 1), {"x": (5, 7)}, rules=()
    ),
    Composite(
        "l2_normalize", nl.l2_normalize, _unit, {"x": (5, 7)}, rules=("reverse",), own_rule=True,
        large={"x": (512, 1024)},
    ),
    Composite(
        "renorm", lambda **k: nl.renorm(**k, p=3.0, axis=1, maxnorm=5.0), _renorm, {"x": (5, 4, 7)}, reduce=(0, 2),
        rules=(), slack=3.0,
    ),
    Composite("weight_norm", nl.weight_norm, _weight, {"kernel": (3, 4, 5)}, {"scale": (5,)}, reduce=(0, 1)),
    Composite(
        "spectral_norm", lambda **k: nl.spectral_norm(**k, u=jnp.asarray(SPECTRAL_U), n_steps=2), _spectral,
        {"kernel": (3, 4, 5)}, reduce=(0, 1, 2), rules=(), slack=3.0,
    ),
    Composite(
        "packed_layer_norm", _packed_call(nl.sparse_layer_norm), _packed, {"x": (40,)}, {"scale": (9,), "bias": (9,)},
        rules=("reverse", "autodiff"), own_rule=True, slack=2.0,
    ),
    Composite(
        "packed_rms_norm", _packed_call(nl.sparse_rms_norm), lambda a: _packed(a, centered=False), {"x": (40,)},
        {"scale": (9,), "bias": (9,)}, rules=("reverse", "autodiff"), own_rule=True, slack=2.0,
    ),
]  # fmt: skip
