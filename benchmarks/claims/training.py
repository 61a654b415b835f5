"""Claims about training, by short runs on scikit-learn's digits: learning rates, initial values, steps, first scales.

All runs of a net (learning rates × initial values × seeds) are one compiled program, a vmap over them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import normlib
from benchmarks.claims.registry import Figure, Outcome, claim, less
from train.data import load_digits

WIDTH, DEPTH, ROWS = 64, 6, 64
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
GAINS = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the usual standard deviation sqrt(2 / n) of a weight
SEEDS = 3
ROUNDS, STEPS = 40, 5  # the test error is taken after every round of so many steps
TRAINED = 10.0  # per cent of test errors at which a run counts as trained
MOMENTUM = 0.9


class Net(NamedTuple):
    """Weights, biases and scales of the layers, the first axis of `hidden*` being the layer."""

    first: jax.Array
    hidden: jax.Array
    last: jax.Array
    scale: jax.Array
    bias: jax.Array


class Running(NamedTuple):
    """Running mean and variance of every layer."""

    mean: jax.Array
    var: jax.Array


def initial(key: jax.Array, gain: jax.Array | float, *, depth: int) -> Net:
    """He's normal weights times `gain`; scales of 1, biases of 0."""
    keys = jax.random.split(key, 3)

    def weights(key, *shape):
        return gain * math.sqrt(2 / shape[-2]) * jax.random.normal(key, shape)

    return Net(
        weights(keys[0], 64, WIDTH),
        weights(keys[1], depth, WIDTH, WIDTH),
        weights(keys[2], WIDTH, 10),
        jnp.ones((depth, WIDTH)),
        jnp.zeros((depth, WIDTH)),
    )


def logits(net: Net, running: Running, images: jax.Array, *, normed: bool, train: bool) -> tuple[jax.Array, Running]:
    """`[N, 64]` → `[N, 10]` and the new running statistics: `depth` times dense, batch norm or none, ReLU."""

    def layer(h, parameters):
        weight, scale, bias, mean, var = parameters
        h = h @ weight
        if not normed:
            return jax.nn.relu(h + bias), (mean, var)
        if not train:
            return jax.nn.relu(normlib.batch_norm_inference(h, mean, var, scale, bias)), (mean, var)
        y, moments = normlib.batch_norm(h, scale, bias)
        seen = moments.mean, moments.m2 / moments.count
        kept = (MOMENTUM * old + (1 - MOMENTUM) * new for old, new in zip((mean, var), seen))
        return jax.nn.relu(y), tuple(kept)

    h, kept = jax.lax.scan(layer, images @ net.first, (net.hidden, net.scale, net.bias, *running))
    return h @ net.last, Running(*kept)


def loss(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1))


@functools.cache
def digits() -> tuple[np.ndarray, ...]:
    """Training images and labels, test images and labels; images `[N, 64]` of mean 0 and deviation 1."""
    data = load_digits()
    images = [part.reshape(len(part), -1).astype(np.float32) for part in (data.train_images, data.test_images)]
    mean, std = images[0].mean(), images[0].std()
    return (images[0] - mean) / std, data.train_labels, (images[1] - mean) / std, data.test_labels


@functools.cache
def batches(steps: int) -> np.ndarray:
    """Row numbers `[steps, ROWS]`, the same for every run."""
    rng = np.random.default_rng(0)
    rows = len(digits()[1])
    return np.stack([rng.permutation(rows)[:ROWS] for _ in range(steps)])


def errors(normed: bool) -> np.ndarray:
    """Per cent of test errors, `[rates, gains, seeds, ROUNDS]`; 90 for a run that is no longer finite."""
    images, labels, test_images, test_labels = map(jnp.asarray, digits())
    rows = jnp.asarray(batches(ROUNDS * STEPS)).reshape(ROUNDS, STEPS, ROWS)

    def run(rate, gain, key):
        def step(state, rows):
            net, running = state

            def loss_of(net):
                scores, kept = logits(net, running, images[rows], normed=normed, train=True)
                return loss(scores, labels[rows]), kept

            gradients, running = jax.grad(loss_of, has_aux=True)(net)
            return (jax.tree.map(lambda p, g: p - rate * g, net, gradients), running), None

        def round_of(state, rows):
            state, _ = jax.lax.scan(step, state, rows)
            net, running = state
            scores, _ = logits(net, running, test_images, normed=normed, train=False)
            wrong = 100 * jnp.mean(jnp.argmax(scores, -1) != test_labels)
            return state, jnp.where(jnp.isfinite(scores).all(), wrong, 90.0)

        start = initial(key, gain, depth=DEPTH), Running(jnp.zeros((DEPTH, WIDTH)), jnp.ones((DEPTH, WIDTH)))
        return jax.lax.scan(round_of, start, rows)[1]

    grid = np.stack([g.ravel() for g in np.meshgrid(RATES, GAINS, np.arange(SEEDS), indexing="ij")])
    keys = jax.random.split(jax.random.key(0), SEEDS)[grid[2].astype(int)]
    found = jax.jit(jax.vmap(run))(jnp.float32(grid[0]), jnp.float32(grid[1]), keys)
    return np.asarray(found).reshape(len(RATES), len(GAINS), SEEDS, ROUNDS)


@functools.cache
def sweep() -> dict[str, np.ndarray]:
    """`errors` without and with batch norm: one sweep serves three claims."""
    return {"none": errors(False), "batch norm": errors(True)}


_NET = f"{DEPTH} dense layers of {WIDTH} with ReLU on the digits, plain SGD, {ROUNDS * STEPS} steps of {ROWS} rows"


@claim("learning-rate", "batch norm allows larger learning rates", basis="measured", seconds=40)
def learning_rate() -> Outcome:
    usual = GAINS.index(1.0)
    final = {name: np.median(found[:, usual, :, -1], axis=1) for name, found in sweep().items()}
    largest = {name: max(r for r, e in zip(RATES, values) if e <= TRAINED) for name, values in final.items()}
    lines = ["| learning rate | " + " | ".join(map(str, RATES)) + " |", "|---|" + "---|" * len(RATES)]
    lines += [f"| {name} | " + " | ".join(f"{e:.1f}" for e in values) + " |" for name, values in final.items()]
    return Outcome(
        f"{_NET}, {len(RATES)} learning rates, {SEEDS} seeds: the largest at which the median test error ends at "
        f"{TRAINED:g} % or below.",
        (
            Figure("times as large", largest["batch norm"] / largest["none"], asked=2, unit="", threshold=True),
            Figure("largest with batch norm", largest["batch norm"], unit=""),
            Figure("without", largest["none"], unit=""),
        ),
        note="The source gives no figure; twice as large is asked.",
        detail="Per cent of test errors at the end, median:\n\n" + "\n".join(lines),
    )


@claim("initial-values", "batch norm needs less care with initial values", basis="measured", seconds=1)
def initial_values() -> Outcome:
    final = {name: np.median(found[..., -1], axis=2).min(axis=0) for name, found in sweep().items()}
    fixed = {name: np.median(found[..., -1], axis=2)[RATES.index(0.1)] for name, found in sweep().items()}
    lines = ["| times the usual deviation | " + " | ".join(map(str, GAINS)) + " |", "|---|" + "---|" * len(GAINS)]
    for what, table in (("best learning rate of each", final), ("learning rate 0.1", fixed)):
        for name, values in table.items():
            lines.append(f"| {name}, {what} | " + " | ".join(f"{e:.1f}" for e in values) + " |")
    counts = {name: float(sum(e <= TRAINED for e in values)) for name, values in fixed.items()}
    more = counts["batch norm"] - counts["none"]
    return Outcome(
        f"{_NET}, weights of {len(GAINS)} sizes ({GAINS[0]:g} to {GAINS[-1]:g} times the usual), {SEEDS} seeds, "
        f"learning rate 0.1: how many of the sizes end at {TRAINED:g} % test error or below, median.",
        (
            Figure("more of them trained", more, asked=1, unit="", threshold=True),
            Figure("with batch norm", counts["batch norm"], unit=f" of {len(GAINS)}"),
            Figure("without", counts["none"], unit=f" of {len(GAINS)}"),
        ),
        note="The source gives no figure.",
        detail="Per cent of test errors at the end, median:\n\n" + "\n".join(lines),
    )


@claim("fewer-steps", "batch norm trains in 30–50 % fewer steps", basis="measured", seconds=1)
def fewer_steps() -> Outcome:
    usual = GAINS.index(1.0)
    goals = (20.0, TRAINED, 7.0)
    needed: dict[float, dict[str, float]] = {}
    for goal in goals:
        needed[goal] = {}
        for name, found in sweep().items():
            below = np.median(found[:, usual], axis=1) <= goal  # [rates, rounds]
            first = np.where(below.any(1), below.argmax(1) + 1, np.inf) * STEPS
            needed[goal][name] = first.min()
    lines = ["| test error | without | with batch norm | fewer |", "|---|---|---|---|"]
    saved = [less(steps["none"], steps["batch norm"]) for steps in needed.values()]
    for (goal, steps), gain in zip(needed.items(), saved):
        lines.append(f"| {goal:g} % | {steps['none']:g} | {steps['batch norm']:g} | {gain:.0f} % |")
    return Outcome(
        f"{_NET}, usual initial values, {SEEDS} seeds: steps until the median test error is at a goal, each net at its "
        f"own best learning rate, looked at every {STEPS} steps.",
        tuple(Figure(f"fewer steps to {goal:g} %", gain, asked=30) for goal, gain in zip(goals, saved)),
        detail="\n".join(lines),
    )


BLOCKS, FIRST_SCALES = 32, (0.0, 0.1, 0.2, 0.3, 1.0)
BLOCK_RATES, BLOCK_STEPS, BLOCK_SEEDS = (0.01, 0.03, 0.1, 0.3, 1.0), 100, 3


def residual_losses() -> np.ndarray:
    """Mean training loss of the last 20 steps, `[scales, rates, seeds]`: blocks x + norm(relu(norm(x W)) V)."""
    images, labels, *_ = map(jnp.asarray, digits())
    rows = jnp.asarray(batches(BLOCK_STEPS))

    def run(first_scale, rate, key):
        inner, outer = (initial(k, 1.0, depth=BLOCKS) for k in jax.random.split(key))
        outer = outer._replace(scale=jnp.full((BLOCKS, WIDTH), first_scale))

        def block(x, parameters):
            inner, outer = parameters
            h = jax.nn.relu(normlib.batch_norm(x @ inner[0], *inner[1:]).y)
            return x + normlib.batch_norm(h @ outer[0], *outer[1:]).y, None

        def step(nets, rows):
            def loss_of(nets):
                stacked = [(net.hidden, net.scale, net.bias) for net in nets]
                h, _ = jax.lax.scan(block, images[rows] @ nets[0].first, stacked)
                return loss(jax.nn.relu(h) @ nets[0].last, labels[rows])

            value, gradients = jax.value_and_grad(loss_of)(nets)
            return jax.tree.map(lambda p, g: p - rate * g, nets, gradients), value

        losses = jax.lax.scan(step, (inner, outer), rows)[1]
        return jnp.mean(losses[-20:])

    grid = np.stack([g.ravel() for g in np.meshgrid(FIRST_SCALES, BLOCK_RATES, np.arange(BLOCK_SEEDS), indexing="ij")])
    keys = jax.random.split(jax.random.key(1), BLOCK_SEEDS)[grid[2].astype(int)]
    found = jax.jit(jax.vmap(run))(jnp.float32(grid[0]), jnp.float32(grid[1]), keys)
    return np.asarray(found).reshape(len(FIRST_SCALES), len(BLOCK_RATES), BLOCK_SEEDS)


@claim("first-scale", "the scale of a deep residual net's norms started at 0.1–0.3", basis="measured", seconds=40)
def first_scale() -> Outcome:
    found = np.nan_to_num(np.median(residual_losses(), axis=2), nan=np.inf)
    best = dict(zip(FIRST_SCALES, found.min(axis=1)))
    advised = min(best[s] for s in (0.1, 0.2, 0.3))
    head = "| first scale | " + " | ".join(f"rate {r:g}" for r in BLOCK_RATES) + " |"
    lines = [head, "|---" * (1 + len(BLOCK_RATES)) + "|"]
    lines += [f"| {s:g} | " + " | ".join(f"{v:.3f}" for v in row) + " |" for s, row in zip(FIRST_SCALES, found)]
    return Outcome(
        f"{BLOCKS} residual blocks of two dense layers of {WIDTH} with batch norm on the digits, plain SGD, "
        f"{BLOCK_STEPS} steps of {ROWS} rows, {BLOCK_SEEDS} seeds: mean training loss of the last 20 steps, the scale "
        "of each branch's last norm started at 0.1–0.3 against 1, each at its best learning rate.",
        (
            Figure("less loss than from 1", less(best[1.0], advised), asked=10, threshold=True),
            Figure("less loss than from 0", less(best[0.0], advised)),
        ),
        note="The source gives no figure; 10 % less loss is asked.",
        detail="Training loss, median of the seeds:\n\n" + "\n".join(lines),
    )
