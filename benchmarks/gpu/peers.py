"""Whole norms, forward and with their gradients: both passes of normlib, Flax and (where it has CUDA) PyTorch."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import normlib as nl
from benchmarks.gpu.speed import medians
from normlib.kernels.machine import Machine

EPS = 1e-5
PEERS = ("pallas", "xla", "flax", "torch")
SHAPES = {
    "layer_norm": ((32768, 1024), (16384, 4096), (4096, 16384)),
    "rms_norm": ((32768, 1024), (16384, 4096), (4096, 16384)),
    "batch_norm": ((64, 56, 56, 256), (64, 14, 14, 1024)),  # channels last
    "group_norm": ((16, 64, 64, 320), (4, 128, 128, 256)),  # channels last, 32 groups
}


def _ours(name: str) -> Callable[..., Any]:
    return {
        "layer_norm": lambda x, g, b: nl.layer_norm(x, g, b, eps=EPS),
        "rms_norm": lambda x, g, b: nl.rms_norm(x, g, eps=EPS),
        "batch_norm": lambda x, g, b: nl.batch_norm(x, g, b, eps=EPS).y,
        "group_norm": lambda x, g, b: nl.group_norm(x, g, b, num_groups=32, eps=EPS),
    }[name]


def _flax(name: str, channels: int, dtype: Any) -> Callable[..., Any]:
    options: dict[str, Any] = {"epsilon": EPS, "dtype": dtype}
    layer: nn.Module
    mutable: Any
    layer, mutable = {
        "layer_norm": (nn.LayerNorm(**options), False),
        "rms_norm": (nn.RMSNorm(**options), False),
        "batch_norm": (nn.BatchNorm(use_running_average=False, **options), ["batch_stats"]),
        "group_norm": (nn.GroupNorm(num_groups=32, **options), False),
    }[name]

    def call(x, g, b):
        params = {"scale": g} if name == "rms_norm" else {"scale": g, "bias": b}
        stats = {"mean": jnp.zeros(channels), "var": jnp.ones(channels)}
        given = {"params": params, "batch_stats": stats} if mutable else {"params": params}
        found = layer.apply(given, x, mutable=mutable)
        return found[0] if mutable else found

    return call


def _calls(norm: Callable[..., Any], backend: str | None, arrays: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """Forward, and forward with all gradients."""

    def forward(x, g, b):
        if backend is None:
            return norm(x, g, b)
        with nl.use_backend(backend):
            return norm(x, g, b)

    def both(x, g, b, dy):
        y, pull = jax.vjp(forward, x, g, b)
        return y, pull(dy)

    one, two = jax.jit(forward), jax.jit(both)
    return {"forward": lambda: one(*arrays[:3]), "both": lambda: two(*arrays)}


def _torch(name: str, shape: tuple[int, ...], bf16: bool) -> dict[str, Callable[[], Any]]:
    """The same through PyTorch, channels last where there are images; {} without CUDA."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    f = torch.nn.functional
    c = shape[-1]
    dtype = torch.bfloat16 if bf16 else torch.float32
    x, dy = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    if len(shape) == 4:  # [N, C, H, W] whose memory is [N, H, W, C]
        x, dy = x.permute(0, 3, 1, 2), dy.permute(0, 3, 1, 2)
    g, b = (torch.ones(c, device="cuda", dtype=torch.float32 if len(shape) == 4 and name == "batch_norm" else dtype)
            for _ in range(2))  # fmt: skip
    for t in (x, g, b):
        t.requires_grad_()
    norm = {
        "layer_norm": lambda: f.layer_norm(x, (c,), g, b, EPS),
        "rms_norm": lambda: f.rms_norm(x, (c,), g, EPS),
        "batch_norm": lambda: f.batch_norm(x, None, None, g, b, True, 0.1, EPS),
        "group_norm": lambda: f.group_norm(x, 32, g, b, EPS),
    }[name]

    def forward():
        with torch.no_grad():
            return norm()

    def both():
        return torch.autograd.grad(norm(), [x, g] if name == "rms_norm" else [x, g, b], dy)

    return {"forward": _synchronised(torch, forward), "both": _synchronised(torch, both)}


def _synchronised(torch: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    """A call whose result `jax.block_until_ready` waits for."""

    class Result:
        @staticmethod
        def block_until_ready() -> None:
            torch.cuda.synchronize()

    def run() -> Result:
        call()
        return Result()

    return run


def run(machine: Machine, dry: bool, until: float) -> dict[str, Any]:
    """One row a norm, shape, dtype and direction: microseconds of every peer."""
    options: dict[str, Any] = {"rounds": 1, "least": 0.0} if dry else {"rounds": 9, "least": 0.01}
    rows: list[dict[str, Any]] = []
    print(f"{'norm':44} {'pallas us':>10} {'xla us':>10} {'Flax us':>10} {'PyTorch us':>10}")
    for name, shapes in SHAPES.items():
        for shape in shapes:
            for dtype in (jnp.bfloat16, jnp.float32):
                if time.perf_counter() > until:
                    return {"peers": rows}
                if dry and dtype == jnp.float32:
                    continue
                small = (2, *(4 for _ in shape[2:]), 64) if dry else shape
                for row in _row(name, small, dtype, options):
                    rows.append(row)
                    cells = " ".join(
                        f"{row.get(peer, float('nan')):10.1f}" for peer in ("pallas", "xla", "flax", "torch")
                    )
                    print(f"{row['norm']:44} {cells}", flush=True)
    return {"peers": rows}


def _row(name: str, shape: tuple[int, ...], dtype: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    c, keys = shape[-1], jax.random.split(jax.random.key(0), 2)
    x, dy = ((jax.random.normal(key, shape) + 1).astype(dtype) for key in keys)
    arrays = (x, jnp.ones(c), jnp.zeros(c), dy)
    peers = {
        "pallas": _calls(_ours(name), "pallas", arrays), "xla": _calls(_ours(name), "xla", arrays),
        "flax": _calls(_flax(name, c, dtype), None, arrays), "torch": _torch(name, shape, dtype == jnp.bfloat16),
    }  # fmt: skip
    rows = []
    for direction in ("forward", "both"):
        took = medians({peer: calls[direction] for peer, calls in peers.items() if calls}, **options)
        label = f"{name} {'x'.join(map(str, shape))} {jnp.dtype(dtype).name} {direction}"
        rows.append({"norm": label, **{peer: 1e6 * t for peer, t in took.items()}})
    return rows
