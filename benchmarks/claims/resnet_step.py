"""A whole train step of ResNet-50, laid out from its jaxpr with one norm or another: nothing of it runs.

The time of the norms is the difference to the same step without norms: what a norm adds, wherever its operators ended
up when element-wise chains became kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as flax_linen
from jax.nn import initializers

import normlib
import sim_npu
from benchmarks.claims import channel_kernels as kernels
from normlib import linen as norm
from sim_npu import CapacityError, StepReport
from train.models import resnet50

MOMENTUM = 0.9


class NoNorm(flax_linen.Module):
    """Gives x back."""

    dtype: Any = None
    scale_init: Any = None

    @flax_linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _kernel_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, interpret: bool) -> tuple[jax.Array, ...]:
    return kernels.batch_norm(x, scale, bias, interpret=interpret)


def _kernel_forward(x, scale, bias, interpret):
    y, mean, rstd = _kernel_norm(x, scale, bias, interpret)
    return (y, mean, rstd), (x, mean, rstd, scale)


def _kernel_backward(interpret, kept, cotangents):
    x, mean, rstd, scale = kept
    return kernels.batch_norm_grad(x, cotangents[0], mean, rstd, scale, interpret=interpret)


_kernel_norm.defvjp(_kernel_forward, _kernel_backward)


class KernelNorm(flax_linen.Module):
    """Batch norm by the kernels of `channel_kernels`, with Flax's names; nothing differentiates its statistics."""

    use_running_average: bool = False
    dtype: Any = None
    scale_init: Callable = initializers.ones
    interpret: bool = False

    @flax_linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = x.shape[-1:]
        scale = self.param("scale", self.scale_init, c, jnp.float32)
        bias = self.param("bias", initializers.zeros, c, jnp.float32)
        mean = self.variable("batch_stats", "mean", jnp.zeros, c, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, c, jnp.float32)
        y, batch_mean, rstd = _kernel_norm(x.reshape(-1, *c), scale, bias, self.interpret)
        if not self.is_initializing():
            mean.value = MOMENTUM * mean.value + (1 - MOMENTUM) * batch_mean
            var.value = MOMENTUM * var.value + (1 - MOMENTUM) * (1 / rstd**2 - 1e-5)
        return y.reshape(x.shape)


NORMS: dict[str, Callable[..., flax_linen.Module]] = {
    "flax": functools.partial(flax_linen.BatchNorm, momentum=MOMENTUM),
    "normlib": functools.partial(norm.BatchNorm, momentum=MOMENTUM),
    "tiles": functools.partial(
        norm.BatchNorm, momentum=MOMENTUM, method="fast"
    ),  # one pass for both sums: see `lay_out`
    "lean": KernelNorm,
    "none": NoNorm,
}


def make_step(model: flax_linen.Module) -> tuple[Callable, optax.GradientTransformation]:
    """`step(params, stats, opt_state, images, labels)`: forward, backward and SGD with momentum."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params, stats, opt_state, images, labels):
        def loss_of(params):
            variables = {"params": params, "batch_stats": stats}
            logits, updates = model.apply(variables, images, train=True, mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            return loss, updates.get("batch_stats", {})

        (loss, stats_after), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), stats_after, state, loss

    return step, optimizer


def abstract_state(
    model: flax_linen.Module, optimizer: optax.GradientTransformation, *, batch: int, size: int
) -> tuple:
    """Shapes of the arguments of a step."""
    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    variables = jax.eval_shape(functools.partial(model.init, train=True), jax.random.key(0), images)
    params = variables["params"]
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return params, variables.get("batch_stats", {}), jax.eval_shape(optimizer.init, params), images, labels


@functools.cache
def lay_out(
    norm_name: str, *, batch: int, size: int = 224, dtype: str = "bfloat16", fuse: bool = True, formats: str = "fractal"
) -> StepReport:
    """One ResNet-50 step on the simulated 910b2.

    Args:
      norm_name: of `NORMS`. "flax" and "normlib" are plain XLA. "tiles" is normlib on its tile kernels, with both sums
        from one pass as in training while the running mean is near (method="fast" costs the same; the default would be
        laid out with the branch for a mean that is far). "lean" takes two passes forward and two backward.
      batch, size: images, and their height and width.
      dtype: of the computation; parameters are float32.
      fuse, formats: of `sim_npu.simulate_step`.

    Raises:
      CapacityError: if a kernel of the step does not fit the unified buffer.
    """
    model = resnet50(norm=NORMS[norm_name], dtype=jnp.dtype(dtype))
    step, optimizer = make_step(model)
    state = abstract_state(model, optimizer, batch=batch, size=size)
    if norm_name == "tiles":
        report = normlib.profile_step(step, *state, fuse=fuse, formats=formats).report
    else:
        report = sim_npu.simulate_step(step, *state, fuse=fuse, formats=formats)
    if too_big := [note for note in report.notes if "unified buffer" in note]:
        raise CapacityError(too_big[0])
    return report


@functools.cache
def norm_shapes(*, batch: int, size: int = 224) -> tuple[tuple[int, ...], ...]:
    """The shapes of the arrays that ResNet-50 normalises, in order."""
    seen = []

    class Record(NoNorm):
        def __call__(self, x):
            seen.append(x.shape)
            return x

    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    jax.eval_shape(functools.partial(resnet50(norm=Record).init, train=True), jax.random.key(0), images)
    return tuple(seen)


def compiled_memory(norm_name: str, *, batch: int, size: int, dtype: str) -> int:
    """Bytes of temporaries of the compiled step on this machine, its state donated."""
    model = resnet50(norm=NORMS[norm_name], dtype=jnp.dtype(dtype))
    step, optimizer = make_step(model)
    state = abstract_state(model, optimizer, batch=batch, size=size)
    compiled: Any = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*state).compile()
    return compiled.memory_analysis().temp_size_in_bytes
