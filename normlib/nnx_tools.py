"""Tools for whole nnx models: the moments that every batch norm sees, and batch norms with other arguments."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from flax import nnx as flax_nnx

from normlib import nnx
from normlib._layers import check_batch_norm
from normlib._models import check_changes, measured, without_name

BATCH_NORMS = (flax_nnx.BatchNorm, nnx.BatchNorm)
EXTENDED = (nnx.BatchNormAct, nnx.ConditionalBatchNorm)


class BatchMoments(flax_nnx.Variable):
    """What a batch norm measured, for the duration of a call."""


def call_with_moments(model: Any, *args, method: str = "__call__", **kwargs) -> tuple[Any, Any]:
    """`model(...)`, and the moments of what each of its batch norms was given.

    Flax's own BatchNorm and normlib's are measured, in training and evaluation mode alike, by one more pass over
    their input: this device's entries, those where a `mask` holds. A layer called twice has both calls merged. The
    call does to `model` what it always does (running statistics move in training mode); to leave them alone measure
    a copy:

        graph, state = nnx.split(model)
        measure = jax.jit(lambda batch: call_with_moments(nnx.merge(graph, state), batch)[1])

    Args:
      model: any nnx module.
      args, kwargs: for the call.
      method: name of the method to call.

    Returns:
      (what the method returns, moments): the latter in the structure of `nnx.state(model, nnx.BatchStat)`, as dicts,
      with one `Moments` per layer.

    >>> from flax import nnx
    >>> y, moments = call_with_moments(nnx.BatchNorm(1, rngs=nnx.Rngs(0)), jnp.array([[1.0], [3.0]]))
    >>> moments.mean.tolist(), int(moments.count[0])
    ([2.0], 2)
    """
    layers = [node for _, node in flax_nnx.iter_modules(model) if isinstance(node, BATCH_NORMS)]
    kinds = [type(layer) for layer in layers]
    for layer, kind in zip(layers, kinds):
        layer.__class__ = _measuring(kind)
    try:
        y = getattr(model, method)(*args, **kwargs)
    finally:
        for layer, kind in zip(layers, kinds):
            layer.__class__ = kind
    return y, without_name(flax_nnx.to_pure_dict(flax_nnx.pop(model, BatchMoments)))


@functools.cache
def _measuring(kind: type) -> type:
    """A subclass of a batch norm that keeps the moments of its input."""

    def call(self, x, *args, **kwargs):
        moments = measured(self, x, kwargs.get("mask"))
        seen = getattr(self, "moments", None)
        self.moments = BatchMoments(moments if seen is None else seen.get_value().merge(moments))
        return kind.__call__(self, x, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def convert_batch_norm(model: Any, **changes: Any) -> Any:
    """A copy of `model` in which every batch norm is a `normlib.nnx.BatchNorm` with `changes` to its arguments.

    Every other argument stays, and so do parameters, statistics and their paths. Layers in lists and dicts, and
    layers used in several places, are converted once and stay shared. BatchNormAct and ConditionalBatchNorm keep their
    class; other subclasses of BatchNorm are left alone.

    Args:
      model: any nnx module; untouched.
      changes: arguments of `normlib.nnx.BatchNorm` such as axis_name="data" (SyncBN), virtual_batch_size=32 (Ghost
        BN), frozen=True, momentum, unbiased=True. Not those that change which parameters or statistics exist.

    Returns:
      The converted copy, with variables of its own: make optimisers from it.

    Raises:
      TypeError: for no change at all, an argument BatchNorm does not have, or one that would change its variables.
      ValueError: for settings that contradict one another.

    >>> from flax import nnx
    >>> ghost = convert_batch_norm(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), virtual_batch_size=2)
    >>> ghost(jnp.ones((4, 2))).shape, ghost.virtual_batch_size
    ((4, 2), 2)
    """
    signature = inspect.signature(nnx.BatchNorm.__init__).parameters
    check_changes(signature, changes)
    model = flax_nnx.clone(model)
    for _, node in flax_nnx.iter_modules(model):
        if type(node) not in (*BATCH_NORMS, *EXTENDED):
            continue
        if type(node) not in EXTENDED:
            node.__class__ = nnx.BatchNorm
        for name, parameter in signature.items():
            if not hasattr(node, name) and parameter.default is not inspect.Parameter.empty and _kept(name):
                setattr(node, name, parameter.default)
        for name, value in changes.items():
            setattr(node, name, flax_nnx.data(value) if name == "quant" and value is not None else value)
        check_batch_norm(node)
    return model


def _kept(name: str) -> bool:
    """Whether a layer keeps the argument `name` after its construction."""
    return not name.endswith(("_init", "_metadata"))
