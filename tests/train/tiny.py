"""A small data directory for runs of a few steps: three classes told apart by where the image is bright."""

import struct

import numpy as np


def write_tiny_data(directory, *, train_rows=160, test_rows=37):
    """IDX files of 4×4 pixels; 160 rows are 10 steps of 8 devices × 2 rows."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for part, rows in (("train", train_rows), ("t10k", test_rows)):
        labels = rng.integers(0, 3, rows).astype(np.uint8)
        images = rng.integers(0, 100, (rows, 4, 4), dtype=np.uint8)
        images[np.arange(rows), labels] += 120
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (directory / name).write_bytes(header + array.tobytes())
    return directory
