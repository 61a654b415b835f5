"""What norms with statistics per sample share: the checks of channel groups, and one call of the engine."""

from __future__ import annotations

import math
import operator
from typing import NamedTuple

from jaxtyping import Array

from normlib import _arguments as check
from normlib.scope import Scope, axis_size


class PerSample(NamedTuple):
    """Where the channels are, which axes besides are reduced, and who shares statistics."""

    channels: tuple[int, ...]
    reduced: tuple[int, ...]
    scope: Scope
    entries: int


def grouped(
    x: Array, num_groups: int, axis: int, reduction_axes, *, axis_name=None, axis_index_groups=None, method="auto"
) -> PerSample:
    """Groups of neighbouring channels of x; errors as `normlib.group_norm`."""
    (channel,) = check.axes(axis, x.ndim)
    reduced = (
        tuple(range(1, x.ndim)) if reduction_axes is None else check.axes(reduction_axes, x.ndim, "reduction_axes")
    )
    if channel not in reduced:
        raise ValueError(
            f"`reduction_axes` {reduced} must contain the channel axis {channel} of x, shape {x.shape}"
            + ("; give them when the channels are axis 0." if reduction_axes is None else ".")
        )
    channels = x.shape[channel]
    number = operator.index(num_groups) if hasattr(num_groups, "__index__") else 0
    if number < 1 or channels % number:
        raise ValueError(f"`num_groups` must divide the {channels} channels of x (axis {channel}); got {num_groups}.")
    return per_sample(
        x, (channel,), tuple(a for a in reduced if a != channel), channels // number,
        {"channels": number, "channel_axis": channel}, axis_name=axis_name, axis_index_groups=axis_index_groups,
        method=method,
    )  # fmt: skip


def instances(x: Array, axis: check.Axes, *, axis_name=None, axis_index_groups=None, method="auto") -> PerSample:
    """Every channel of every sample alone; errors as `normlib.instance_norm`."""
    channels = check.axes(axis, x.ndim)
    reduced = tuple(a for a in range(1, x.ndim) if a not in channels)
    return per_sample(
        x, channels, reduced, 1, {}, axis_name=axis_name, axis_index_groups=axis_index_groups, method=method
    )


def per_sample(x, channels, reduced, per_group, grouping, *, axis_name, axis_index_groups, method) -> PerSample:
    """The scope of statistics over `reduced` and `per_group` channels, with the number of entries in each set."""
    names = check.names(axis_name)
    scope = Scope(names=names, groups=check.groups(axis_index_groups), method=method, **grouping)
    sharing = len(scope.groups[0]) if scope.groups else axis_size(names)
    return PerSample(channels, reduced, scope, math.prod(x.shape[a] for a in reduced) * per_group * sharing)


def checked_mask(where: Array | None, x: Array, sets: PerSample, on_single: str, operator: str) -> Array | None:
    """`where` in x's rank, with the check that an unmasked set has more than one entry."""
    where = check.mask(where, x)
    if where is None:
        check.more_than_one(sets.entries, on_single, f"{operator} of x with shape {x.shape}")
    return where
