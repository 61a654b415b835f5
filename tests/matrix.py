"""The table of operators that the shared tests run over: one line each, with its float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

import normlib as nl
from tests import reference


@dataclass(frozen=True)
class Operator:
    """An operator in one layout.

    Attributes:
      name: of the test.
      call: (x, scale, bias, where=, rule=, **options) -> y.
      shape: of x.
      feature_axes: of x that scale and bias have.
      reduce: axes reduced, for the reference.
      options: for the reference: groups, channel, centered, offset, eps.
    """

    name: str
    call: Callable[..., Any]
    shape: tuple[int, ...]
    feature_axes: tuple[int, ...]
    reduce: tuple[int, ...]
    options: dict = field(default_factory=dict)

    @property
    def parameter_shape(self):
        return tuple(self.shape[a] for a in self.feature_axes)

    @property
    def kept_shape(self):
        return tuple(s if i in self.feature_axes else 1 for i, s in enumerate(self.shape))

    def at(self, shape):
        return Operator(self.name, self.call, shape, self.feature_axes, self.reduce, self.options)

    def reference(self, x, scale=None, bias=None, dy=None, where=None):
        raised = [None if p is None else np.asarray(p).reshape(self.kept_shape) for p in (scale, bias)]
        return reference.norm(x, *raised, dy, axes=self.reduce, where=where, **self.options)


def _y(function, **fixed):
    def call(x, scale=None, bias=None, **options):
        out = function(x, scale, bias, **fixed, **options)
        return out.y if isinstance(out, nl.BatchNormOutput) else out

    return call


GN = {"groups": 4, "eps": 1e-5}
OPERATORS = [
    Operator("batch_norm", _y(nl.batch_norm), (12, 5, 7), (2,), (0, 1), {"eps": 1e-5}),
    Operator("batch_norm_first", _y(nl.batch_norm, axis=1), (6, 7, 3, 5), (1,), (0, 2, 3), {"eps": 1e-5}),
    Operator("batch_norm_two_axes", _y(nl.batch_norm, axis=(1, -1)), (12, 3, 5), (1, 2), (0,), {"eps": 1e-5}),
    Operator("layer_norm", _y(nl.layer_norm), (9, 37), (1,), (1,), {"eps": 1e-5}),
    Operator("layer_norm_two_axes", _y(nl.layer_norm, axis=(-2, -1)), (5, 3, 11), (1, 2), (1, 2), {"eps": 1e-5}),
    Operator("layer_norm_first", _y(nl.layer_norm, axis=0), (33, 6), (0,), (0,), {"eps": 1e-5}),
    Operator("rms_norm", _y(nl.rms_norm), (9, 37), (1,), (1,), {"eps": 1e-6, "centered": False}),
    Operator(
        "rms_norm_gemma", _y(nl.rms_norm, scale_offset=1.0), (4, 5, 33), (2,), (2,),
        {"eps": 1e-6, "centered": False, "offset": 1.0},
    ),
    Operator("group_norm", _y(nl.group_norm, num_groups=4), (3, 7, 12), (2,), (1,), {**GN, "channel": 2}),
    Operator(
        "group_norm_first", _y(nl.group_norm, num_groups=4, axis=1), (3, 12, 5, 3), (1,), (2, 3), {**GN, "channel": 1}
    ),
    Operator("group_norm_rank2", _y(nl.group_norm, num_groups=4), (5, 20), (1,), (), {**GN, "channel": 1}),
    Operator("instance_norm", _y(nl.instance_norm), (3, 11, 5), (2,), (1,), {"eps": 1e-5}),
    Operator("instance_norm_first", _y(nl.instance_norm, axis=1), (3, 5, 4, 3), (1,), (2, 3), {"eps": 1e-5}),
]  # fmt: skip
BY_NAME = {op.name: op for op in OPERATORS}


@dataclass
class Inputs:
    """Arrays of one case: x and dy in `dtype`, parameters in float32 (or `dtype`), rounded already."""

    x: Any
    scale: Any
    bias: Any
    dy: Any
    where: Any


def inputs(op: Operator, dtype=jnp.float32, *, mean=1.0, masked=False, parameter_dtype=jnp.float32, seed=0) -> Inputs:
    """Random arrays for `op`; a mask leaves at least two entries in every set, and NaN stands behind it."""
    rng = np.random.default_rng([seed, len(op.name), *op.shape])
    x = jnp.asarray(rng.normal(size=op.shape) * rng.uniform(0.5, 2) + mean, jnp.float32).astype(dtype)
    dy = jnp.asarray(rng.normal(size=op.shape), jnp.float32).astype(dtype)
    scale = jnp.asarray(rng.normal(size=op.parameter_shape), jnp.float32).astype(parameter_dtype)
    bias = jnp.asarray(rng.normal(size=op.parameter_shape), jnp.float32).astype(parameter_dtype)
    where = None
    if masked:
        where = rng.random(op.shape) < 0.7
        reduced = op.reduce or (op.options["channel"],)
        where[tuple(slice(0, 2) if a in reduced else slice(None) for a in range(len(op.shape)))] = True
        x = jnp.where(where, x, jnp.nan)
        dy = jnp.where(where, dy, 0)
    return Inputs(x, scale, bias, dy, where)
