"""Checkpoints by Orbax: written beside and then renamed, so a killed run leaves the previous one whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from train.errors import UserError
from train.loop import NO_TOTALS, Totals
from train.parallel import State


class Checkpoints:
    """The latest checkpoints of a run, in a directory of their own. Use as a context manager.

    Args:
      directory: created if it does not exist.
      keep: how many of the latest ones stay.
    """

    def __init__(self, directory: Path, *, keep: int = 2):
        self.directory = directory
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """Step of the latest whole checkpoint."""
        return self._manager.latest_step()

    def save(self, state: State, totals: Totals) -> None:
        """Write the state after its last step; nothing happens if that step is already saved."""
        step = int(state.step)
        if step != self.latest():
            self._manager.save(step, args=ocp.args.StandardSave(_tree(state, totals)))

    def restore(self, like: State) -> tuple[State, Totals]:
        """The latest state, placed as `like` is, and the totals of its epoch.

        Raises:
          UserError: there is none, or it has other shapes than `like`.
        """
        step = self.latest()
        if step is None:
            raise UserError(f"{self.directory}: no checkpoint to resume from.")
        wanted = _tree(like, NO_TOTALS)
        try:
            tree = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise UserError(
                f"{self.directory}: the checkpoint of step {step} cannot be read into this model: {error}"
            ) from error
        steps, loss, accuracy = np.asarray(tree["totals"]).tolist()
        state = State(tree["step"], tree["params"], like.opt_state, tree["batch_stats"])
        leaves = [tree["opt_state"][str(index)] for index in range(len(jax.tree.leaves(like.opt_state)))]
        opt_state = jax.tree.unflatten(jax.tree.structure(like.opt_state), leaves)
        return state._replace(opt_state=opt_state), Totals(int(steps), loss, accuracy)


def _tree(state: State, totals: Totals) -> dict[str, Any]:
    """The state as nested dictionaries; the optimizer's by number, for its named tuples change between releases."""
    optimizer = {str(index): leaf for index, leaf in enumerate(jax.tree.leaves(state.opt_state))}
    return {
        "step": state.step,
        "params": state.params,
        "opt_state": optimizer,
        "batch_stats": state.batch_stats,
        "totals": np.asarray(totals, np.float64),
    }
