"""Shuffled batches of arrays. Any step's batch follows from the seed alone, so a resumed run sees the same rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from train.errors import ConfigError

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Batches:
    """Batches of rows drawn without replacement, every epoch in a new order; rows left over at its end are skipped.

    Args:
      images: `[N, H, W, C]`, uint8; a batch is divided by `peak`, in float32.
      labels: `[N]`, integers.
      size: rows of the global batch.
      seed: of the order. Epoch e is ordered by the generator with seed (seed, e).
      peak: the value that becomes 1.0.
      shard, shards: which part of every batch this process takes, and in how many parts it is cut.

    Raises:
      ConfigError: a `size` below 1, above N or not divisible by `shards`; a `shard` outside 0 … `shards` − 1.
    """

    images: np.ndarray
    labels: np.ndarray
    size: int
    seed: int = 0
    peak: float = 255.0
    shard: int = 0
    shards: int = 1

    def __post_init__(self):
        if len(self.images) != len(self.labels):
            raise ConfigError(
                f"`images` has {len(self.images)} rows and `labels` {len(self.labels)}; expected as many."
            )
        if not 1 <= self.size <= len(self.images):
            raise ConfigError(
                f"`size` is {self.size} rows per step; expected 1 to {len(self.images)}, the rows there are."
            )
        if self.shards < 1 or not 0 <= self.shard < self.shards:
            raise ConfigError(f"`shard` is {self.shard} of {self.shards}; expected 0 to {self.shards - 1}.")
        if self.size % self.shards:
            raise ConfigError(f"`size` is {self.size} rows per step; expected a multiple of `shards` = {self.shards}.")

    @property
    def steps_per_epoch(self) -> int:
        return len(self.images) // self.size

    def order(self, epoch: int) -> np.ndarray:
        """The rows of one epoch, in the order of their use."""
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.images))

    def between(self, start: int, stop: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """This shard's images and labels of the steps `start` … `stop` − 1, counted from the start of training."""
        part = self.size // self.shards
        epoch, order = -1, np.empty(0, np.int64)
        for step in range(start, stop):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = self.order(epoch)
            first = step % self.steps_per_epoch * self.size + self.shard * part
            rows = order[first : first + part]
            yield scaled(self.images[rows], self.peak), self.labels[rows]


def scaled(images: np.ndarray, peak: float) -> np.ndarray:
    """uint8 images as float32, `peak` becoming 1.0."""
    return images.astype(np.float32) / np.float32(peak)


def prefetch(items: Iterator[T], place: Callable[[T], U], *, depth: int = 2) -> Iterator[U]:
    """`place` each item up to `depth` items ahead of its use.

    Placing starts a copy to the devices and returns at once, so no thread is needed: copies run beside earlier steps.

    Raises:
      ConfigError: `depth` below 1.

    >>> list(prefetch(iter([1, 2, 3]), lambda item: item * 10))
    [10, 20, 30]
    """
    if depth < 1:
        raise ConfigError(f"`depth` is {depth}; expected at least 1.")
    ahead: deque[U] = deque()
    for item in items:
        ahead.append(place(item))
        if len(ahead) >= depth:
            yield ahead.popleft()
    yield from ahead
