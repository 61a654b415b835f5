"""CIFAR-10's binary files.

A file is a row of records without a header; a record is one label byte, then 32×32 bytes each of red, green and blue.
Source: Krizhevsky, "The CIFAR-10 dataset", section "Binary version".
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from train.errors import DataError
from train.files import MAX_BYTES, read_exact

RECORD = 1 + 3 * 32 * 32


def read_cifar(
    path: Path, *, max_bytes: int = MAX_BYTES
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], UInt8[np.ndarray, " n"]]:
    """Images `[N, 32, 32, 3]` and labels `[N]` of one file.

    Raises:
      DataError: naming the file: its size is not a whole number of records, or a label is above 9.
    """

    def size_of(first: bytes) -> int:
        size = path.stat().st_size
        if size % RECORD:
            raise DataError(
                f"{path}: {size:,} bytes are not a whole number of records of {RECORD:,}; truncated or not CIFAR-10's "
                "binary version."
            )
        return size

    records = np.frombuffer(read_exact(path, header=1, size_of=size_of, max_bytes=max_bytes), np.uint8)
    records = records.reshape(-1, RECORD)
    labels = records[:, 0]
    if labels.max() > 9:
        row = int(np.argmax(labels > 9))
        raise DataError(f"{path}: record {row} has label {labels[row]}; expected 0 to 9.")
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels
