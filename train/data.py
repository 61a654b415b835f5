"""Images and labels, split once and for all into training and test rows: scikit-learn's digits, or files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32, UInt8

from train.cifar import read_cifar
from train.errors import DataError
from train.files import MAX_BYTES
from train.idx import read_idx

DIGITS_TEST_ROWS = 400  # so that one row is 0.25 %
_DIGITS_SPLIT_SEED = 0
_IDX = {  # part -> file names, the official one first
    "train images": ("train-images-idx3-ubyte", "train-images.idx3-ubyte"),
    "train labels": ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte"),
    "test images": ("t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte"),
    "test labels": ("t10k-labels-idx1-ubyte", "t10k-labels.idx1-ubyte"),
}
_CIFAR_FOLDER = "cifar-10-batches-bin"  # the folder that the official archive unpacks to


@dataclass(frozen=True)
class Dataset:
    """Images `[N, H, W, C]` in uint8 up to `peak`, labels `[N]` from 0 to `classes` − 1."""

    name: str
    train_images: UInt8[np.ndarray, "n h w c"]
    train_labels: Int32[np.ndarray, " n"]
    test_images: UInt8[np.ndarray, "m h w c"]
    test_labels: Int32[np.ndarray, " m"]
    classes: int
    peak: float

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.train_images.shape[1:]


def load(directory: Path | None) -> Dataset:
    """The dataset of `directory`, or the digits for None."""
    return load_digits() if directory is None else load_directory(directory)


def load_digits() -> Dataset:
    """scikit-learn's digits, 8×8 pixels of 0 to 16: 1,397 rows to train on and 400 to test, always the same ones.

    Source: Alpaydin, Kaynak 1998, "Optical recognition of handwritten digits", UCI machine learning repository.
    """
    from sklearn.datasets import load_digits as load_bunch

    bunch = load_bunch()
    order = np.random.default_rng(_DIGITS_SPLIT_SEED).permutation(len(bunch.target))
    images = bunch.images[order, ..., None].astype(np.uint8)
    labels = bunch.target[order].astype(np.int32)
    train, test = slice(None, -DIGITS_TEST_ROWS), slice(-DIGITS_TEST_ROWS, None)
    return Dataset("digits", images[train], labels[train], images[test], labels[test], classes=10, peak=16.0)


def load_directory(directory: Path, *, max_bytes: int = MAX_BYTES) -> Dataset:
    """IDX files (MNIST, Fashion-MNIST) or CIFAR-10's binary files, whichever the directory holds.

    Args:
      directory: with the four IDX files, each plain or `.gz`, or with `data_batch_*.bin` and `test_batch.bin`, directly
        or in `cifar-10-batches-bin`.
      max_bytes: the largest content of one file.

    Raises:
      DataError: no such directory, neither or both kinds of files, a missing or malformed file, or numbers of images
        and labels that differ.
    """
    if not directory.is_dir():
        raise DataError(f"`data_dir`: {directory} is not a directory.")
    nested = directory / _CIFAR_FOLDER
    cifar = next((place for place in (directory, nested) if any(place.glob("data_batch_*.bin"))), None)
    idx = {part: _find(directory, names) for part, names in _IDX.items()}
    if cifar and any(idx.values()):
        raise DataError(
            f"`data_dir`: {directory} holds both IDX and CIFAR-10 files; keep them in directories of their own."
        )
    if cifar:
        return _load_cifar(cifar, max_bytes)
    if any(idx.values()):
        return _load_idx(directory, idx, max_bytes)
    expected = ", ".join(names[0] + "[.gz]" for names in _IDX.values())
    raise DataError(
        f"`data_dir`: {directory} holds no data that can be read; expected the IDX files {expected}, or CIFAR-10's "
        "data_batch_1.bin … and test_batch.bin."
    )


def _find(directory: Path, names: tuple[str, ...]) -> Path | None:
    candidates = [directory / (name + end) for name in names for end in ("", ".gz")]
    return next((path for path in candidates if path.is_file()), None)


def _load_idx(directory: Path, found: dict[str, Path | None], max_bytes: int) -> Dataset:
    def read(part: str) -> tuple[Path, np.ndarray]:
        path = found[part]
        if path is None:
            raise DataError(f"`data_dir`: {directory} lacks the {part}, {_IDX[part][0]} or {_IDX[part][0]}.gz.")
        return path, read_idx(path, ndim=3 if "images" in part else 1, max_bytes=max_bytes)

    def pair(split: str) -> tuple[np.ndarray, np.ndarray]:
        (images_path, images), (labels_path, labels) = read(f"{split} images"), read(f"{split} labels")
        if len(images) != len(labels):
            raise DataError(
                f"{images_path} has {len(images)} images, {labels_path} {len(labels)} labels; expected as many."
            )
        return images[..., None], labels.astype(np.int32)

    train, test = pair("train"), pair("test")
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            f"`data_dir`: {directory}: training images are {train[0].shape[1:3]} pixels and test images "
            f"{test[0].shape[1:3]}; expected one size."
        )
    return Dataset(
        directory.resolve().name, *train, *test, classes=int(max(train[1].max(), test[1].max())) + 1, peak=255.0
    )


def _load_cifar(directory: Path, max_bytes: int) -> Dataset:
    if not (directory / "test_batch.bin").is_file():
        raise DataError(f"`data_dir`: {directory} lacks test_batch.bin.")
    parts = [read_cifar(path, max_bytes=max_bytes) for path in sorted(directory.glob("data_batch_*.bin"))]
    images = np.concatenate([part[0] for part in parts])
    labels = np.concatenate([part[1] for part in parts]).astype(np.int32)
    test_images, test_labels = read_cifar(directory / "test_batch.bin", max_bytes=max_bytes)
    return Dataset("cifar-10", images, labels, test_images, test_labels.astype(np.int32), classes=10, peak=255.0)
