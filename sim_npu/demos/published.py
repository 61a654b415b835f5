"""What the published kernels of 950 have in common: their registers, tiles and sums (hicann/ops-nn, `arch35`).

`published_group` and `published_grad` lay such kernels out queue by queue: which template a shape gets, how its buffers
divide the unified buffer, how often and in which order an array is copied, and every instruction that a register (64
float32) goes through, loads and stores of registers among them. Two instructions start in a cycle, but for a store and
the reduction of a register, which have a cycle to themselves (hicann/asc-devkit, table of single and dual issue).

Sums are the library's: the part beyond a power of two is added onto the front, every register of that is reduced to one
number, and the numbers once more.
"""

from __future__ import annotations

import math

from sim_npu.builder import Builder, Tile

LANES = 64  # float32 of a register
BLOCK = 32  # bytes
SHORT = {"Load": "LoadAlign", "Mask": "UpdateMask", "Store": "StoreAlign"}
RSTD = "Load Sqrt Div Muls Mul Adds Mul Muls Mul Muls Mul Mul Mul Select Select Store"  # with a Newton step


def cut(size: int, unit: int) -> int:
    """The largest multiple of `unit` within `size`.

    >>> cut(100, 32), up(100, 32)
    (96, 128)
    """
    return size // unit * unit


def up(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that holds `size`."""
    return -(-size // unit) * unit


def half(elements: int) -> int:
    """The power of two that the rest is added onto: the largest below `elements`.

    >>> half(15392), half(8192), half(1)
    (8192, 4096, 1)
    """
    return 1 << max(0, (elements - 1).bit_length() - 1)


def fold(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """[N, C, space...] as (N, C, elements of space)."""
    return shape[0], shape[1], math.prod(shape[2:])


def walk(b: Builder, tile: Tile, elements: int, instructions: str, *, out: Tile | None = None) -> None:
    """Instructions over the registers of `elements`, the last one into `out`; casts only where the tile is narrower.

    `Load`, `Mask` and `Store` stand for LoadAlign, UpdateMask and StoreAlign.
    """
    names = [SHORT.get(i, i) for i in instructions.split() if i != "Cast" or tile.dtype != "float32"]
    part = Tile(tile.name, (elements,), "float32")
    for name in names[:-1]:
        b.vector(name, part, part)
    if names:
        b.vector(names[-1], Tile((out or tile).name, (elements,), "float32"), part)


def add_up(b: Builder, tile: Tile, sums: Tile, elements: int, merge: str = "Mask Add") -> None:
    """One number from `elements` that are in registers as float32."""
    power = half(elements) if elements > LANES else elements
    rows = -(-power // LANES)
    wide = Tile(tile.name, tile.shape, "float32")
    if elements > power:
        walk(b, wide, elements - power, merge)
    walk(b, wide, power, "Reduce")
    walk(b, wide, power, "Store", out=sums)
    if rows > LANES:
        walk(b, sums, rows // 2, "Load Load Add Store")
    if rows > 1:
        walk(b, sums, min(rows, LANES), "Load Reduce Store")


def sums_buffer(b: Builder, elements: int) -> Tile:
    """The buffer of one number per register, for `add_up`."""
    return b.buffer("sums", (up(4 * max(1, half(elements) // LANES), BLOCK) // 4,), "float32")
