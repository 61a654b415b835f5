"""2,000 steps on 8 host devices end, in a process of its own, so that a hang is a failure and not the suite's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import numpy as np, optax
from train.loop import run_steps
from train.models import MLP, NormChoice
from train.parallel import axis_name, default_in_flight, init_state, make_mesh, make_place, make_step

mode, norm, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
mesh = make_mesh(8)
model = MLP(NormChoice(norm, 2, 8, axis_name=axis_name(mode)), widths=(32, 32))
optimizer = optax.sgd(1e-3)
images = np.random.default_rng(0).uniform(size=(16, 4, 4, 1)).astype(np.float32)
state = init_state(model, optimizer, images[:1], mesh=mesh, mode=mode, seed=0)
place = make_place(mesh, mode)
batch = place(images), place(np.arange(16, dtype=np.int32) % 10)
step = make_step(model, optimizer, mesh=mesh, mode=mode)
seen = []
state = run_steps(step, state, (batch for _ in range(steps)), in_flight=default_in_flight(mesh), on_metrics=seen.append)
assert len(seen) == int(state.step) == steps and np.isfinite(float(seen[-1].loss))
print("finished", int(state.step))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, norm",
    [
        pytest.param("shard_map", "sync_bn", marks=pytest.mark.fast),  # on the newer JAX too
        ("pmap", "ghost_bn"),
        ("jit", "sync_bn"),
    ],
)
def test_two_thousand_steps_on_eight_host_devices_end(mode, norm):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode, norm, "2000"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "finished 2000"
