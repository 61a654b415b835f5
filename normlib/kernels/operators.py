"""The kernels as functions of plain arrays with a `plan`, for the simulator's reports, plan search and traces.

    python -m sim_npu report normlib.kernels:rms_norm --shape 4096x4096 --dtype bf16 --chip 910b2

Each takes `plan=` (a `sim_npu.TilePlan` or None) and `machine=` (a name in `normlib.kernels.machine.MACHINES`), and has
`example_arrays(shape, dtype)` and `plan_space(*arrays)`. Norms in models call `normlib.layer_norm` and its like, which
reach the same kernels through the passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from normlib.kernels.affine import affine_tile, elementwise, grad_tile
from normlib.kernels.machine import MACHINES, Machine
from normlib.kernels.phases import CORES
from normlib.kernels.rows import row_norm
from normlib.kernels.rows_grad import Given, row_norm_grad
from normlib.kernels.sums import sums
from normlib.kernels.view import rows_of
from sim_npu.plan import TilePlan

Struct = jax.ShapeDtypeStruct


def _tiling(plan: TilePlan | None) -> dict[str, Any]:
    return {} if plan is None else {"rows": plan.rows, "chunk": plan.chunk, "residency": plan.residency}


def _tile(plan: TilePlan | None) -> dict[str, Any]:
    return {} if plan is None else {"rows": plan.rows, "chunk": plan.chunk}


def machine_of(machine: str | Machine) -> Machine:
    """A machine, or that of a name; a ValueError that lists the names otherwise."""
    if isinstance(machine, Machine):
        return machine
    if machine not in MACHINES:
        raise ValueError(f"`machine` must be one of {', '.join(MACHINES)}; got {machine!r}.")
    return MACHINES[machine]


def _check(x: Array, machine: str | Machine, *, same=None, lanes=None, rows=None) -> None:
    """Raise unless x is `[N, D]` and the arrays named in `same`, `lanes` and `rows` are `[N, D]`, `[D]` and `[N]`."""
    if len(x.shape) != 2 or 0 in x.shape or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"`x` must be a float array [N, D] with N, D > 0; got {x.dtype}{list(x.shape)}.")
    for wanted, given in ((x.shape, same), (x.shape[1:], lanes), (x.shape[:1], rows)):
        for name, t in (given or {}).items():
            if t is not None and tuple(t.shape) != tuple(wanted):
                raise ValueError(f"`{name}` must have shape {tuple(wanted)} beside x {x.shape}; got {tuple(t.shape)}.")
    refuse_values(x, machine_of(machine))


def refuse_values(x: Array, machine: Machine) -> None:
    """Raise for an array, not a traced one, of any shape beside the machine "npu"."""
    if machine.name == "npu" and not isinstance(x, jax.core.Tracer):
        raise ValueError(
            "`machine` 'npu' is a simulated core: for values call sim_npu.emulate(kernel, x, ...), for time "
            "sim_npu.simulate(kernel, x, ...); machine='cpu' runs the kernel in Pallas' interpreter."
        )


def layer_norm(
    x: Float[Array, "N D"],
    scale: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-5,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> tuple[Array, Array, Array, Array]:
    """Layer norm of rows in one kernel: (y, mean, m2, rstd).

    Args:
      x: `[N, D]`; computed in float32.
      scale, bias: `[D]` or None.
      eps: added to the variance.
      plan: `rows` per tile, `chunk` lanes at a time, `residency` "row" or "stream"; by default what fits.
      machine: "npu", "tpu", "gpu" or "cpu", or a `Machine`.

    Returns:
      y `[N, D]` in x's dtype; mean, sum of squared deviations and 1 / sqrt(var + eps), `[N]` in float32.

    Raises:
      ValueError: for an unknown machine, shapes that do not fit, or arrays (not traced ones) given to machine "npu",
        which `sim_npu.emulate` and `sim_npu.simulate` run.

    Source: Ba, Kiros and Hinton 2016; Chan et al. 1979 for the merge of chunks.

    >>> layer_norm(jnp.arange(8.0).reshape(2, 4), machine="cpu")[1].tolist()
    [1.5, 5.5]
    """
    _check(x, machine, lanes={"scale": scale, "bias": bias})
    view = _rows(x, scale, bias)
    out = row_norm([x], _lanes(scale), _lanes(bias), view=view, eps=eps, machine=machine_of(machine), **_tiling(plan))
    assert out.mean is not None
    return out.y.reshape(x.shape), out.mean.reshape(-1), out.m2.reshape(-1), out.rstd.reshape(-1)


def rms_norm(
    x: Float[Array, "N D"],
    scale: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-6,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> tuple[Array, Array]:
    """Root-mean-square norm of rows in one kernel: (y, rstd).

    Args: as `layer_norm`.

    Returns:
      y `[N, D]` in x's dtype and 1 / sqrt(mean(x**2) + eps), `[N]` in float32.

    Source: Zhang and Sennrich 2019.

    >>> rms_norm(jnp.full((1, 4), 2.0), machine="cpu")[0].round(3).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    _check(x, machine, lanes={"scale": scale})
    view = _rows(x, scale)
    out = row_norm(
        [x], _lanes(scale), view=view, eps=eps, centered=False, machine=machine_of(machine), **_tiling(plan)
    )  # fmt: skip
    return out.y.reshape(x.shape), out.rstd.reshape(-1)


def add_rms_norm(
    x1: Float[Array, "N D"],
    x2: Float[Array, "N D"],
    scale: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-6,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> tuple[Array, Array, Array]:
    """Root-mean-square norm of a sum in one kernel: (y, x1 + x2, rstd), the sum written too.

    Args: as `layer_norm`, with x2 of x1's shape.

    >>> add_rms_norm(jnp.ones((1, 4)), jnp.ones((1, 4)), machine="cpu")[1].tolist()
    [[2.0, 2.0, 2.0, 2.0]]
    """
    return _add_norm(x1, x2, scale, None, False, eps, plan, machine)


def add_layer_norm(
    x1: Float[Array, "N D"],
    x2: Float[Array, "N D"],
    scale: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-5,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> tuple[Array, Array, Array]:
    """Layer norm of a sum in one kernel: (y, x1 + x2, rstd), the sum written too.

    Args: as `layer_norm`, with x2 of x1's shape.

    >>> y, _, _ = add_layer_norm(jnp.arange(4.0)[None], jnp.zeros((1, 4)), machine="cpu")
    >>> print(np.asarray(y).round(2))
    [[-1.34 -0.45  0.45  1.34]]
    """
    return _add_norm(x1, x2, scale, bias, True, eps, plan, machine)


def layer_norm_grad(
    x: Float[Array, "N D"],
    dy: Float[Array, "N D"],
    mean: Float[Array, " N"],
    rstd: Float[Array, " N"],
    scale: Float[Array, " D"] | None = None,
    *,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> Array:
    """dx of `layer_norm`, `[N, D]` in x's dtype, in one kernel.

    Args: as `layer_norm`; dy of x's shape, mean and rstd `[N]` from the forward.

    >>> x = jnp.arange(4.0)[None]
    >>> layer_norm_grad(x, jnp.ones((1, 4)), jnp.array([1.5]), jnp.array([0.9]), machine="cpu").round(3).tolist()
    [[0.0, 0.0, 0.0, 0.0]]
    """
    _check(x, machine, same={"dy": dy}, rows={"mean": mean, "rstd": rstd}, lanes={"scale": scale})
    view = _rows(x, scale)
    mean, low, rstd = (t.reshape(-1, 1) for t in (mean, jnp.zeros_like(mean), rstd))
    given = Given(dy, mean, low, rstd, _lanes(scale))
    return row_norm_grad([x], given, view=view, machine=machine_of(machine), **_tiling(plan)).ds[0].reshape(x.shape)


def rms_norm_grad(
    x: Float[Array, "N D"],
    dy: Float[Array, "N D"],
    rstd: Float[Array, " N"],
    scale: Float[Array, " D"] | None = None,
    *,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> Array:
    """dx of `rms_norm`, `[N, D]` in x's dtype, in one kernel.

    Args: as `layer_norm_grad`.

    >>> rms_norm_grad(jnp.ones((1, 4)), jnp.ones((1, 4)), jnp.ones(1), machine="cpu").tolist()
    [[0.0, 0.0, 0.0, 0.0]]
    """
    _check(x, machine, same={"dy": dy}, rows={"rstd": rstd}, lanes={"scale": scale})
    view = _rows(x, scale)
    given = Given(dy, None, None, rstd.reshape(-1, 1), _lanes(scale))
    return row_norm_grad([x], given, view=view, machine=machine_of(machine), **_tiling(plan)).ds[0].reshape(x.shape)


def channel_sums(
    x: Float[Array, "N C"], *, plan: TilePlan | None = None, machine: str | Machine = "npu"
) -> tuple[Array, Array]:
    """Sums of x and x**2 of every channel, channels last: the reduction of a batch norm. `[C]` each, float32.

    Args: as `layer_norm`; `plan.rows` per tile, `plan.chunk` channels at a time.

    >>> [t.tolist() for t in channel_sums(jnp.ones((3, 2)), machine="cpu")]
    [[3.0, 3.0], [3.0, 3.0]]
    """
    _check(x, machine)
    found = sums(
        lambda x: (x, x * x), [x], axes=(0,), number=2, name="channel_sums", machine=machine_of(machine), **_tile(plan)
    )  # fmt: skip
    return found[0].reshape(-1), found[1].reshape(-1)


def channel_grad_sums(
    x: Float[Array, "N C"],
    dy: Float[Array, "N C"],
    mean: Float[Array, " C"],
    rstd: Float[Array, " C"],
    *,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> tuple[Array, Array]:
    """Sums of dy and dy * xhat of every channel: dbias and dscale of a batch norm. `[C]` each, float32.

    Args: as `channel_sums`; dy of x's shape, mean and rstd `[C]`.

    >>> [t.tolist() for t in channel_grad_sums(*[jnp.ones((3, 2))] * 2, jnp.zeros(2), jnp.ones(2), machine="cpu")]
    [[3.0, 3.0], [3.0, 3.0]]
    """
    _check(x, machine, same={"dy": dy}, lanes={"mean": mean, "rstd": rstd})
    found = sums(
        lambda x, dy, mean, rstd: (dy, dy * ((x - mean) * rstd)), [x, dy, _lanes(mean), _lanes(rstd)], axes=(0,),
        number=2, name="channel_grad_sums", machine=machine_of(machine), **_tile(plan),
    )  # fmt: skip
    return found[0].reshape(-1), found[1].reshape(-1)


def channel_affine(
    x: Float[Array, "N C"],
    mean: Float[Array, " C"],
    rstd: Float[Array, " C"],
    scale: Float[Array, " C"] | None = None,
    bias: Float[Array, " C"] | None = None,
    *,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> Array:
    """(x - mean) * rstd * scale + bias per channel, rounded to x's dtype once: the apply step of a batch norm.

    Args: as `channel_grad_sums`; scale and bias `[C]` or None.

    >>> channel_affine(jnp.ones((1, 2)), jnp.ones(2), jnp.ones(2), None, jnp.ones(2), machine="cpu").tolist()
    [[1.0, 1.0]]
    """
    _check(x, machine, lanes={"mean": mean, "rstd": rstd, "scale": scale, "bias": bias})
    operands = [x, *(_lanes(t) for t in (mean, jnp.zeros_like(mean), rstd, scale, bias))]
    return elementwise(
        affine_tile, operands, name="channel_affine", dtype=x.dtype, machine=machine_of(machine), **_tile(plan)
    )  # fmt: skip


def channel_grad(
    x: Float[Array, "N C"],
    dy: Float[Array, "N C"],
    mean: Float[Array, " C"],
    rstd: Float[Array, " C"],
    weight: Float[Array, " C"] | None,
    c1: Float[Array, " C"],
    c0: Float[Array, " C"],
    *,
    plan: TilePlan | None = None,
    machine: str | Machine = "npu",
) -> Array:
    """dx = (dy * weight - c1 * (x - mean) - c0) * rstd per channel: the last step of a batch norm's backward.

    Args: as `channel_grad_sums`; c0 and c1 `[C]`: the means of g = dy * weight and of g * xhat * rstd.

    >>> ones = jnp.ones(2)
    >>> channel_grad(jnp.ones((1, 2)), jnp.ones((1, 2)), ones, ones, None, ones, ones, machine="cpu").tolist()
    [[0.0, 0.0]]
    """
    lanes = {"mean": mean, "rstd": rstd, "weight": weight, "c1": c1, "c0": c0}
    _check(x, machine, same={"dy": dy}, lanes=lanes)
    operands = [x, dy, *(_lanes(t) for t in (mean, jnp.zeros_like(mean), rstd, weight, c1, c0))]
    return elementwise(
        grad_tile, operands, name="channel_grad", dtype=x.dtype, machine=machine_of(machine), **_tile(plan)
    )  # fmt: skip


def _add_norm(x1, x2, scale, bias, centered, eps, plan, machine) -> tuple[Array, Array, Array]:
    _check(x1, machine, same={"x2": x2}, lanes={"scale": scale, "bias": bias})
    out = row_norm(
        [x1, x2], _lanes(scale), _lanes(bias), view=_rows(x1, scale, bias), eps=eps, centered=centered,
        residual_dtype=x1.dtype, machine=machine_of(machine), name="add_layer_norm" if centered else "add_rms_norm",
        **_tiling(plan),
    )  # fmt: skip
    assert out.residual is not None
    return out.y.reshape(x1.shape), out.residual.reshape(x1.shape), out.rstd.reshape(-1)


def _rows(x: Array, *parameters: Array | None):
    view = rows_of(x.shape, (1,), [x.shape, *((1, x.shape[1]) for p in parameters if p is not None)])
    assert view is not None  # the last axis of two
    return view


def _lanes(t: Array | None) -> Array | None:
    return None if t is None else t.reshape(1, -1)


# What the simulator asks of a function: example arguments for a shape, and plans worth trying.


def _arrays(*kinds: str) -> Callable[[tuple[int, ...], Any], tuple[Struct, ...]]:
    def example_arrays(shape: tuple[int, ...], dtype: Any) -> tuple[Struct, ...]:
        rows, lanes = math.prod(shape[:-1]), shape[-1]
        made = {
            "x": Struct((rows, lanes), dtype),
            "lanes": Struct((lanes,), jnp.float32),
            "rows": Struct((rows,), jnp.float32),
        }
        return tuple(made[k] for k in kinds)

    return example_arrays


def _row_plans(x: Any, *rest: Any) -> Iterator[TilePlan]:
    n, d = x.shape
    share = -(-n // CORES)  # one tile for every core
    rows = [r for r in sorted({1, 2, 4, 8, 16, 32, 64, share, -(-share // 2)}) if r <= n]
    yield TilePlan()
    yield from (TilePlan(rows=r, residency="row") for r in rows if r * d <= 32 * 1024)
    chunks = [c for c in (1024, 2048, 4096, 8192) if c < d]
    resident = [(r, c) for c in chunks for r in rows if r * d <= 48 * 1024]
    yield from (TilePlan(rows=r, chunk=c, residency="row") for r, c in resident)
    streamed = [(r, c) for c in chunks for r in rows if r * c <= 16 * 1024]
    yield from (TilePlan(rows=r, chunk=c, residency="stream") for r, c in streamed)


def _tile_plans(x: Any, *rest: Any) -> Iterator[TilePlan]:
    n, c = x.shape
    yield TilePlan()
    chunks = [k for k in (64, 128, 256, 512, 1024, 4096) if k < c] or [c]
    yield from (
        TilePlan(rows=r, chunk=k) for k in chunks for r in (1, 8, 16, 32, 64, 128, 256) if r <= n and r * k <= 16384
    )


_ROWS: dict[Callable, tuple[str, ...]] = {
    layer_norm: ("x", "lanes", "lanes"),
    rms_norm: ("x", "lanes"),
    add_rms_norm: ("x", "x", "lanes"),
    add_layer_norm: ("x", "x", "lanes", "lanes"),
    layer_norm_grad: ("x", "x", "rows", "rows", "lanes"),
    rms_norm_grad: ("x", "x", "rows", "lanes"),
}
_CHANNELS: dict[Callable, tuple[str, ...]] = {
    channel_sums: ("x",),
    channel_grad_sums: ("x", "x", "lanes", "lanes"),
    channel_affine: ("x", "lanes", "lanes", "lanes", "lanes"),
    channel_grad: ("x", "x", "lanes", "lanes", "lanes", "lanes", "lanes"),
}
for _table, _plans in ((_ROWS, _row_plans), (_CHANNELS, _tile_plans)):
    for _fn, _kinds in _table.items():
        _fn.example_arrays = _arrays(*_kinds)  # type: ignore[attr-defined]
        _fn.plan_space = _plans  # type: ignore[attr-defined]
