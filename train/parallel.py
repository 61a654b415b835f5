"""One training step in three ways of running it on several devices, each with its one right gradient recipe.

The state has the same layout in all of them: parameters and optimizer state once, running statistics with a leading
axis of `copies`: one per device where devices may disagree, as with local batch norm; one where a single program sees
the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import traverse_util
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from train.errors import ConfigError

Mode = Literal["shard_map", "pmap", "jit"]
MODES: tuple[Mode, ...] = get_args(Mode)
AXIS = "data"  # name of the mesh axis over which the batch is split


class State(NamedTuple):
    """Everything that a resumed run needs to continue to the same bits."""

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    batch_stats: Any  # every leaf `[copies, ...]`


class Metrics(NamedTuple):
    """Of one step, over the global batch."""

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]


Step = Callable[[State, Array, Array], tuple[State, Metrics]]


def make_mesh(devices: int | None = None) -> Mesh:
    """A mesh of one axis, `AXIS`, over accelerators if there are enough of them, else over simulated host devices.

    The number of host devices is fixed when JAX first looks for devices: call this before anything that makes an array.

    Args:
      devices: how many; None for all accelerators, or for one host device where there is no accelerator.

    Raises:
      ConfigError: fewer than 1, or JAX already runs with fewer devices.
    """
    if devices is not None:
        if devices < 1:
            raise ConfigError(f"`devices` is {devices}; expected at least 1.")
        configured = getattr(jax.config, "jax_num_cpu_devices", -1)  # -1: not set
        with contextlib.suppress(RuntimeError):  # JAX has started: its devices are what they are, and counted below
            jax.config.update("jax_num_cpu_devices", max(devices, configured))
    found = jax.devices()
    if devices is not None and len(found) < devices and found[0].platform != "cpu":
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave the host out
            found = jax.devices("cpu")
    count = devices if devices is not None else (1 if found[0].platform == "cpu" else len(found))
    if len(found) < count:
        raise ConfigError(
            f"`devices` is {count}, but JAX has already started with {len(found)} device(s); start a new process, or "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={count}."
        )
    return jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,), devices=found[:count])


def axis_name(mode: Mode) -> str | None:
    """The axis that a norm layer may name in `mode`; None where the program sees the global batch."""
    return None if mode == "jit" else AXIS


def default_in_flight(mesh: Mesh) -> int:
    """How many steps may be queued before the loop waits for the first of them.

    One on host devices. With more host devices than cores, the threads that run queued steps can take every core and
    wait for partners that never get one; XLA then ends the process («rendezvous … may be stuck»). Seen on jax 0.10 with
    8 host devices on 2 cores in every mode, with asynchronous dispatch on and off; never when each step was waited for.
    """
    return 1 if mesh.devices.flat[0].platform == "cpu" else 4


def init_state(
    model: nn.Module, optimizer: optax.GradientTransformation, sample: np.ndarray, *, mesh: Mesh, mode: Mode, seed: int
) -> State:
    """A fresh state on the devices of `mesh`.

    Args:
      sample: `[1, H, W, C]`, one image: only its shape and dtype matter.
    """
    # Initialised with train=False: a norm layer then needs neither a bound axis nor a whole virtual batch.
    with jax.default_device(mesh.devices.flat[0]):
        variables = jax.jit(lambda key: model.init(key, jnp.asarray(sample), train=False))(jax.random.key(seed))
        params, stats = variables["params"], variables.get("batch_stats", {})
        copies = 1 if mode == "jit" else mesh.size
        stats = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (copies, *leaf.shape)), stats)
        state = State(jnp.zeros((), jnp.int32), params, optimizer.init(params), stats)
    return jax.device_put(state, state_shardings(state, mesh=mesh, mode=mode))


def state_shardings(state: State, *, mesh: Mesh, mode: Mode) -> State:
    """Where each leaf of the state lives: everything on every device, but the running statistics each on its own."""
    same, own = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))
    shardings = jax.tree.map(lambda _: same, state)
    return shardings._replace(batch_stats=jax.tree.map(lambda _: same if mode == "jit" else own, state.batch_stats))


def make_place(mesh: Mesh, mode: Mode) -> Callable[[np.ndarray], Array]:
    """A function that puts this process's part of a batch, `[rows, ...]`, on the devices, split along the rows."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))

    def place(rows: np.ndarray) -> Array:
        if mode == "pmap":  # pmap wants the device axis spelt out: [devices, rows / devices, ...]
            rows = rows.reshape(len(mesh.local_devices), -1, *rows.shape[1:])
        return jax.make_array_from_process_local_data(sharding, rows)

    return place


def make_step(model: nn.Module, optimizer: optax.GradientTransformation, *, mesh: Mesh, mode: Mode) -> Step:
    """The compiled training step `step(state, images, labels) -> (state, metrics)`; the given state is used up.

    Raises:
      ConfigError: an unknown `mode`.
    """

    def local_loss(params, stats, images, labels):
        """Mean loss of the rows at hand; also the new running statistics and the metrics."""
        variables = {"params": params, "batch_stats": stats}
        logits, updates = model.apply(variables, images, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
        return loss, (updates.get("batch_stats", {}), Metrics(loss, accuracy))

    def update(state: State, grads, stats, metrics: Metrics) -> tuple[State, Metrics]:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(state.step + 1, params, opt_state, stats), metrics

    def own(stats):  # [1, ...] of this device (or program) -> [...]
        return jax.tree.map(lambda leaf: leaf[0], stats)

    def shared(stats):  # and back
        return jax.tree.map(lambda leaf: leaf[None], stats)

    def shard_map_step(state: State, images, labels):
        # check_vma=True: JAX knows that parameters are the same on all devices, so it sums their gradients by itself.
        # The recipe: average the loss, and use the gradients as they come. A psum of the gradients would be wrong: they
        # arrive summed, and would become `devices` times too big.
        def mean_loss(params):
            loss, (stats, metrics) = local_loss(params, own(state.batch_stats), images, labels)
            return lax.pmean(loss, AXIS), (stats, lax.pmean(metrics, AXIS))

        grads, (stats, metrics) = jax.grad(mean_loss, has_aux=True)(state.params)
        return update(state, grads, shared(stats), metrics)

    def pmap_step(state: State, images, labels):
        # pmap (and shard_map with check_vma=False): every device differentiates its own loss with respect to its own
        # copy. The recipe: gradient of the local loss, then pmean of the gradients. Averaging the loss instead would be
        # wrong: the transpose of psum is again a psum here, and each device would keep the gradient of its own rows.
        def loss_of(params):
            return local_loss(params, state.batch_stats, images, labels)

        grads, (stats, metrics) = jax.grad(loss_of, has_aux=True)(state.params)
        return update(state, lax.pmean(grads, AXIS), stats, lax.pmean(metrics, AXIS))

    def jit_step(state: State, images, labels):
        # One program sees the global batch; the compiler splits it. The recipe: no collective written at all.
        def loss_of(params):
            return local_loss(params, own(state.batch_stats), images, labels)

        grads, (stats, metrics) = jax.grad(loss_of, has_aux=True)(state.params)
        return update(state, grads, shared(stats), metrics)

    same, split = PartitionSpec(), PartitionSpec(AXIS)
    if mode == "shard_map":
        specs: Any = State(same, same, same, split)  # type: ignore[arg-type]
        mapped = jax.shard_map(
            shard_map_step, mesh=mesh, in_specs=(specs, split, split), out_specs=(specs, same), check_vma=True
        )
        return jax.jit(mapped, donate_argnums=0)
    if mode == "pmap":
        axes: Any = State(None, None, None, 0)  # type: ignore[arg-type]
        return jax.pmap(
            pmap_step,
            axis_name=AXIS,
            in_axes=(axes, 0, 0),
            out_axes=(axes, None),
            devices=list(mesh.devices.flat),
            donate_argnums=0,
        )
    if mode == "jit":
        everywhere = NamedSharding(mesh, same)
        return jax.jit(jit_step, donate_argnums=0, out_shardings=everywhere)
    raise ConfigError(f"`mode` is {mode!r}; expected one of {', '.join(MODES)}.")


def merge_statistics(batch_stats: Any, counts: Any = None) -> Any:
    """Running statistics of several devices as one set, weighted by the rows that each has seen.

    mean = Σ nᵢ·meanᵢ / Σ nᵢ;  var = Σ nᵢ·(varᵢ + (meanᵢ − mean)²) / Σ nᵢ

    Running means are averages over many steps, so they differ less than the batches did: the result is close to the
    mean of the local variances, which two rows underestimate. It shows their worth and repairs nothing.

    Args:
      batch_stats: nested dictionary of layers with `mean` and `var`, each `[copies, C]`.
      counts: `[copies]`, rows seen by each copy; None for equal counts.

    Returns:
      The same nesting with leaves `[C]`, in float32.

    Source: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".

    >>> stats = {"BatchNorm_0": {"mean": jnp.array([[0.0], [2.0]]), "var": jnp.array([[1.0], [1.0]])}}
    >>> merged = merge_statistics(stats)["BatchNorm_0"]
    >>> float(merged["mean"][0]), float(merged["var"][0])
    (1.0, 2.0)
    """
    flat = traverse_util.flatten_dict(batch_stats)
    merged = {}
    for path, means in flat.items():
        if path[-1] != "mean":
            continue
        weights = jnp.ones(means.shape[0]) if counts is None else jnp.asarray(counts, jnp.float32)
        weights = (weights / weights.sum())[:, None]
        mean = jnp.sum(weights * means, axis=0)
        merged[path] = mean
        variances = flat[(*path[:-1], "var")]
        merged[(*path[:-1], "var")] = jnp.sum(weights * (variances + (means - mean) ** 2), axis=0)
    return traverse_util.unflatten_dict(merged)
