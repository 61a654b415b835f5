"""The loop: steps in flight, order of reports, when it evaluates and saves, evaluation over all rows."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.batches import Batches
from train.errors import ConfigError
from train.loop import Totals, fit, make_evaluate, run_steps
from train.models import MLP, NormChoice
from train.parallel import Metrics, State, init_state, make_mesh

START = State(jnp.zeros((), jnp.int32), {}, {}, {})


class Counter:
    """A step that counts how far it is ahead of its reports; loss is the step's number, accuracy 1/2."""

    def __init__(self):
        self.given = self.reported = self.most = 0

    def __call__(self, state, images, labels):
        self.given += 1
        self.most = max(self.most, self.given - self.reported)
        loss = jnp.asarray(float(self.given))
        return state._replace(step=jnp.asarray(self.given)), Metrics(loss, jnp.asarray(0.5))

    def report(self, metrics):
        self.reported += 1
        assert float(metrics.loss) == self.reported


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_steps_are_in_flight_than_allowed(limit):
    step = Counter()

    state = run_steps(step, START, [(0, 0)] * 7, in_flight=limit, on_metrics=step.report)

    assert (step.most, step.reported, int(state.step)) == (limit, 7, 7)


def test_zero_steps_in_flight_are_refused():
    with pytest.raises(ConfigError, match="`in_flight` is 0"):
        run_steps(Counter(), START, [], in_flight=0, on_metrics=print)


def fit_counted(*, start=0, totals=None, epochs=3, save_every=4):
    """5 steps an epoch; returns the epochs reported, the steps saved and the totals saved with them."""
    step, epoch_reports, saves = Counter(), [], {}
    step.given = step.reported = start
    fit(
        step,
        START._replace(step=jnp.asarray(start)),
        Batches(np.zeros((80, 2, 2, 1), np.uint8), np.zeros(80, np.int32), size=16),
        mesh=make_mesh(8),
        mode="shard_map",
        epochs=epochs,
        evaluate=lambda state: (float(state.step), 0.25),
        save_every=save_every,
        on_epoch=epoch_reports.append,
        on_save=lambda state, totals: saves.update({int(state.step): totals}),
        **({} if totals is None else {"totals": totals}),
    )
    return epoch_reports, saves


def test_epochs_and_saves_come_at_their_steps():
    epochs, saves = fit_counted()

    assert [(r.epoch, r.step, r.train_loss, r.train_error) for r in epochs] == [
        (1, 5, 3.0, 0.5),
        (2, 10, 8.0, 0.5),
        (3, 15, 13.0, 0.5),
    ]
    assert [(r.test_loss, r.test_error) for r in epochs] == [(5.0, 0.25), (10.0, 0.25), (15.0, 0.25)]
    assert list(saves) == [4, 8, 12, 15]
    assert saves[8] == Totals(3, 6.0 + 7 + 8, 1.5)


def test_a_resumed_epoch_reports_what_an_unbroken_one_does():
    epochs, saves = fit_counted()
    later, _ = fit_counted(start=8, totals=saves[8])

    assert later == epochs[1:]


def test_nothing_runs_after_the_last_step():
    assert fit_counted(start=15) == ([], {})


def test_evaluation_counts_every_row_once():
    mesh = make_mesh(8)
    model, optimizer = MLP(NormChoice("sync_bn", 2, 8), classes=3, widths=(8,)), optax.sgd(0.1)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (37, 2, 2, 1), dtype=np.uint8)
    labels = rng.integers(0, 3, 37).astype(np.int32)
    state = init_state(model, optimizer, np.zeros((1, 2, 2, 1), np.float32), mesh=mesh, mode="shard_map", seed=0)

    loss, error = make_evaluate(model, images, labels, peak=255.0, mesh=mesh, rows=16)(state)

    dense = state.params["Dense_0"]  # fresh running statistics: mean 0, variance 1
    hidden = (images.reshape(37, -1) / 255) @ np.array(dense["kernel"], np.float64) / np.sqrt(1 + 1e-5)
    logits = np.maximum(hidden, 0) @ np.array(state.params["Dense_1"]["kernel"], np.float64)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(37), labels]
    assert loss == pytest.approx(losses.mean(), rel=1e-5)
    assert error == pytest.approx((logits.argmax(1) != labels).mean())
