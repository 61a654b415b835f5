"""IDX files, the format of MNIST and of its successors, plain or gzipped.

A file is: two zero bytes, a type code (0x08 for unsigned bytes), the number of dimensions, each dimension as a
big-endian 32-bit integer, then the values, last dimension fastest. Source: LeCun, Cortes, Burges, "The MNIST database".
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from train.errors import DataError
from train.files import MAX_BYTES, read_exact


def read_idx(path: Path, *, ndim: int, max_bytes: int = MAX_BYTES) -> UInt8[np.ndarray, "*shape"]:
    """The array of an IDX file of unsigned bytes.

    Args:
      path: gzipped if its name ends in `.gz`.
      ndim: dimensions that the file must have: 3 for images `[N, H, W]`, 1 for labels `[N]`.
      max_bytes: the largest content accepted.

    Raises:
      DataError: naming the file: another format, type or number of dimensions, an empty dimension, or a size that is
        not the announced one.
    """
    header = 4 + 4 * ndim

    def dimensions(first: bytes) -> tuple[int, ...]:
        if first[:2] != b"\0\0":
            raise DataError(f"{path}: not an IDX file: begins with {first[:4].hex(' ')}, expected 00 00 08 {ndim:02x}.")
        if first[2] != 0x08:
            raise DataError(f"{path}: values of IDX type 0x{first[2]:02x}; expected 0x08, unsigned bytes.")
        if first[3] != ndim:
            raise DataError(f"{path}: {first[3]} dimensions; expected {ndim} ({'images' if ndim == 3 else 'labels'}).")
        return tuple(int(size) for size in np.frombuffer(first, ">u4", count=ndim, offset=4))

    def size_of(first: bytes) -> int:
        shape = dimensions(first)
        if 0 in shape:
            raise DataError(f"{path}: shape {shape} has an empty dimension.")
        return header + math.prod(shape)

    content = read_exact(path, header=header, size_of=size_of, max_bytes=max_bytes)
    return np.frombuffer(content, np.uint8, offset=header).reshape(dimensions(content[:header]))
