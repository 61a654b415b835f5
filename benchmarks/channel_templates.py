"""Which template ops-nn's rules pick for a norm over channels, which way ours takes, and what each would take.

The second half of `python -m benchmarks.templates`. ops-nn's templates are of three kinds, and so are ways of our
kernel: whole channels that stay in a tile ("kept"), whole channels that are read twice ("streamed"), parts of channels
with their moments merged ("in parts").
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import sim_npu
from normlib import kernels
from normlib.batch_act import NAMED
from normlib.kernels.machine import MACHINES
from normlib.kernels.rows import row_norm
from normlib.kernels.view import groups_of
from sim_npu import TilePlan
from sim_npu.footprint import CapacityError

CORES = 48
KEPT, STREAMED = TilePlan(residency="row"), TilePlan(residency="stream")
WAYS = {"kept": [KEPT], "streamed": [STREAMED], "in parts": [TilePlan(chunk=512), TilePlan(chunk=2048)]}
STAGES = ((64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7))  # channels and side of ResNet-50's stages
UNET = ((320, 64), (640, 32), (1280, 16), (1280, 8))
FIRST = tuple((n, c, hw * hw) for n in (2, 32) for c, hw in STAGES)  # [N, C, HW]
LAST = tuple((n * hw * hw, c) for n in (2, 32) for c, hw in STAGES)  # [N * HW, C]
SAMPLES = tuple((n, hw * hw, c) for n in (2, 8) for c, hw in UNET)  # [N, HW, C]
GROUPS = 32


@dataclass(frozen=True)
class Rule:
    """ops-nn's choice for one operator: the shapes it is asked for, (template, which way that is), our kernel."""

    operator: str
    shapes: Sequence[tuple[int, ...]]
    choose: Callable[[tuple[int, ...]], tuple[str, str]]
    kernel: Callable[..., Any]
    options: dict[str, Any]


def fits(kernel: Callable[..., Any], shape: tuple[int, ...], **options: Any) -> bool:
    """Whether whole channels stay: by our tiles, since ops-nn's condition depends on its own buffers."""
    return _us(kernel, _arrays(kernel, shape), KEPT, **options) is not None


def batch_norm_a2(shape: tuple[int, ...]) -> tuple[str, str]:
    """BatchNormV3 on A2: FullReduce for fewer than 8192 entries of a channel, else Welford.

    Source: ops-nn's tiling code, restated: R1 * R0 < 8192; channels are split over cores either way.
    """
    return ("FullReduce", "kept") if shape[0] * math.prod(shape[2:]) < 8192 else ("Welford", "streamed")


def batch_norm_950(shape: tuple[int, ...]) -> tuple[str, str]:
    """BatchNormV3 on 950: full reduce where R fits, split R over cores where channels are few, else Welford.

    Source: ops-nn's tiling code, restated. Channels last (RA): split R for A <= 256, or A <= 512 and R1 > 4096.
    Channels first (RAR): split R for 2 * A <= cores.
    """
    r, a = shape[:2]
    kind = "RA" if len(shape) == 2 else "RAR"
    if fits(kernels.batch_norm, shape):
        return f"{kind} full reduce", "kept"
    few = 2 * a <= CORES if kind == "RAR" else a <= 256 or (a <= 512 and r > 4096)
    return (f"{kind} block split R", "in parts") if few else (f"{kind} Welford", "streamed")


def batch_norm_grad_a2(shape: tuple[int, ...]) -> tuple[str, str]:
    """BatchNormGradV3 on A2: FullLoad for 12000 entries of a channel, else SplitLoad, across cores where uneven.

    Source: ops-nn's tiling code, restated: SplitLoad across cores from 20000 entries on where A % cores != 0.
    """
    entries, channels = shape[0] * math.prod(shape[2:]), shape[1]
    if entries <= 12_000:
        return "FullLoad", "kept"
    across = entries >= 20_000 and channels % CORES
    return ("SplitLoad across cores", "in parts") if across else ("SplitLoad", "streamed")


def batch_norm_grad_950(shape: tuple[int, ...]) -> tuple[str, str]:
    """BatchNormGradV3 on 950, channels last: full load where R fits, split R for few channels, else recompute.

    Source: ops-nn's tiling code, restated: RA split R for R1 >= 64, R1 >= A and R > 16 * cores.
    """
    r, a = shape
    if fits(kernels.batch_norm_grad, shape):
        return "RA full load", "kept"
    split = r >= 64 and r >= a and r > 16 * CORES
    return ("RA split R", "in parts") if split else ("RA recompute", "streamed")


def instance_norm_950(shape: tuple[int, ...]) -> tuple[str, str]:
    """InstanceNorm on 950, channels last: ARA full reduce where R fits, else ARA Welford. (Channels first: AR, rows.)

    Source: ops-nn's templates.
    """
    kept = fits(kernels.group_norm, shape, num_groups=shape[2])
    return ("ARA full reduce", "kept") if kept else ("ARA Welford", "streamed")


def group_norm_silu_a2(shape: tuple[int, ...]) -> tuple[str, str]:
    """GroupNormSilu on A2, channels first: SMALL_SHAPE for whole groups, else pieces of 8192 entries.

    Source: ops-nn's tiling code, restated for 16 bits: HW a multiple of 16 and at most 4096, and at most 2700 channels
    and groups per core.
    """
    n, c, hw = shape
    small = hw % 16 == 0 and hw <= 4096 and (c + GROUPS) * n / CORES <= 2700
    return ("SMALL_SHAPE", "kept") if small else ("HIGH_PERF", "streamed")


def group_norm_silu(x: Any, scale: Any, bias: Any, *, plan: TilePlan | None = None, machine: Any = "npu") -> Any:
    """GroupNorm and SiLU of `[N, C, HW]` by the row kernels: a tile holds lanes of all channels of a group."""
    view = groups_of(x.shape, (2,), 1, GROUPS)
    assert view is not None  # space is the last axis
    plan = plan or TilePlan()
    chunk = plan.chunk if plan.residency != "stream" else max(1, 8192 // (x.shape[1] // GROUPS))
    small = (1, x.shape[1], 1)
    return row_norm(
        [x], scale.reshape(small), bias.reshape(small), view=view, eps=1e-5, machine=MACHINES["npu"],
        activation=NAMED["silu"], name="group_norm_act", chunk=chunk, residency=plan.residency,
    ).y  # fmt: skip


def _first(shape: tuple[int, ...], dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    lanes = jax.ShapeDtypeStruct(shape[1:2], jnp.float32)
    return jax.ShapeDtypeStruct(shape, dtype), lanes, lanes


group_norm_silu.example_arrays = _first  # type: ignore[attr-defined]

RULES = (
    Rule("BatchNormV3, A2", FIRST, batch_norm_a2, kernels.batch_norm, {}),
    Rule("BatchNormV3, 950", (*LAST, *FIRST), batch_norm_950, kernels.batch_norm, {}),
    Rule("BatchNormGradV3, A2", FIRST, batch_norm_grad_a2, kernels.batch_norm_grad, {}),
    Rule("BatchNormGradV3, 950", LAST, batch_norm_grad_950, kernels.batch_norm_grad, {}),
    Rule("InstanceNorm, 950", SAMPLES, instance_norm_950, kernels.group_norm, {"num_groups": 0}),
    Rule("GroupNormSilu, A2", tuple((n, c, s) for n, s, c in SAMPLES), group_norm_silu_a2, group_norm_silu, {}),
    Rule("GroupNorm, channels last", SAMPLES, lambda _: ("none", ""), kernels.group_norm, {"num_groups": GROUPS}),
    Rule("its backward", SAMPLES, lambda _: ("none", ""), kernels.group_norm_grad, {"num_groups": GROUPS}),
)


@dataclass(frozen=True)
class Row:
    """One shape, µs of our kernel: by ops-nn's template, by default, at its best plan, and in parts; None: no fit."""

    operator: str
    shape: tuple[int, ...]
    theirs: str
    their_way: str
    their_us: float | None
    ours: str
    our_us: float
    best_us: float
    parts_us: float | None

    @property
    def reason(self) -> str:
        """Why ours is another way."""
        way = self.ours.split(",")[0]
        if way == self.their_way or not self.their_way:
            return ""
        if self.their_us is None and way == "in parts":
            return "not a sample of one channel fits"
        if way == "in parts":
            return "few tiles of channels: parts keep every core at work"
        if self.their_way == "in parts":
            return "every core has channels of its own: one launch, no merge"
        if way == "kept":
            return "fits a tile of fewer channels: read once"
        return "fits only a few rows at a time beside float32: read twice, in long pieces"


def rows(chip: str, rules: Sequence[Rule] = RULES) -> Iterator[Row]:
    """Every operator and shape, bfloat16."""
    for rule in rules:
        for shape in rule.shapes:
            options: dict[str, Any] = {k: v or shape[-1] for k, v in rule.options.items()}
            arrays = _arrays(rule.kernel, shape)
            template, their_way = rule.choose(shape)
            times = {way: _least(rule.kernel, arrays, plans, chip, **options) for way, plans in WAYS.items()}
            default = sim_npu.simulate(rule.kernel, *arrays, chip=chip, **options)
            way, us = _way(default), default.total_us
            if way == "in parts":
                times[way] = min(us, times[way] or us)
            if rule.kernel is group_norm_silu:
                times["in parts"] = None
            space = getattr(rule.kernel, "plan_space", lambda *_: [KEPT, STREAMED])
            best = _least(rule.kernel, arrays, space(*arrays), chip, **options)
            yield Row(
                rule.operator, shape, template, their_way, times.get(their_way), way, us, min(us, best or us),
                times["in parts"],
            )  # fmt: skip


def _way(report: Any) -> str:
    """How a report's kernels go about it."""
    if len(report.kernels) > 1:
        return "in parts"
    return "streamed" if len(report.kernels[0].program.grid) > 2 else "kept"


def _least(kernel: Callable[..., Any], arrays: Sequence[Any], plans: Iterable[TilePlan], chip: str, **options: Any):
    """The least µs of the plans that fit, or None."""
    found = [_us(kernel, arrays, plan, chip, **options) for plan in plans]
    return min((us for us in found if us is not None), default=None)


def _arrays(kernel: Callable[..., Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    return kernel.example_arrays(shape, jnp.dtype("bfloat16"))  # type: ignore[attr-defined]


def _us(kernel: Callable[..., Any], arrays: Sequence[Any], plan: TilePlan, chip: str = "910b2", **options: Any):
    with contextlib.suppress(CapacityError, ValueError):  # the latter from a plan that no channel fits
        return sim_npu.simulate(kernel, *arrays, chip=chip, plan=plan, explain_capacity=False, **options).total_us
    return None


def _cell(us: float | None) -> str:
    return "–" if us is None else f"{us:.1f}"


def section(found: Sequence[Row]) -> str:
    """The second half of docs/kernel_templates.md."""
    both = [r for r in found if r.their_us is not None]
    gains = sorted(r.their_us / r.our_us for r in both if r.their_us is not None)
    olds = sorted(r.parts_us / r.our_us for r in found if r.parts_us is not None)
    behind = max(r.our_us / r.best_us for r in found)
    lines = [
        f"""
## Norms over channels

ops-nn's templates for these are of three kinds, and so are the ways of our kernels: whole channels that stay in a tile
(*kept*: FullReduce, full load), whole channels that are read twice by the same core (*streamed*: Welford, SplitLoad,
recompute), and parts of channels whose moments are merged (*in parts*: block split R, across cores). Ours is chosen by
price (`normlib/kernels/channel_cost.py`), which weighs what fits, how many cores have channels, and how many turns a
walk takes. bfloat16; shapes are of ResNet-50 with 2 and 32 images (`[N, C, HW]`, or `[N · HW, C]` channels last) and of
a UNet with 2 and 8 (`[N, HW, C]`). All µs are our kernels on the simulator; ops-nn's choice is restated in the code,
«fits» by our tiles. *best*: the fastest of all plans tried. *in parts*: what every such norm took before whole channels
were kernels (the fastest of the default tiles and those of 512 and 2048 lanes), but for GroupNormSilu, whose groups are
rows of a tile (the kernels of the first table).

Over {len(both)} shapes our choice is {gains[0]:.2f} to {gains[-1]:.2f} times as fast as ops-nn's, median
{gains[len(gains) // 2]:.2f}; over {len(olds)} it is {olds[0]:.2f} to {olds[-1]:.2f} times as fast as in parts, median
{olds[len(olds) // 2]:.2f}; and it is at most {behind:.2f} times as slow as the best plan. ops-nn has no group norm of
channels that are last.

| operator | shape | ops-nn | µs | ours | µs | best | in parts | why another |
|---|---|---|---|---|---|---|---|---|"""
    ]
    for r in found:
        lines.append(
            f"| {r.operator} | {' × '.join(map(str, r.shape))} | {r.theirs} | {_cell(r.their_us)} | {r.ours} "
            f"| {r.our_us:.1f} | {r.best_us:.1f} | {_cell(r.parts_us)} | {r.reason} |"
        )
    return "\n".join(lines) + "\n"
