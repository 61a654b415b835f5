"""Write docs/ops_nn.md: which of ops-nn's normalization operators have a counterpart here, and how to call it.

usage: python tools/ops_nn_coverage.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import normlib

sys.path.insert(0, str(Path(__file__).parent))
from ops_nn_table import ROWS  # noqa: E402

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ops_nn.md"

HEAD = """# ops-nn's normalization operators

Huawei CANN's ops-nn has 75 operators in its norm family. This table gives our counterpart of each and a call:
every expression is run by the tests, over arrays that `tools/ops_nn_coverage.py` makes. ops-nn's thirty quantised
names are one argument here, `quant=`. Names and attributes are those of the norm folder of the ops-nn repository.

**{covered} of {total}** have a working counterpart. Written by `python tools/ops_nn_coverage.py`.

| ops-nn | normlib | call | note |
|---|---|---|---|
"""


def examples() -> dict[str, Any]:
    """The names that the table's expressions may use: small arrays of ops-nn's inputs."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def data_parallel(step, *arrays):
        return jax.vmap(step, axis_name="data")(*(a.reshape(2, -1, *a.shape[1:]) for a in arrays))

    names = {name: array(4, 8) for name in ("x", "x1", "x2", "dy", "dsum")}
    names |= {name: array(8) for name in ("gamma", "beta", "bias")}
    names |= {name: array(4, 6, 5, 5) for name in ("image", "dimage")}
    names |= {name: array(2, 3, 4, 4, 8) for name in ("video", "dvideo")}
    names |= {name: array(6) for name in ("weight", "offset", "mean")} | {"variance": jnp.abs(array(6)) + 0.5}
    names |= {name: array(2, 3, 8) for name in ("tokens", "dtokens")}
    names |= {name: array(2, 8) for name in ("shift_s", "shift_b")}
    names |= {"s1": 0.05, "s2": 0.1, "z1": 3, "z2": -2, "smooth1": jnp.ones(8), "smooth2": jnp.full(8, 2.0)}
    codes = normlib.Quantized(jnp.asarray(rng.integers(-128, 128, (4, 6, 5, 5)), jnp.int8), jnp.float32(0.1), None)
    names |= {"codes": codes, "moments": normlib.Moments.of(names["image"], (0, 2, 3))}
    return names | {
        "normlib": normlib, "jax": jax, "jnp": jnp, "data_parallel": data_parallel,
        "channel": lambda t: t.reshape(1, -1, 1, 1),
    }  # fmt: skip


def page() -> str:
    """The whole page."""
    covered = sum(row.function is not None for row in ROWS)
    lines = [
        f"| {row.name} | {f'`normlib.{row.function}`' if row.function else '–'} | "
        f"{f'`{row.call}`' if row.call else '–'} | {row.note} |"
        for row in ROWS
    ]
    return HEAD.format(covered=covered, total=len(ROWS)) + "\n".join(lines) + "\n"


def main() -> int:
    if "--check" in sys.argv:
        return 0 if PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
