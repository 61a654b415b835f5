"""Data files: what is read from good ones, and what is said about bad ones."""

import gzip
import re
import struct
import tracemalloc

import numpy as np
import pytest

from train.cifar import RECORD, read_cifar
from train.data import load_digits, load_directory
from train.errors import DataError
from train.idx import read_idx

IMAGES = np.random.default_rng(0).integers(0, 256, (20, 5, 4), dtype=np.uint8)
LABELS = np.arange(20, dtype=np.uint8) % 10


def idx_bytes(array, *, shape=None, kind=0x08):
    shape = array.shape if shape is None else shape
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape) + array.tobytes()


def write(path, content):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_idx_directory(directory, *, end=""):
    for part in ("train", "t10k"):
        write(directory / f"{part}-images-idx3-ubyte{end}", idx_bytes(IMAGES))
        write(directory / f"{part}-labels-idx1-ubyte{end}", idx_bytes(LABELS))
    return directory


def cifar_bytes(count, *, label=3):
    records = np.zeros((count, RECORD), np.uint8)
    records[:, 0] = label
    records[:, 1:1025] = 10  # red
    records[:, 1025:2049] = 20
    records[:, 2049:] = 30
    records[0, 1 + 32] = 99  # red, row 1, column 0
    return records.tobytes()


@pytest.mark.parametrize("end", ["", ".gz"])
def test_idx_arrays_come_back(tmp_path, end):
    path = write(tmp_path / f"images{end}", idx_bytes(IMAGES))

    np.testing.assert_array_equal(read_idx(path, ndim=3), IMAGES)


def test_idx_directory_gives_both_splits(tmp_path):
    data = load_directory(write_idx_directory(tmp_path, end=".gz"))

    np.testing.assert_array_equal(data.train_images, IMAGES[..., None])
    np.testing.assert_array_equal(data.test_labels, LABELS)
    assert (data.classes, data.peak, data.image_shape) == (10, 255.0, (5, 4, 1))


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-bin"])
def test_cifar_directory_gives_rows_with_channels_last(tmp_path, folder):
    place = tmp_path / folder
    place.mkdir(exist_ok=True)
    write(place / "data_batch_1.bin", cifar_bytes(2))
    write(place / "data_batch_2.bin", cifar_bytes(3, label=7))
    write(place / "test_batch.bin", cifar_bytes(1))

    data = load_directory(tmp_path)

    assert data.train_images.shape == (5, 32, 32, 3)
    assert data.train_labels.tolist() == [3, 3, 7, 7, 7]
    assert data.train_images[0, 1, 0].tolist() == [99, 20, 30]
    assert data.train_images[1, 1, 0].tolist() == [10, 20, 30]


def test_digits_are_split_the_same_way_every_time():
    one, two = load_digits(), load_digits()

    assert (len(one.train_labels), len(one.test_labels)) == (1397, 400)
    assert (one.train_images.min(), one.train_images.max(), one.peak) == (0, 16, 16.0)
    np.testing.assert_array_equal(one.train_images, two.train_images)
    np.testing.assert_array_equal(one.test_labels, two.test_labels)
    assert sorted(np.bincount(one.test_labels))[0] > 25  # every class is there


BAD_IDX = {
    "empty": (b"", "truncated: 0 bytes, expected a header of 16"),
    "header cut short": (idx_bytes(IMAGES)[:9], "truncated: 9 bytes"),
    "another format": (b"\x89PNG" + bytes(40), "not an IDX file: begins with 89 50 4e 47"),
    "floats": (idx_bytes(IMAGES, kind=0x0D), "IDX type 0x0d"),
    "labels for images": (idx_bytes(LABELS) + bytes(20), "1 dimensions; expected 3"),
    "empty dimension": (idx_bytes(IMAGES, shape=(20, 0, 4)), "empty dimension"),
    "truncated": (idx_bytes(IMAGES)[:-7], "truncated"),
    "too long": (idx_bytes(IMAGES) + b"x", "longer than announced"),
    "header of 4 TB": (idx_bytes(IMAGES, shape=(1 << 30, 64, 64)), "the limit is"),
}


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("case", BAD_IDX)
def test_malformed_idx_names_file_and_fault(tmp_path, case, end):
    content, fault = BAD_IDX[case]
    path = write(tmp_path / f"train-images{end}", content)

    with pytest.raises(DataError, match=f"{re.escape(str(path))}: .*{re.escape(fault)}"):
        read_idx(path, ndim=3)


def test_a_false_header_costs_no_memory(tmp_path):
    claimed = (1, 20_000, 20_000)  # 400 MB, under the limit
    plain = write(tmp_path / "images", idx_bytes(IMAGES, shape=claimed))
    packed = write(tmp_path / "images.gz", idx_bytes(IMAGES, shape=claimed))
    noise = np.random.default_rng(0).integers(0, 256, 500_000, dtype=np.uint8)  # gzip that could hold 400 MB
    dense = write(tmp_path / "dense.gz", idx_bytes(noise, shape=claimed))

    tracemalloc.start()
    for path, fault in ((plain, "truncated"), (packed, "more than"), (dense, "truncated")):
        with pytest.raises(DataError, match=fault):
            read_idx(path, ndim=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 8e6


def test_a_gzip_bomb_is_left_after_the_announced_size(tmp_path):
    path = write(tmp_path / "images.gz", idx_bytes(IMAGES) + bytes(100_000_000))

    tracemalloc.start()
    with pytest.raises(DataError, match="longer than announced"):
        read_idx(path, ndim=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 8e6


@pytest.mark.parametrize("damage", ["cut", "not gzip", "flipped"])
def test_damaged_gzip_names_the_file(tmp_path, damage):
    path = tmp_path / "images.gz"
    content = bytearray(gzip.compress(idx_bytes(IMAGES)))
    if damage == "flipped":
        content[60] ^= 0xFF
    path.write_bytes({"cut": content[:-20], "not gzip": b"plain text", "flipped": content}[damage])

    with pytest.raises(DataError, match=re.escape(str(path))):
        read_idx(path, ndim=3)


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(DataError, match="cannot be read: .*No such file"):
        read_idx(tmp_path / "absent", ndim=1)


@pytest.mark.parametrize(
    "content, fault",
    [
        (b"", "truncated: 0 bytes"),
        (cifar_bytes(2)[:-1], "not a whole number of records"),
        (cifar_bytes(2, label=10), "record 0 has label 10"),
    ],
)
def test_malformed_cifar_names_file_and_fault(tmp_path, content, fault):
    path = write(tmp_path / "data_batch_1.bin", content)

    with pytest.raises(DataError, match=f"{re.escape(str(path))}: .*{fault}"):
        read_cifar(path)


def test_cifar_has_a_size_limit(tmp_path):
    path = write(tmp_path / "data_batch_1.bin", cifar_bytes(2))

    with pytest.raises(DataError, match="the limit is 5,000"):
        read_cifar(path, max_bytes=5000)


def test_a_directory_without_data_says_what_is_expected(tmp_path):
    with pytest.raises(DataError, match="train-images-idx3-ubyte.*data_batch_1.bin"):
        load_directory(tmp_path)
    with pytest.raises(DataError, match="not a directory"):
        load_directory(tmp_path / "absent")


def test_a_directory_with_both_kinds_is_refused(tmp_path):
    write_idx_directory(tmp_path)
    write(tmp_path / "data_batch_1.bin", cifar_bytes(1))

    with pytest.raises(DataError, match="both"):
        load_directory(tmp_path)


def test_a_missing_part_is_named(tmp_path):
    write_idx_directory(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="lacks the test labels, t10k-labels-idx1-ubyte"):
        load_directory(tmp_path)

    other = tmp_path / "cifar"
    other.mkdir()
    write(other / "data_batch_1.bin", cifar_bytes(1))
    with pytest.raises(DataError, match=r"lacks test_batch\.bin"):
        load_directory(other)


def test_images_and_labels_must_agree(tmp_path):
    write_idx_directory(tmp_path)
    write(tmp_path / "train-labels-idx1-ubyte", idx_bytes(LABELS[:19]))
    with pytest.raises(DataError, match=r"20 images, .*19 labels"):
        load_directory(tmp_path)

    write_idx_directory(tmp_path)
    write(tmp_path / "t10k-images-idx3-ubyte", idx_bytes(IMAGES.reshape(20, 4, 5)))
    with pytest.raises(DataError, match="expected one size"):
        load_directory(tmp_path)
