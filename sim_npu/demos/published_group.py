"""Group norm as published for 950 (hicann/ops-nn, `group_norm_silu_regbase`): `two_pass` and `welford`.

The library runs it for GroupNorm too, without the activation. A group that fits four times (x and y, two buffers
each) is read once, a longer one twice. The first pass of `welford` keeps a running mean and sum of squares per lane.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from sim_npu.builder import Builder, Tile
from sim_npu.chips import ChipSpec
from sim_npu.demos.published import BLOCK, LANES, RSTD, add_up, cut, fold, half, sums_buffer, up, walk
from sim_npu.ir import TileProgram

MOST_CHANNELS = 4096  # with more, scale and bias are not kept whole
WELFORD = "Mask Load Cast Load Load Sub Muls Add Store Sub Mul Add Store"  # one more element per lane


def group_norm(shape: tuple[int, ...], dtype: Any, chip: ChipSpec, *, groups: int) -> TileProgram:
    """A group that fits four times (x and y, two buffers each) is read once, others twice (Welford, then apply).

    Args:
      shape: `[N, C, space...]`.
      dtype: of x, y, scale and bias.
      chip: its unified buffer and cores decide the tiles.
      groups: a divisor of C.

    Raises:
      ValueError: for more than 4096 channels (another template), or groups that do not divide them.

    >>> from sim_npu.chips import get_chip
    >>> group_norm((2, 64, 32, 32), "float16", get_chip("950"), groups=4).name
    'group_norm_two_pass'
    """
    n, c, r = fold(shape)
    if c % groups:
        raise ValueError(f"`groups` must divide the {c} channels; got {groups}.")
    if c > MOST_CHANNELS:
        raise ValueError(f"`shape` must have at most {MOST_CHANNELS} channels, or gets another template; got {c}.")
    kind, size = jnp.dtype(dtype).name, jnp.dtype(dtype).itemsize
    mine = -(-n * groups // chip.cores)
    b = Builder("group_norm", grid=(-(-n * groups // mine),))
    elements = c // groups * r
    small = 2 * up(4 * mine, BLOCK) + (2 if size < 4 else 1) * up(size * mine, BLOCK) + 2 * up(size * c, BLOCK)
    affine = b.queue_in("affine", (2, up(size * c, BLOCK) // size), kind, array=(2, c))
    for k in range(2):
        b.data_copy_pad(affine, burst_bytes=size * c, more=k > 0)
    stats = b.queue_out("stats", (2, up(size * mine, BLOCK) // size), kind, array=(2, n * groups))
    room = chip.ub_bytes - small - up(4 * (half(elements) // LANES), BLOCK)
    arrays = ((n * groups, elements),) * 2
    if room // (4 * size) > elements:
        b.name = "group_norm_two_pass"
        _two_pass(b, kind, arrays, c // groups, r, mine, room // (4 * size))
    else:
        b.name = "group_norm_welford"
        _welford(b, kind, arrays, c // groups, r, mine, chip.ub_bytes - small)
    for _ in range(2):
        b.vector("Cast", stats, Tile("sums", stats.shape, "float32"))
        b.data_copy_pad(stats, burst_bytes=size * mine)
    return b.build()


def _two_pass(b: Builder, kind: str, arrays: Any, per: int, r: int, mine: int, limit: int) -> None:
    """As many whole groups at a time as fit."""
    elements, size = per * r, jnp.dtype(kind).itemsize
    aligned = up(size * elements, BLOCK) // size
    once = min(mine, limit // aligned)
    x = b.queue_in("x", (once, aligned), kind, depth=2, array=arrays[0])
    y = b.queue_out("y", (once, aligned), kind, depth=2, array=arrays[1])
    sums = sums_buffer(b, elements)
    # Rows are normalized one by one, but for short ones, whose scale and bias are spread beforehand.
    if r <= LANES // 2:
        written, apply = elements, "Mask Load Load Load Cast Cast Cast Sub Mul Mul Add Cast Store"
    else:
        written, apply = per * up(r, LANES), "Load Cast Sub Mul Mul Add Cast Store"

    def batch(count: int) -> None:
        b.data_copy_pad(x, bursts=count, burst_bytes=size * elements)
        with b.loop(count):
            walk(b, x, elements, "Load Cast Muls")
            add_up(b, x, sums, elements)
            walk(b, x, elements, "Load Cast Sub Mul Muls")
            add_up(b, x, sums, elements)
            walk(b, sums, LANES, RSTD)
            walk(b, x, written, apply, out=y)
        b.data_copy_pad(y, bursts=count, burst_bytes=size * elements)

    if mine > once:
        with b.loop(-(-mine // once) - 1):
            batch(once)
    batch(mine - once * (-(-mine // once) - 1))


def _welford(b: Builder, kind: str, arrays: Any, per: int, r: int, mine: int, room: int) -> None:
    """Two passes over a group; the units wait for one another between passes and between groups.

    Buffers of the first pass (two of x, running mean and sum of squares) lie where those of the second will (two of
    x, two of y), so its work is written on x.
    """
    elements, size = per * r, jnp.dtype(kind).itemsize
    unit = BLOCK // size
    lanes = cut(room // size // (2 * (4 // size + 1)), unit)
    while lanes * (2 * size + 8) + up(4 * (half(lanes) // LANES), BLOCK) > room:
        lanes -= unit
    lanes = min(lanes, elements)
    limit = room // (4 * size)
    rows = min(per, limit // up(r, unit))
    width = up(r, unit) * rows if rows else cut(limit, unit)
    x = b.queue_in("x", (max(width, lanes),), kind, depth=2, array=arrays[0])
    y = b.queue_out("y", (width,), kind, depth=2, array=arrays[1])
    sums = Tile("x", (LANES,), "float32")

    def update(count: int) -> None:
        b.data_copy_pad(x, burst_bytes=size * count)
        walk(b, x, up(count, LANES), WELFORD)

    def apply(bursts: int, length: int) -> None:
        b.data_copy_pad(x, bursts=bursts, burst_bytes=size * length)
        walk(b, x, bursts * up(length, LANES), "Mask Load Cast Sub Mul Mul Add Cast Store", out=y)
        b.data_copy_pad(y, bursts=bursts, burst_bytes=size * length)

    def whole(count: int, length: int, step: Any) -> None:
        turns = -(-length // count)
        if turns > 1:
            with b.loop(turns - 1):
                step(count)
        step(length - count * (turns - 1))

    with b.loop(mine):
        b.barrier()
        whole(lanes, elements, update)
        wide = Tile("x", x.shape, "float32")
        walk(b, wide, lanes, "Load Muls")
        add_up(b, wide, sums, lanes)
        walk(b, wide, lanes, "Load Load Sub Mul Muls Add Muls")
        add_up(b, wide, sums, lanes)
        walk(b, sums, LANES, RSTD)
        b.barrier()
        if rows:
            whole(rows, per, lambda count: apply(count, r))
        else:
            with b.loop(per):
                whole(width, r, lambda count: apply(1, count))
