"""The training loop: steps with a bounded queue, evaluation, and what happens at the end of an epoch.

Only jax, flax, optax and NumPy are needed here; progress, logs and checkpoints come in as functions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh

from train.batches import Batches, prefetch, scaled
from train.errors import ConfigError
from train.parallel import Metrics, Mode, State, Step, default_in_flight, make_place, merge_statistics


class Totals(NamedTuple):
    """Sums since the epoch began. Saved with a checkpoint: a resumed epoch then reports what an unbroken one does."""

    steps: int = 0
    loss: float = 0.0
    accuracy: float = 0.0

    def add(self, metrics: Metrics) -> Totals:
        return Totals(self.steps + 1, self.loss + float(metrics.loss), self.accuracy + float(metrics.accuracy))


NO_TOTALS = Totals()


@dataclass(frozen=True)
class Report:
    """What the loop says about a finished step."""

    step: int  # steps done since training began
    epoch: int  # epoch that the step belongs to, from 1
    loss: float
    accuracy: float  # share of the step's rows, 0 … 1
    rows_per_second: float | None  # None until something but compilation has been timed


@dataclass(frozen=True)
class EpochReport:
    """What the loop says at the end of an epoch. Errors are shares, 0 … 1."""

    epoch: int
    step: int
    train_loss: float
    train_error: float
    test_loss: float
    test_error: float


def run_steps(
    step: Step, state: State, batches: Iterable, *, in_flight: int, on_metrics: Callable[[Metrics], None]
) -> State:
    """Run `step` over `batches`, never more than `in_flight` steps ahead of the device.

    Args:
      batches: pairs of placed images and labels.
      in_flight: steps that may be queued; `parallel.default_in_flight` says why this is 1 on host devices.
      on_metrics: called with the metrics of every step, in order, once they are computed.

    Returns:
      The state after the last step, computed.

    Raises:
      ConfigError: `in_flight` below 1.
    """
    if in_flight < 1:
        raise ConfigError(f"`in_flight` is {in_flight}; expected at least 1 step.")
    waiting: deque[Metrics] = deque()
    for images, labels in batches:  # the next batch is prepared while a step runs
        while len(waiting) >= in_flight:
            on_metrics(jax.block_until_ready(waiting.popleft()))
        state, metrics = step(state, images, labels)
        waiting.append(metrics)
    while waiting:
        on_metrics(jax.block_until_ready(waiting.popleft()))
    return jax.block_until_ready(state)


class Speed:
    """Rows per second, over the latest steps; the first step is left out, for it compiles."""

    def __init__(self, rows: int, window: int = 50):
        self.rows, self.times = rows, deque[float](maxlen=window + 1)

    def tick(self) -> float | None:
        self.times.append(time.perf_counter())
        elapsed = self.times[-1] - self.times[0]
        return self.rows * (len(self.times) - 1) / elapsed if elapsed > 0 else None


def fit(
    step: Step,
    state: State,
    batches: Batches,
    *,
    mesh: Mesh,
    mode: Mode,
    epochs: int,
    evaluate: Callable[[State], tuple[float, float]],
    totals: Totals = NO_TOTALS,
    in_flight: int | None = None,
    save_every: int | None = None,
    on_step: Callable[[Report], None] = lambda report: None,
    on_epoch: Callable[[EpochReport], None] = lambda report: None,
    on_save: Callable[[State, Totals], None] = lambda state, totals: None,
) -> State:
    """Train from `state.step` to the end of the last epoch.

    Args:
      evaluate: state → (mean test loss, share of errors), called at the end of every epoch.
      totals: of the epoch that `state` was saved in; the default is right at its start.
      in_flight: steps queued; None for `parallel.default_in_flight`.
      save_every: steps between two calls of `on_save`; it is called after the last step in any case.
      on_step, on_epoch, on_save: called as their reports come up; `on_save` with a state that is computed.

    Returns:
      The final state.
    """
    per_epoch = batches.steps_per_epoch
    last = epochs * per_epoch
    done = int(state.step)
    limit = default_in_flight(mesh) if in_flight is None else in_flight
    place, speed = make_place(mesh, mode), Speed(batches.size)
    placed = prefetch(batches.between(done, last), lambda pair: (place(pair[0]), place(pair[1])))

    def on_metrics(metrics: Metrics):
        nonlocal done, totals
        done += 1
        totals = totals.add(metrics)
        on_step(Report(done, -(-done // per_epoch), float(metrics.loss), float(metrics.accuracy), speed.tick()))

    while done < last:
        stop = min(last, (done // per_epoch + 1) * per_epoch)
        if save_every is not None:
            stop = min(stop, (done // save_every + 1) * save_every)
        # zip asks its first argument first, so no batch is taken from `placed` beyond the stop
        part = (pair for _, pair in zip(range(done, stop), placed))
        state = run_steps(step, state, part, in_flight=limit, on_metrics=on_metrics)
        if done % per_epoch == 0:
            mean = Totals(totals.steps, totals.loss / totals.steps, totals.accuracy / totals.steps)
            loss, error = evaluate(state)
            on_epoch(EpochReport(done // per_epoch, done, mean.loss, 1 - mean.accuracy, loss, error))
            totals = NO_TOTALS
        if done == last or (save_every is not None and done % save_every == 0):
            on_save(state, totals)
    return state


def make_evaluate(
    model: nn.Module, images: np.ndarray, labels: np.ndarray, *, peak: float, mesh: Mesh, rows: int = 1024
) -> Callable[[State], tuple[float, float]]:
    """A function of the state giving (mean loss, share of errors) over all rows, with merged running statistics.

    Args:
      images: `[N, H, W, C]`, uint8.
      rows: evaluated at a time, rounded up to a multiple of the devices; the last part is padded with rows of weight 0.
    """
    size = min(-(-rows // mesh.size), -(-len(labels) // mesh.size)) * mesh.size
    place = make_place(mesh, "jit")

    @jax.jit
    def sums(params: Any, batch_stats: Any, images, labels, weights):
        variables = {"params": params, "batch_stats": merge_statistics(batch_stats)}
        logits: Any = model.apply(variables, images, train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        wrong = jnp.argmax(logits, -1) != labels
        return jnp.sum(weights * losses), jnp.sum(weights * wrong)

    def evaluate(state: State) -> tuple[float, float]:
        loss = errors = 0.0
        for first in range(0, len(labels), size):
            count = min(size, len(labels) - first)
            padding = (0, size - count)
            part = np.pad(scaled(images[first : first + count], peak), (padding, (0, 0), (0, 0), (0, 0)))
            answers = np.pad(labels[first : first + count], padding)
            weights = np.pad(np.ones(count, np.float32), padding)
            found = sums(state.params, state.batch_stats, place(part), place(answers), place(weights))
            loss += float(found[0])  # waits, so one evaluation is in flight at a time
            errors += float(found[1])
        return loss / len(labels), errors / len(labels)

    return evaluate
