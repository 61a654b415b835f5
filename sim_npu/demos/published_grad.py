"""Gradient of batch norm as published for 950 (hicann/ops-nn, `batch_norm_grad_v3`, `arch35`).

In training, channels are dealt to cores. `full_load` keeps a channel's dy and x; `split_r0` walks them twice in
tiles, first for the sums (it starts with the pieces beyond a power of two tiles, added onto the first ones), then for
dx. Both write dx over x, whose buffers hold float32. `infer` and `infer_channel_last` fill half of the unified buffer
with one tile and deal tiles, so that small arrays use few cores.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from sim_npu.builder import Builder, Tile
from sim_npu.chips import ChipSpec
from sim_npu.demos.published import BLOCK, LANES, RSTD, add_up, fold, half, sums_buffer, up, walk
from sim_npu.ir import TileProgram

RESERVED = 7 * 1024 + 512  # of split_r0: sums of tiles and of channels
SUMS = 768  # float32 of them per sum
MERGE = "Mask Add Move"
DX = "Mul Mul Add Muls Sub Mul Mul"


def channel_grad(shape: tuple[int, ...], dtype: Any, chip: ChipSpec) -> TileProgram:
    """dx, dscale and dbias in training.

    Args:
      shape: `[N, C, space...]`.
      dtype: of dy, x and dx; the small arrays are float32.
      chip: its unified buffer and cores decide the tiles.

    Raises:
      ValueError: for a shape that gets another template: no space, several samples in tiles of whole rows, or few
        channels of so many samples that these are dealt to cores.

    >>> from sim_npu.chips import get_chip
    >>> channel_grad((1, 1, 1024, 1024), "float16", get_chip("950")).name
    'channel_grad_split_r0'
    """
    n, c, r = fold(shape)
    kind, size = jnp.dtype(dtype).name, jnp.dtype(dtype).itemsize
    once = up(size * n * r, BLOCK) + up(4 * n * r, 2 * BLOCK) + 20  # dy, x in float32, five numbers
    sums = up(4 * (half(n * r) // LANES), BLOCK)
    room = (chip.ub_bytes - sums) // 2 - 5 * BLOCK
    cores = min(chip.cores, max(1, c // max(1, -(-1024 // once))))
    tile = (chip.ub_bytes - RESERVED) // 4
    spread = n >= chip.cores and 4 * c <= chip.cores and 5 * n * r >= chip.ub_bytes  # samples are dealt to cores
    if r > 1 and not spread and once <= room:
        return _full_load(kind, n, c, r, cores, min(-(-c // cores), room // once))
    if r > 1 and not spread and up(8 * r, BLOCK) > tile:
        return _split_r0(kind, n, c, r, min(c, chip.cores), min(r, tile // 4))
    raise ValueError(
        f"`shape` must get the full_load or the split_r0 template, the two laid out here; {shape} gets neither. "
        f"Use `demos.channel_grad`."
    )


def _queues(b: Builder, kind: str, shape: tuple[int, int, int], dy: int, x: int, channels: int = 1) -> tuple[Tile, ...]:
    """dy and x of so many elements; mean, rstd and scale; dscale and dbias."""
    n, c, r = shape
    wide = up(channels, 8)
    words = -(-n * c * r * jnp.dtype(kind).itemsize // 4)  # x lies in a float32 buffer
    moving = b.queue_in("dy", (dy,), kind, depth=2, array=shape)
    kept = b.queue_in("x", (x,), "float32", depth=2, array=(words,), back=(words,))
    small = b.queue_in("stats", (3, wide), "float32", depth=2, array=(3, c))
    return moving, kept, small, b.queue_out("dstats", (2, wide), "float32", array=(2, c))


def _full_load(kind: str, n: int, c: int, r: int, cores: int, once: int) -> TileProgram:
    """`once` channels at a time."""
    mine, elements, size = -(-c // cores), n * r, jnp.dtype(kind).itemsize
    turns, aligned = -(-mine // once), up(size * n * r, BLOCK) // size
    gap = (c - 1) * r * size if n > 1 else 0
    b = Builder("channel_grad_full_load", grid=(cores,))
    dy, x, stats, dstats = _queues(b, kind, (n, c, r), once * aligned, once * aligned, once)
    sums = sums_buffer(b, elements)
    narrow = Tile("x", x.shape, kind)
    with b.loop(turns):
        b.data_copy_pad(dy, bursts=n * once, burst_bytes=size * r, gap=gap)
        with b.loop(once):
            walk(b, dy, elements, "Load Cast")
            add_up(b, dy, sums, elements)
        for k in range(3):
            b.data_copy_pad(stats, burst_bytes=4 * once, more=k > 0)
        b.data_copy_pad(x, bursts=n * once, burst_bytes=size * r, gap=gap)
        with b.loop(once):
            walk(b, narrow, elements, "Mask Load Cast Sub Store")
            walk(b, dy, elements, "Load Cast")
            walk(b, x, elements, "Load Mul Mul")
            add_up(b, x, sums, elements)
            walk(b, dy, elements, "Load Cast")
            walk(b, narrow, elements, f"Mask Load {DX} Cast Store")
        for _ in range(2):
            b.vector("Cast", dstats, Tile("sums", dstats.shape, "float32"))
            b.data_copy_pad(dstats, burst_bytes=4 * once)
        b.copy_back(x, bursts=n * once, burst_bytes=size * r, gap=gap)
    return b.build()


def _split_r0(kind: str, n: int, c: int, r: int, cores: int, width: int) -> TileProgram:
    """Tiles of `width` elements of one channel; half of that where two pieces are added."""
    size = jnp.dtype(kind).itemsize
    part = -(-width // 2)
    whole = 1 << max(0, (r // width).bit_length() - 1)  # tiles of the first part
    beyond = r - width * whole
    steps = -(-r // width)
    b = Builder("channel_grad_split_r0", grid=(cores,))
    held = up(size * part, BLOCK) // size * 2
    dy, x, stats, dstats = _queues(b, kind, (n, c, r), held, up(part, 8) * 2)
    sums = sums_buffer(b, width)
    for name in ("dbeta", "dgamma"):
        b.buffer(name, (SUMS,), "float32")
    narrow = Tile("x", x.shape, kind)

    def copy(tile: Tile, *lengths: int) -> None:
        for k, length in enumerate(lengths):
            b.data_copy_pad(tile, burst_bytes=size * length, more=k > 0)

    def count(*lengths: int) -> None:
        """Sums of one tile, or of two pieces of which the second is added onto the first."""
        longest, both = max(lengths), sum(lengths)
        onto = both - longest
        copy(dy, *lengths)
        walk(b, dy, both, "Load Cast")
        walk(b, Tile("dy", dy.shape, "float32"), onto, MERGE if onto else "")
        add_up(b, dy, sums, longest, MERGE)
        copy(x, *lengths)
        walk(b, dy, both, "Load Cast")
        walk(b, narrow, both, "Load Cast Sub Mul Mul")
        walk(b, x, onto, MERGE if onto else "")
        add_up(b, x, sums, longest, MERGE)

    def apply(length: int) -> None:
        copy(dy, length)
        copy(x, length)
        walk(b, dy, length, "Load Cast")
        walk(b, narrow, length, f"Mask Load Cast Sub {DX} Cast Store")
        b.copy_back(x, burst_bytes=size * length)

    with b.loop(-(-c // cores)):
        for k in range(3):
            b.data_copy_pad(stats, burst_bytes=4, more=k > 0)
        with b.loop(n):
            pairs, rest = divmod(beyond, width)
            if pairs:
                with b.loop(2 * pairs):
                    count(part, part)
            if rest > part:
                count(part, part)
                count(part, rest - part)
            elif rest:
                count(part, rest)
                count(part)
            if whole - pairs - bool(rest):
                with b.loop(whole - pairs - bool(rest)):
                    count(width)
        for name in ("dbeta", "dgamma"):
            add_up(b, Tile(name, (SUMS,), "float32"), sums, max(2, n * (steps + pairs)))
        with b.loop(n):
            if steps > 1:
                with b.loop(steps - 1):
                    apply(width)
            apply(r - width * (steps - 1))
        for _ in range(2):
            b.vector("Cast", dstats, Tile("dbeta", dstats.shape, "float32"))
            b.data_copy_pad(dstats, burst_bytes=4)
        b.barrier()
    return b.build()


def channel_scale(shape: tuple[int, ...], dtype: Any, chip: ChipSpec) -> TileProgram:
    """dx alone, the statistics held fixed: dx = dy * scale / sqrt(var + eps).

    Arguments as `channel_grad`. Tiles take space first, then samples, then channels, until half of the unified buffer
    holds one of dy and one of dx; tiles, not channels, are dealt to cores. Without space, channels lie along lanes.

    >>> from sim_npu.chips import get_chip
    >>> channel_scale((16, 256, 7, 7), "bfloat16", get_chip("950")).grid  # 18 cores of 64
    (18,)
    """
    n, c, r = fold(shape)
    kind, size = jnp.dtype(dtype).name, jnp.dtype(dtype).itemsize
    lanes = 256 // size
    if r == 1:
        return _infer_last(kind, n, c, lanes, chip)
    if c == 1:
        n, r = 1, n * r
    pieces = ((chip.ub_bytes // 2 - 8 * lanes) // size // 2) // lanes
    long = min(pieces, -(-r // lanes))
    samples = min(n, pieces // long)
    channels = min(c, pieces // long // samples)
    turns = -(-n // samples) * -(-r // (long * lanes))  # tiles of the same channels
    tiles = turns * -(-c // channels)
    return _infer(kind, (n, c, r), (samples, channels, long * lanes), turns, tiles, -(-tiles // chip.cores))


def _infer(kind: str, shape: tuple, tile: tuple[int, int, int], turns: int, tiles: int, mine: int) -> TileProgram:
    """Every tile as large as the first; where space is cut, as long as they are on average."""
    (_, c, r), (samples, channels, long) = shape, tile
    size, rows = jnp.dtype(kind).itemsize, samples * channels
    length = -(-r // -(-r // long))
    b = Builder("channel_scale", grid=(-(-tiles // mine),))
    dy = b.queue_in("dy", (rows, long), kind, depth=2, array=shape)
    dx = b.queue_out("dx", (rows, long), kind, depth=2, array=shape)
    stats = b.queue_in("stats", (2, up(channels, 8)), "float32", depth=2, array=(2, c))

    def step(copies: int) -> None:
        b.data_copy_pad(dy, bursts=rows, burst_bytes=size * length, gap=size * (r - length))
        for k in range(copies):
            b.data_copy_pad(stats, burst_bytes=4 * channels, more=k > 0)
        with b.loop(channels):
            walk(b, stats, LANES, RSTD)
        walk(b, dy, rows * up(length, LANES), "Load Cast Mul Mul Cast Store", out=dx)
        b.data_copy_pad(dx, bursts=rows, burst_bytes=size * length, gap=size * (r - length))

    turns = min(turns, mine)
    with b.loop(-(-mine // turns)):
        with b.loop(min(2, turns)):  # each buffer of the small arrays is filled once
            step(2)
        if turns > 2:
            with b.loop(turns - 2):
                step(0)
    return b.build()


def _infer_last(kind: str, n: int, c: int, lanes: int, chip: ChipSpec) -> TileProgram:
    """Channels along lanes: samples first, then channels in whole registers."""
    size = jnp.dtype(kind).itemsize
    samples = min(n, ((chip.ub_bytes // 2 - 8 * lanes) // size // 2) // lanes)
    most = chip.ub_bytes // 2 // lanes // (2 * size * samples + 8)
    width = max(1, min(c // lanes, most)) * lanes
    tiles = -(-n // samples) * -(-c // width)
    mine = -(-tiles // chip.cores)
    b = Builder("channel_scale_last", grid=(-(-tiles // mine),))
    dy = b.queue_in("dy", (samples, width), kind, depth=2, array=(n, c))
    dx = b.queue_out("dx", (samples, width), kind, depth=2, array=(n, c))
    stats = b.queue_in("stats", (2, width), "float32", depth=2, array=(2, c))
    wide = min(width, c)
    with b.loop(mine):
        b.data_copy_pad(dy, bursts=samples, burst_bytes=size * wide, gap=size * (c - wide))
        for k in range(2):
            b.data_copy_pad(stats, burst_bytes=4 * wide, more=k > 0)
        walk(b, stats, wide, RSTD)
        walk(b, dy, samples * up(wide, LANES), "Load Cast Mul Mul Cast Store", out=dx)
        b.data_copy_pad(dx, bursts=samples, burst_bytes=size * wide, gap=size * (c - wide))
    return b.build()
