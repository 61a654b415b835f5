"""Reading a data file of known size, plain or gzipped, without trusting what it says about itself."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from train.errors import DataError

MAX_BYTES = 1 << 30  # of one unpacked file; the largest common one, EMNIST by class, has 547 MB
_CHUNK = 1 << 20
_DEFLATE_RATIO = 1032  # most bytes that deflate can make of one (RFC 1951: 258 bytes from two bits)


def read_exact(path: Path, *, header: int, size_of: Callable[[bytes], int], max_bytes: int = MAX_BYTES) -> bytes:
    """The whole content of a file whose size follows from its first bytes.

    Nothing is allocated on the word of the header: a plain file must have the announced size on disk, and a gzipped one
    is unpacked in pieces, to the announced size and one byte more.

    Args:
      path: gzipped if its name ends in `.gz`.
      header: bytes to read first.
      size_of: those bytes → size of the whole content; may raise `DataError`.
      max_bytes: the largest content accepted.

    Raises:
      DataError: the file is missing, unreadable, shorter or longer than announced, larger than `max_bytes`, or
        not gzip.
    """
    try:
        stored = path.stat().st_size
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as opened:
            stream = cast(BinaryIO, opened)
            first = _take(stream, header)
            if len(first) < header:
                raise DataError(f"{path}: truncated: {len(first)} bytes, expected a header of {header}.")
            size = size_of(first)
            if size > max_bytes:
                raise DataError(f"{path}: announces {size:,} bytes; the limit is {max_bytes:,}.")
            if path.suffix != ".gz" and stored != size:
                raise DataError(_mismatch(path, stored, size))
            if path.suffix == ".gz" and size > stored * _DEFLATE_RATIO:
                raise DataError(
                    f"{path}: announces {size:,} bytes, more than {stored:,} bytes of gzip can hold; damaged."
                )
            rest = _take(stream, size - header + 1)
            if header + len(rest) != size:
                raise DataError(_mismatch(path, header + len(rest), size))
            return first + rest
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        raise DataError(f"{path}: cannot be read: {error}.") from error


def _take(stream: BinaryIO, count: int) -> bytes:
    """At most `count` bytes, in pieces: `read(count)` alone would reserve all of them before the first is there."""
    taken = bytearray()
    while len(taken) < count:
        piece = stream.read(min(_CHUNK, count - len(taken)))
        if not piece:
            break
        taken += piece
    return bytes(taken)


def _mismatch(path: Path, found: int, announced: int) -> str:
    kind, holds = ("truncated", "") if found < announced else ("longer than announced", "at least ")
    return f"{path}: {kind}: it holds {holds}{found:,} bytes and announces {announced:,}."
