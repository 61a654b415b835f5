"""The passes that the shared tests run on, each with its options."""

from __future__ import annotations

import normlib as nl

# name -> (backend, options); "gpu" and "tpu" are those machines' tilings, interpreted where there is no such machine
PASSES = {
    "xla": ("xla", {}),
    "cpu": ("pallas", {"platform": "cpu"}),
    "gpu": ("pallas", {"platform": "gpu"}),
    "tpu": ("pallas", {"platform": "tpu"}),
    "npu": ("npu", {"precision": "fp32"}),
}
TILE_PASSES = ("cpu", "gpu", "npu")


def on(name):
    """Norms traced inside run on this pass."""
    backend, options = PASSES[name]
    return nl.use_backend(backend, **options)
