"""Batch and group norm as functions of arrays with a `plan`, for the simulator's reports, plan search and traces.

    python -m sim_npu report normlib.kernels:batch_norm --shape 32x2048x49 --dtype bf16 --chip 910b2

As `normlib.kernels.operators`, with one more choice: a plan with a `residency` keeps whole channels in a tile ("row")
or reads them twice ("stream"), in one kernel; a plan with `rows` or `chunk` alone takes moments of parts of so many
rows and channels, merges them and applies a map; by default the cheaper way (`normlib.kernels.channel_cost`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from normlib.kernels.channel_cost import Bytes, pays
from normlib.kernels.channel_grad import channel_norm_grad, grad_bytes
from normlib.kernels.channel_norm import channel_norm, norm_bytes
from normlib.kernels.channel_parts import Over, parts_backward, parts_forward
from normlib.kernels.channel_tiling import channel_tilings
from normlib.kernels.machine import Machine
from normlib.kernels.operators import machine_of, refuse_values
from normlib.kernels.rows_grad import Given
from sim_npu.plan import TilePlan

Struct = jax.ShapeDtypeStruct


def batch_norm(
    x: Float[Array, "N C *R"],
    scale: Float[Array, " C"] | None = None,
    bias: Float[Array, " C"] | None = None,
    *,
    eps: float = 1e-5,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> tuple[Array, Array, Array, Array]:
    """Batch norm by the batch's own statistics: (y, mean, m2, rstd).

    Args:
      x: `[N, C]`, or `[N, C, R]` with channels before their space; computed in float32.
      scale, bias: `[C]` or None.
      eps: added to the variance.
      plan: see above; `rows` (of N) at a time, `chunk` channels per tile.
      machine: "npu", "tpu", "gpu" or "cpu", or a `Machine`.

    Returns:
      y of x's shape and dtype; mean, sum of squared deviations and 1 / sqrt(var + eps), `[C]` in float32.

    Raises:
      ValueError: for an unknown machine, shapes that do not fit, a plan that nothing fits, or arrays (not traced ones)
        given to machine "npu", which `sim_npu.emulate` and `sim_npu.simulate` run.

    Source: Ioffe and Szegedy 2015; Chan et al. 1979 for the merge of rows.

    >>> batch_norm(jnp.arange(8.0).reshape(4, 2), machine="cpu")[1].tolist()
    [3.0, 4.0]
    """
    return _forward(x, scale, bias, _of_batch(x), eps, plan, machine)


def batch_norm_grad(
    x: Float[Array, "N C *R"],
    dy: Float[Array, "N C *R"],
    mean: Float[Array, " C"],
    rstd: Float[Array, " C"],
    scale: Float[Array, " C"] | None = None,
    *,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> tuple[Array, Array, Array]:
    """(dx, dscale, dbias) of `batch_norm`.

    Args: as `batch_norm`; dy of x's shape, mean and rstd `[C]` from the forward.

    Returns:
      dx of x's shape and dtype; dscale and dbias, `[C]` in float32.

    >>> x = jnp.arange(4.0)[:, None]
    >>> batch_norm_grad(x, jnp.ones((4, 1)), jnp.array([1.5]), jnp.array([0.9]), machine="cpu")[2].tolist()
    [4.0]
    """
    return _backward(x, dy, mean, rstd, scale, _of_batch(x), plan, machine)


def group_norm(
    x: Float[Array, "N S C"],
    scale: Float[Array, " C"] | None = None,
    bias: Float[Array, " C"] | None = None,
    *,
    num_groups: int = 32,
    eps: float = 1e-5,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> tuple[Array, Array, Array, Array]:
    """Group norm with channels last: (y, mean, m2, rstd). With as many groups as channels it is instance norm.

    Args: as `batch_norm`; x `[N, S, C]`, statistics over S and the channels of a group.

    Returns:
      y `[N, S, C]` in x's dtype; statistics `[N, C]` in float32, those of its group in every channel.

    Source: Wu and He 2018.

    >>> group_norm(jnp.arange(8.0).reshape(1, 2, 4), num_groups=2, machine="cpu")[1].tolist()
    [[2.5, 2.5, 4.5, 4.5]]
    """
    return _forward(x, scale, bias, _of_groups(x, num_groups), eps, plan, machine)


def group_norm_grad(
    x: Float[Array, "N S C"],
    dy: Float[Array, "N S C"],
    mean: Float[Array, "N C"],
    rstd: Float[Array, "N C"],
    scale: Float[Array, " C"] | None = None,
    *,
    num_groups: int = 32,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> tuple[Array, Array, Array]:
    """(dx, sums of dy * xhat, sums of dy) of `group_norm`: the sums, `[N, C]`, are dscale and dbias of every sample.

    Args: as `group_norm`; dy of x's shape, mean and rstd `[N, C]` from the forward.

    >>> x, ones = jnp.arange(2.0).reshape(1, 2, 1), jnp.ones((1, 1))
    >>> group_norm_grad(x, jnp.ones((1, 2, 1)), ones / 2, ones, num_groups=1, machine="cpu")[2].tolist()
    [[2.0]]
    """
    return _backward(x, dy, mean, rstd, scale, _of_groups(x, num_groups), plan, machine)


def _of_batch(x: Array) -> Over:
    if len(x.shape) not in (2, 3) or 0 in x.shape or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"`x` must be a float array [N, C] or [N, C, R], not empty; got {x.dtype}{list(x.shape)}.")
    return Over((0,) if len(x.shape) == 2 else (0, 2), 1, 1)


def _of_groups(x: Array, groups: int) -> Over:
    if len(x.shape) != 3 or 0 in x.shape or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"`x` must be a float array [N, S, C], not empty; got {x.dtype}{list(x.shape)}.")
    if groups < 1 or x.shape[2] % groups:
        raise ValueError(f"`num_groups` must divide the {x.shape[2]} channels of x; got {groups}.")
    return Over((1,), 2, x.shape[2] // groups)


def _forward(x, scale, bias, over: Over, eps, plan, machine):
    machine = machine_of(machine)
    refuse_values(x, machine)
    scale, bias = (_per_channel(t, name, x, over) for t, name in ((scale, "scale"), (bias, "bias")))
    options: dict[str, Any] = {"eps": eps, "centered": True, "activation": None, "dtype": x.dtype}
    fits = over.fits(x.shape)
    held = norm_bytes(x, scale, bias, sets=over.sets(x.shape)) if fits else None
    if _is_whole(over, x, machine, held, plan):
        out = channel_norm(
            x, scale, bias, sets=over.sets(x.shape), machine=machine, name=over.name, eps=eps, **_tiling(plan)
        )
        assert out is not None  # as `_is_whole` found
        back = over.sets(x.shape).view.back
        y, found = out.y.reshape(x.shape), [back(t) for t in (out.mean, out.m2, out.rstd) if t is not None]
    else:
        y, mean, _, m2, rstd = parts_forward(machine, over, x, scale, bias, None, names=(), **_tile(plan), **options)
        found = [mean, m2, rstd]
    return y, *(_flat(t, over) for t in found)


def _backward(x, dy, mean, rstd, scale, over: Over, plan, machine):
    machine = machine_of(machine)
    refuse_values(x, machine)
    if dy.shape != x.shape:
        raise ValueError(f"`dy` must have x's shape {x.shape}; got {dy.shape}.")
    scale = _per_channel(scale, "scale", x, over)
    mean, rstd = (_statistics(t, name, x, over) for t, name in ((mean, "mean"), (rstd, "rstd")))
    given = Given(dy, mean, jnp.zeros_like(mean), rstd, scale)
    held = grad_bytes(x, given, sets=over.sets(x.shape)) if over.fits(x.shape) else None
    if _is_whole(over, x, machine, held, plan):
        sets = over.sets(x.shape)
        out = channel_norm_grad(x, given, sets=sets, machine=machine, name=f"{over.name}_grad", **_tiling(plan))
        assert out is not None  # as `_is_whole` found
        dx, s0, s1 = out.dx.reshape(x.shape), sets.view.back(out.s0), sets.view.back(out.s1)
    else:
        dx, s0, s1 = parts_backward(
            machine, over, x, *given[:7], names=(), activation=None, behind_dtype=None, **_tile(plan)
        )  # fmt: skip
    return dx, _flat(s1, over), _flat(s0, over)


def _is_whole(over: Over, x, machine: Machine, held: Bytes | None, plan: TilePlan | None) -> bool:
    """Whether the plan, or the price, is for whole channels."""
    asked = _tiling(plan)
    tile = None if held is None else channel_tilings(over.sets(x.shape), machine, held, **asked)
    if asked.get("residency") is not None:
        if tile is None:
            raise ValueError(f"`plan` {plan}: no whole channel of x, shape {x.shape}, fits a tile of {machine.name}.")
        return True
    if held is None or tile is None or any(v is not None for v in asked.values()):
        return False
    return pays(over.sets(x.shape), machine, held, tile)


def _tiling(plan: TilePlan | None) -> dict[str, Any]:
    return {} if plan is None else {"rows": plan.rows, "chunk": plan.chunk, "residency": plan.residency}


def _tile(plan: TilePlan | None) -> dict[str, Any]:
    return {} if plan is None else {"rows": plan.rows, "chunk": plan.chunk}


def _per_channel(t, name: str, x: Array, over: Over):
    if t is None:
        return None
    if t.shape != (x.shape[over.channel],):
        raise ValueError(f"`{name}` must have shape {(x.shape[over.channel],)} beside x {x.shape}; got {t.shape}.")
    return t.reshape([n if i == over.channel else 1 for i, n in enumerate(x.shape)])


def _statistics(t, name: str, x: Array, over: Over):
    kept = [1 if i in over.axes else n for i, n in enumerate(x.shape)]
    flat = tuple(n for i, n in enumerate(x.shape) if i not in over.axes)
    if t.shape != flat:
        raise ValueError(f"`{name}` must have shape {flat} beside x {x.shape}; got {t.shape}.")
    return t.reshape(kept)


def _flat(t: Array, over: Over) -> Array:
    return t.reshape([n for i, n in enumerate(t.shape) if i not in over.axes])


# What the simulator asks of a function: example arguments for a shape, and plans worth trying.


def _arrays(*kinds: str, groups: bool = False) -> Callable[[tuple[int, ...], Any], tuple[Struct, ...]]:
    def example_arrays(shape: tuple[int, ...], dtype: Any) -> tuple[Struct, ...]:
        if groups and len(shape) != 3:
            shape = (shape[0], math.prod(shape[1:-1]), shape[-1])
        channels = shape[-1] if groups else shape[1]
        made = {
            "x": Struct(tuple(shape), dtype), "lanes": Struct((channels,), jnp.float32),
            "sets": Struct((shape[0], channels) if groups else (channels,), jnp.float32),
        }  # fmt: skip
        return tuple(made[k] for k in kinds)

    return example_arrays


def _plans(rows: int, channels: int) -> Callable[..., Iterator[TilePlan]]:
    """Of which axes rows and channels are."""

    def plan_space(x: Any, *rest: Any) -> Iterator[TilePlan]:
        m, c = x.shape[rows], x.shape[channels]
        yield TilePlan()
        chunks = [k for k in (1, 2, 4, 8, 16, 32, 64, 80, 128, 160, 320, 512) if k < c] + [c]
        for residency in ("row", "stream"):
            yield from (TilePlan(rows=m, chunk=k, residency=residency) for k in chunks)
        if len(x.shape) == 2 or rows == 1:  # parts of channels that are last
            yield from (TilePlan(rows=r, chunk=k) for k in chunks if k >= 16 for r in (8, 32, 128, 256) if r <= m)

    return plan_space


_BATCH: dict[Callable, tuple[str, ...]] = {
    batch_norm: ("x", "lanes", "lanes"),
    batch_norm_grad: ("x", "x", "sets", "sets", "lanes"),
}
_GROUPS: dict[Callable, tuple[str, ...]] = {
    group_norm: ("x", "lanes", "lanes"),
    group_norm_grad: ("x", "x", "sets", "sets", "lanes"),
}
for _table, _last in ((_BATCH, False), (_GROUPS, True)):
    for _fn, _kinds in _table.items():
        _fn.example_arrays = _arrays(*_kinds, groups=_last)  # type: ignore[attr-defined]
        _fn.plan_space = _plans(1, 2) if _last else _plans(0, 1)  # type: ignore[attr-defined]
