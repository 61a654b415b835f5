"""The order of rows: the same from the same seed, complete in every epoch, split among shards, prefetched."""

import numpy as np
import pytest

from train.batches import Batches, prefetch
from train.errors import ConfigError

ROWS = 22
IMAGES = np.arange(ROWS, dtype=np.uint8).reshape(ROWS, 1, 1, 1)
LABELS = np.arange(ROWS)


def labels_of(start, stop, *, size=4, **options):
    return [labels.tolist() for _, labels in Batches(IMAGES, LABELS, size=size, **options).between(start, stop)]


def test_the_same_seed_gives_the_same_rows_from_any_step():
    whole = labels_of(0, 12, seed=3)

    assert labels_of(0, 12, seed=3) == whole
    assert labels_of(7, 12, seed=3) == whole[7:]
    assert labels_of(0, 12, seed=4) != whole


def test_an_epoch_has_no_row_twice_and_the_next_another_order():
    one, two = labels_of(0, 5), labels_of(5, 10)

    assert len(set(sum(one, []))) == 20
    assert len(set(sum(two, []))) == 20
    assert one != two


def test_images_go_with_their_labels_and_are_scaled_by_the_peak():
    for images, labels in Batches(IMAGES, LABELS, size=4, peak=16.0).between(0, 3):
        assert images.dtype == np.float32
        np.testing.assert_allclose(images[:, 0, 0, 0], labels / 16)


def test_shards_together_are_the_global_batch():
    parts = [labels_of(0, 7, shard=shard, shards=2) for shard in range(2)]

    assert [a + b for a, b in zip(*parts)] == labels_of(0, 7)


@pytest.mark.parametrize(
    "options, fault",
    [
        ({"size": 0}, "`size` is 0"),
        ({"size": 23}, "expected 1 to 22"),
        ({"size": 4, "shards": 3}, "multiple of `shards` = 3"),
        ({"size": 4, "shard": 2, "shards": 2}, "`shard` is 2 of 2"),
        ({"size": 4, "labels": LABELS[:3]}, "expected as many"),
    ],
)
def test_bad_settings_are_named(options, fault):
    with pytest.raises(ConfigError, match=fault):
        Batches(**{"images": IMAGES, "labels": LABELS, **options})


def test_prefetch_keeps_order_and_runs_no_further_ahead_than_its_depth():
    placed = []

    def place(item):
        placed.append(item)
        return -item

    ahead = prefetch(iter(range(5)), place, depth=3)

    assert next(ahead) == 0
    assert placed == [0, 1, 2]
    assert list(ahead) == [-1, -2, -3, -4]
    with pytest.raises(ConfigError, match="`depth` is 0"):
        next(prefetch(iter(range(5)), place, depth=0))
