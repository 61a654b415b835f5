"""Scope: who shares statistics. Every statistics collective of the library is in this file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from normlib._sharding import alike, splits, unsplit
from normlib._varying import is_bound, is_typed, vary, varying
from normlib.moments import Moments, about, abs_squared, positive

METHODS = ("auto", "gather", "two_phase", "shifted", "adaptive", "fast")
WORD = 4096  # counts travel as two float32 words, n = high * WORD + low: exact far beyond 2**24

Sums = Callable[[Array | None], tuple[Array | None, Array]]  # k -> (s1, s2) of the local entries about k


@dataclass(frozen=True)
class Scope:
    """Which entries, besides those reduced locally, share one mean and variance.

    Attributes:
      names: mesh axes whose devices pool their statistics for y.
      groups: equal-sized groups of indices along `names`; only devices of a group pool. None: all of them.
      channels: number of groups that the channels along `channel_axis` form (group norm). None: every channel alone.
      channel_axis: position of the channels in x.
      total_names: mesh axes merged into `total`, the moments of the whole scope; those of y where None.
      total_axes: axes of the statistics (virtual batches inside a device) merged into `total`.
      method: how devices pool.
        "gather": one all_gather of everybody's moments, merged by Chan's formula.
        "two_phase": a sum for the mean, then sums about it: two all-reduces.
        "shifted": sums about a given shift: one all-reduce; accurate while the shift is near the mean.
        "adaptive": shifted, and redone in two phases under a condition if any mean lies farther than `tau` standard
        deviations from the shift: one all-reduce in the normal case, accurate always.
        "fast": raw E[x**2] - E[x]**2, for comparison only.
        "auto": gather for groups and up to `gather_limit` devices; else adaptive with a shift, two_phase without.
      tau: threshold of "adaptive"; the relative variance error is about 1.5e-7 + 2.3e-7 * tau**2.
      gather_limit: most devices whose whole table is gathered; beyond it bytes do not grow with devices.

    Raises:
      ValueError: on construction, naming the attribute.

    >>> Scope(names=("data",), groups=((0, 1), (2, 3))).groups
    ((0, 1), (2, 3))
    """

    names: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] | None = None
    channels: int | None = None
    channel_axis: int = -1
    total_names: tuple[str, ...] | None = None
    total_axes: tuple[int, ...] = ()
    method: str = "auto"
    tau: float = 1.5
    gather_limit: int = 8

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}; got {self.method!r}.")
        if not self.tau > 0:
            raise ValueError(f"`tau` must be positive; got {self.tau}.")
        if self.groups is None:
            return
        if not self.names:
            raise ValueError("`axis_index_groups` needs `axis_name`: the groups are of indices along that axis.")
        if self.method not in ("auto", "gather"):
            raise ValueError(
                f"`method` {self.method!r} does not work with device groups, whose members could disagree on a "
                "condition; use 'gather' (or leave it 'auto')."
            )
        flat = [index for group in self.groups for index in group]
        if len({len(group) for group in self.groups}) != 1 or sorted(flat) != list(range(len(flat))):
            raise ValueError(
                "`axis_index_groups` must be groups of one size in which every axis index 0..P-1 stands exactly once; "
                f"got {self.groups}."
            )

    @property
    def all_names(self) -> tuple[str, ...]:
        """The mesh axes of `total`."""
        return self.names if self.total_names is None else self.total_names

    @property
    def has_total(self) -> bool:
        """True if the moments of the whole scope differ from those that y uses."""
        return self.groups is not None or self.all_names != self.names or bool(self.total_axes)

    @property
    def is_local(self) -> bool:
        """True if statistics are of one device and of one batch."""
        return not self.all_names and not self.total_axes

    def check_bound(self) -> None:
        """Check that the mesh axes are bound where the norm is traced and that the groups cover them.

        Raises:
          NameError: if a mesh axis is not bound.
          ValueError: if the groups do not cover the axis.
        """
        axis_size(self.all_names)
        if self.groups is not None and sum(map(len, self.groups)) != axis_size(self.names):
            raise ValueError(
                f"`axis_index_groups` must cover the {axis_size(self.names)} indices of {self.names}; got "
                f"{self.groups}, which cover {sum(map(len, self.groups))}."
            )

    # -- forward ------------------------------------------------------------------------------------------------

    def pool(
        self, local: Callable[[], Moments], sums: Sums, count: Array, *, shift: Array | None, eps, centered: bool,
        counted: bool,
    ) -> tuple[Moments, Moments]:  # fmt: skip
        """(moments that y uses, moments of the whole scope), pooled from this device's.

        Args:
          local: gives this device's moments, accurately, by channel.
          sums: k -> this device's sums about k, by channel; k is None (for 0) or by group of channels.
          count: int32 local count, shape broadcastable to the statistics.
          shift: a guess of the mean, or None; anything not finite in it counts as 0.
          eps: what will be added to the variance; keeps dead channels from asking for a redo.
          centered: False for uncentred moments, which are plain sums: one all-reduce, no method.
          counted: True if counts differ between devices (a mask) and so must travel.
        """
        method = self._method(shift)
        reduce = self._reducer(count, counted)
        if self.names and (self.groups is not None or (method == "gather" and centered)):
            return self._pool_gathered(self._merge_channels(local()))
        if not centered:
            n, _, s2 = reduce(None, sums(None)[1])
            own = about(0.0, n, None, s2)
        elif method in ("shifted", "adaptive", "fast"):
            own = self._pool_shifted(reduce, sums, shift, method, eps)
        elif self.names:
            own = self._pool_two_phase(reduce, sums)
        else:
            own = self._merge_channels(local())
        return own, self._total_of(own) if self.has_total else own

    def _method(self, shift) -> str:
        if self.method == "shifted" and shift is None:
            raise ValueError("`method` 'shifted' needs `shift`, a guess of the mean such as the running mean.")
        if self.method != "auto":
            return self.method
        if self.names and (self.groups is not None or axis_size(self.names) <= self.gather_limit):
            return "gather"
        return "two_phase" if shift is None else "adaptive"

    def _reducer(self, count, counted):
        """(s1 or None, s2 or None, scalars) -> (count, s1, s2, *scalars) summed over channel groups and devices.

        In one collective, the scalars (of any number) included.
        """

        def reduce(s1, s2, scalars=()):
            n = self.sum_channels(jnp.broadcast_to(count, (s1 if s2 is None else s2).shape))
            words = [self.sum_channels(s) for s in (s1, s2) if s is not None]
            if self.names and counted:
                n, *words = unpack_counts(psum_packed([*pack_counts(n), *words], self.names, scalars))
            elif self.names:
                n, words = n * axis_size(self.names), psum_packed(words, self.names, scalars)
            left = iter(words)
            return n, *(None if s is None else next(left) for s in (s1, s2)), *left

        return reduce

    def _pool_two_phase(self, reduce, sums) -> Moments:
        n, s1, _ = reduce(sums(None)[0], None)
        k = lax.stop_gradient(s1 / positive(n, s1.real.dtype))
        return about(k, *reduce(*sums(k)))

    def _pool_shifted(self, reduce, sums, shift, method, eps) -> Moments:
        if shift is None or method == "fast":
            k, common = jnp.zeros(()), jnp.asarray(True)
            guess = about(k, *reduce(*sums(None)))
        else:
            k = lax.stop_gradient(jnp.where(jnp.isfinite(shift), shift, 0))
            if set(self.names) & varying(k):
                # sums about different shifts do not add up, and their result could not be typed as one value
                return self._pool_two_phase(reduce, sums)
            # where nothing is typed devices may still hold different shifts: a fingerprint travels with the sums
            prints = fingerprint(k) if self.names and not is_typed(self.names) else []
            n, s1, s2, *prints = reduce(*sums(k), prints)
            guess, common = about(k, n, s1, s2), all_equal(prints, axis_size(self.names))
        if method != "adaptive":
            return guess
        # Negated, so that a NaN asks for the redo, and a variance of inf does too (both sides would be inf); eps keeps
        # dead channels with a lagging shift from asking.
        near = abs_squared(guess.mean - k) <= self.tau**2 * (guess.var + eps)
        far = ~(near & jnp.isfinite(guess.var) & common)
        return lax.cond(jnp.any(far), lambda: self._pool_two_phase(reduce, sums), lambda: guess)

    def _pool_gathered(self, mine: Moments) -> tuple[Moments, Moments]:
        names, size = self.names, axis_size(self.names)
        whole = self.groups is None or size <= self.gather_limit
        table = self._gather(mine, names, None if whole else self.groups)
        if self.groups is None or not whole:
            own = table.merge_axis(0)
            return own, self._total_of(own) if self.has_total else own
        own = jax.tree.map(lambda t: t[members(self.groups or (), names)], table).merge_axis(0)
        total = table.merge_axis(0)
        return own, total.merge_axis(self.total_axes, keepdims=True) if self.total_axes else total

    def _total_of(self, own: Moments) -> Moments:
        """The moments of the whole scope, when only y's own part of it has been pooled."""
        if self.total_axes:
            own = own.merge_axis(self.total_axes, keepdims=True)
        names = self.all_names
        if names == self.names and self.groups is None:
            return own
        if self.groups is None and axis_size(names) <= self.gather_limit:
            return self._gather(own, names, None).merge_axis(0)
        # about their own mean, in two phases: a guess might be far off, and nothing here could redo it
        # every member of a group holds the group's moments: count each group once, through its first member
        weight = 1 if self.groups is None else jnp.isin(lax.axis_index(names), jnp.array([g[0] for g in self.groups]))
        own = own._replace(count=own.count * weight, m2=own.m2 * weight)
        raw, _ = own.sums_about(jnp.zeros_like(own.mean))
        n, s1 = unpack_counts(psum_packed([*pack_counts(own.count), raw], names))
        k = jnp.broadcast_to(lax.stop_gradient(s1 / positive(n, s1.real.dtype)), own.mean.shape)
        return about(k, *unpack_counts(psum_packed([*pack_counts(own.count), *own.sums_about(k)], names)))

    def _gather(self, mine: Moments, names, groups) -> Moments:
        words = [*pack_counts(mine.count), mine.mean, mine.low, mine.m2]
        table = gather(stack(words), names, axis_size(names), groups)
        return Moments(*unpack_counts([cast(table[:, i], w.dtype) for i, w in enumerate(words)]))

    def _merge_channels(self, moments: Moments) -> Moments:
        if self.channels is None:
            return moments
        return jax.tree.map(self._split_channels, moments).merge_axis(self._within)

    # -- channel groups -----------------------------------------------------------------------------------------

    @property
    def _within(self) -> int:
        return self.channel_axis + 1

    def _split_channels(self, t: Array) -> Array:
        """[..., C, ...] -> [..., G, C / G, ...]: tiny statistics, never x."""
        t = unsplit(t, self.channel_axis)
        shape, groups = t.shape, self.channels or 1
        split = (groups, shape[self.channel_axis] // groups)
        return t.reshape(*shape[: self.channel_axis], *split, *shape[self.channel_axis + 1 :])

    def sum_channels(self, t: Array) -> Array:
        """Sum over the channels of each group: [..., C, ...] -> [..., G, ...]."""
        return t if self.channels is None else jnp.sum(self._split_channels(t), self._within)

    def max_channels(self, t: Array) -> Array:
        """Largest over the channels of each group: [..., C, ...] -> [..., G, ...]."""
        if self.channels is None:
            return t
        return jnp.max(self._split_channels(t), self._within, initial=0)

    def expand(self, t: Array, channels: int) -> Array:
        """[..., G, ...] -> [..., C, ...]: each channel its group's value; the identity without channel groups."""
        if self.channels is None:
            return t
        at, shape = self._within, t.shape
        each = jnp.broadcast_to(jnp.expand_dims(t, at), (*shape[:at], channels // self.channels, *shape[at:]))
        return each.reshape(*shape[: at - 1], channels, *shape[at:])

    # -- backward -----------------------------------------------------------------------------------------------

    def sum_cotangents(self, own: list[Array], total: list[Array] | None) -> tuple[list[Array], list[Array] | None]:
        """Sum `own` over the devices that share y's statistics and `total` over the whole scope.

        One collective where one can do both. `total` is None where its cotangents are zero or already summed.
        """
        if self.groups is not None:
            return self._sum_cotangents_in_groups(own, total)
        if self.names and total is not None and self.names == self.all_names:
            summed = psum_packed(own + total, self.names)
            return summed[: len(own)], summed[len(own) :]
        own = psum_packed(own, self.names) if self.names else own
        return own, psum_packed(total, self.all_names) if total is not None and self.all_names else total

    def group_mean(self, own: Moments) -> Moments:
        """The count-weighted mean of the groups' means and variances, with a group's count (rounded if they differ)."""
        n = own.count.astype(own.m2.dtype)
        filled = (own.count > 0).astype(n.dtype)
        entries, groups, s1, m2 = self.sum_total([n, filled, n * (own.mean + own.low), own.m2])
        safe = jnp.maximum(entries, 1)
        size = entries / jnp.maximum(groups, 1)
        return Moments(jnp.round(size).astype(jnp.int32), s1 / safe, jnp.zeros_like(s1), m2 / safe * size)

    def sum_total(self, words: list[Array]) -> list[Array]:
        """Sum tiny arrays over everything that `total` merges: virtual batches and devices."""
        words = [jnp.sum(w, self.total_axes, keepdims=True) if self.total_axes else w for w in words]
        return psum_packed(words, self.all_names) if self.all_names else words

    def _sum_cotangents_in_groups(self, own, total):
        groups = self.groups or ()
        devices = sum(len(g) for g in groups)  # the axis may not be bound here, see `is_bound`
        whole = devices <= self.gather_limit
        sent = own + total if whole and total is not None else own
        table = gather(stack(sent), self.names, devices, None if whole else self.groups)
        mine = table[members(groups, self.names)] if whole else table
        summed = [unbroadcast(t, like.shape) for t, like in zip(mine.sum(0), own)]
        if total is None:
            return summed, None
        rest = table[:, len(own) :].sum(0) if whole else psum_packed(total, self.names)
        return summed, [unbroadcast(t, like.shape) for t, like in zip(rest, total)]


LOCAL = Scope()


def axis_size(names: tuple[str, ...]) -> int:
    """Number of devices along `names` together.

    Raises:
      NameError: if a name is not bound, saying where it must be.
    """
    try:
        return math.prod(lax.axis_size(name) for name in names)
    except NameError as error:
        raise NameError(
            f"`axis_name` {names} is not bound here ({error}): call the norm inside jax.shard_map over a mesh with "
            "that axis, or jax.pmap or jax.vmap with that axis_name. Initialisation and inference do not need it; "
            "under plain jit with a globally sharded batch leave `axis_name` None, statistics are global there."
        ) from None


def vary_typed(x: Array, names) -> Array:
    """`x` (any shape) varying over `names` where JAX tracks that, unchanged elsewhere."""
    return vary(x, names) if is_typed(names) else x


def psum_packed(words: list[Array], names: tuple[str, ...], scalars: Sequence[Array] = ()) -> list[Array]:
    """Sum each of `words` (tiny arrays of one common shape), and `scalars`, over `names` with a single all-reduce."""
    packed = stack(words)
    if not scalars:
        summed = lax.psum(vary_typed(packed, names), names)
        return [cast(summed[i], w.dtype) for i, w in enumerate(words)]
    flat = jnp.concatenate([packed.ravel(), jnp.stack(scalars).astype(packed.dtype)])
    total = lax.psum(vary_typed(flat, names), names)
    summed = total[: packed.size].reshape(packed.shape)
    return [*(cast(summed[i], w.dtype) for i, w in enumerate(words)), *total[packed.size :].real]


def fingerprint(k: Array) -> list[Array]:
    """Words w of a hash of `k`'s bits (any shape), and w**2: from their sums `all_equal` tells if devices agree.

    Six bits a word keep the sums exact in float32 for up to 4,096 devices; two different shifts are taken for equal
    once in 2**32.
    """
    parts = jnp.stack([k.real, k.imag]) if jnp.iscomplexobj(k) else k
    bits = lax.bitcast_convert_type(parts, jnp.uint32).ravel()
    odd = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1
    mixed = (bits ^ (bits >> 15)) * (odd * jnp.uint32(2654435761))
    digest = jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
    words = [((digest >> at) & 63).astype(jnp.float32) for at in range(0, 32, 6)]
    return words + [w * w for w in words]


def all_equal(prints: list[Array], devices: int) -> Array:
    """True, on every device alike, if the summed `fingerprint`s are of equal shifts: sum(w**2) = P * mean(w)**2."""
    half = len(prints) // 2
    same = jnp.asarray(True)
    for w, square in zip(prints[:half], prints[half:]):
        total = w.astype(jnp.int32)
        each = total // devices
        same &= (each * devices == total) & (square.astype(jnp.int32) == each * each * devices)
    return same


def gather(packed: Array, names: tuple[str, ...], devices: int, groups=None) -> Array:
    """[P, *shape]: the `packed` (tiny, any shape) of all `devices`, or of this device's group, by one collective.

    The whole table is one value for all devices and typed so: moments made of it may leave shard_map through P().
    """
    packed = vary_typed(packed, names)
    if (groups is None and len(names) > 1) or not is_bound(names) or any(splits(packed)):
        # all_gather fails over several axes under nested vmap, where the axis is not bound, and (jax 0.10 and 0.12)
        # beside an axis split over an explicit mesh; a sum of one-hot rows works everywhere
        here = jnp.arange(devices).reshape(-1, *(1,) * packed.ndim) == _position(names)
        table = lax.psum(jnp.where(here, packed, 0), names)
        return table if groups is None else table[members(groups, names)]
    to = "invarying" if is_typed(names) and groups is None else "varying"
    return lax.all_gather(packed, names, axis_index_groups=groups, to=to)


def members(groups: tuple[tuple[int, ...], ...], names: tuple[str, ...]) -> Array:
    """Indices of the devices along `names` in this device's group."""
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    mine = jnp.array([group_of[index] for index in range(len(group_of))])[_position(names)]
    return jnp.array(groups)[mine]


def _position(names: tuple[str, ...]) -> Array:
    """This device's index along `names` together; lax.axis_index would ask for sizes, which take a bound axis."""
    index = lax.axis_index(names[0])
    for name in names[1:]:
        index = index * lax.psum(jnp.ones((), index.dtype), name) + lax.axis_index(name)
    return index


def stack(words: list[Array]) -> Array:
    """[W, *shape] of tiny arrays of shapes that broadcast; counts beside float64 or complex words become such too."""
    return jnp.stack(alike(jnp.broadcast_arrays(*words)))


def cast(t: Array, dtype) -> Array:
    """`t`, any shape, in `dtype`; the real part where that is real."""
    return (t if jnp.issubdtype(dtype, jnp.complexfloating) else t.real).astype(dtype)


def pack_counts(count: Array) -> list[Array]:
    """An int32 count, any shape, as two float32 words whose sums over devices stay exact."""
    return [(count // WORD).astype(jnp.float32), (count % WORD).astype(jnp.float32)]


def unpack_counts(words: list[Array]) -> list[Array]:
    """[high, low, *rest] -> [count, *rest]."""
    high, low, *rest = words
    return [high.astype(jnp.int32) * WORD + low.astype(jnp.int32), *rest]


def unbroadcast(t: Array, shape: tuple[int, ...]) -> Array:
    """Sum `t` over the axes along which `shape` (of the same rank) has size 1 and `t` has not."""
    axes = tuple(i for i, (a, b) in enumerate(zip(t.shape, shape)) if a != b)
    return jnp.sum(t, axes, keepdims=True) if axes else t
