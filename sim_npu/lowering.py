"""Whether a function with Pallas kernels lowers for TPU or GPU, on a machine that has neither."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

PLATFORMS = ("tpu", "cuda")
# JAX 0.12 wants to know the GPU before it lowers for Triton; any that Triton supports will do.
GPU = AbstractDevice("NVIDIA H100 80GB HBM3", None, "cuda")
_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.$]+)")


class LoweringFailed(RuntimeError):
    """The function does not lower for the platform; `__cause__` is what JAX raised."""


@dataclass(frozen=True)
class Lowered:
    """A successful `lower_check`.

    Attributes:
      platform: "tpu" or "cuda".
      text_bytes: size of the StableHLO text.
      custom_calls: distinct targets, sorted: `tpu_custom_call` for a TPU kernel, `__gpu$xla.gpu.triton` for Triton,
        `mosaic_gpu_v2` for Mosaic GPU. Without any, no kernel was lowered (none there, or all with `interpret=True`).
    """

    platform: str
    text_bytes: int
    custom_calls: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True: what does not lower raises."""
        return True


def lower_check(fn: Callable[..., Any], *args: Any, platform: str = "tpu") -> Lowered:
    """Lower `fn(*args)` for a platform that need not be present.

    Proves that every kernel's primitives, block shapes and memory spaces have a rule in Pallas for that platform. It
    does not prove that the vendor's compiler accepts the result, that the kernel fits its memory, that it computes
    the right values, or how fast it is: those need the device, or for TPU an ahead-of-time compilation.

    For "cuda", pass `compiler_params=pallas.triton.CompilerParams(...)` in the kernel: without it JAX 0.10 lowers for
    Mosaic GPU and JAX 0.12 for Triton, as `custom_calls` shows.

    Args:
      fn: a function, jitted or not.
      args: arrays or ShapeDtypeStructs, nested as `fn` likes.
      platform: "tpu" or "cuda".

    Raises:
      ValueError: on another platform.
      LoweringFailed: with JAX's reason. Errors of `fn` itself while it is traced pass as they are.

    >>> import jax.numpy as jnp
    >>> lower_check(jnp.sin, jax.ShapeDtypeStruct((8,), "float32"), platform="tpu").custom_calls
    ()
    """
    if platform not in PLATFORMS:
        raise ValueError(f"`platform` must be one of {', '.join(PLATFORMS)}; got {platform!r}.")
    mesh = AbstractMesh((1,), ("device",), abstract_device=GPU)
    with use_abstract_mesh(mesh) if platform == "cuda" else contextlib.nullcontext():
        traced = jax.jit(fn).trace(*args)
        try:
            text = traced.lower(lowering_platforms=(platform,)).as_text()
        except (RuntimeError, ValueError, TypeError) as cause:
            name = getattr(fn, "__name__", repr(fn))
            reason = str(cause).split(" Please file an issue", 1)[0].strip()
            raise LoweringFailed(f"`{name}` does not lower for {platform}: {reason}") from cause
    return Lowered(platform, len(text.encode()), tuple(sorted(set(_CUSTOM_CALL.findall(text)))))
