"""The places of images among the tokens of all examples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.images.positions import positions_of
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.images.written import Grid
from megatron_lite.data.index_cache import cache_key

NO_IMAGE = -1
"""Fills up the numbers of a sample's images to the most images of a sample."""


class Placed(NamedTuple):
    """An image in a sequence of tokens."""

    number: int
    """Number in the ImageReader."""
    start: int
    """The place of the first token for which its encoder gives a vector."""
    length: int
    """Number of tokens up to the last such token. Others may be among them."""
    grid: Grid


@dataclass(frozen=True)
class Images:
    """All images of the examples, in the order of their places."""

    reader: ImageReader
    placed: Sequence[Placed]
    starts: NDArray[np.int64]
    """The place of each image's first token."""

    @classmethod
    def of(cls, reader: ImageReader, placed: Sequence[Placed]) -> "Images":
        return cls(reader, placed, np.array([image.start for image in placed], np.int64))

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[images]: number of tokens of each image."""
        return np.array([image.grid.tokens for image in self.placed], np.int64)

    def within(self, first: int, end: int) -> Sequence[Placed]:
        """Return the images whose first token is in [first, end)."""
        start, stop = np.searchsorted(self.starts, (first, end))
        return self.placed[start:stop]

    def counts(self, firsts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of images in each of these parts [first, end) of examples."""
        before: NDArray[np.int64] = np.searchsorted(self.starts, firsts)
        return np.searchsorted(self.starts, ends) - before

    @property
    def count(self) -> int:
        """Number of different images."""
        return len(np.unique(self.numbers))

    @property
    def numbers(self) -> NDArray[np.int64]:
        """[images]: the number of each. The two answers of a pair may have the same image."""
        return np.array([image.number for image in self.placed], np.int64)

    def outside(self, firsts: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
        """Return how many different images are in none of these parts [first, end) of examples."""
        covering = np.zeros(len(self.placed) + 1, np.int64)
        np.add.at(covering, np.searchsorted(self.starts, firsts), 1)
        np.add.at(covering, np.searchsorted(self.starts, ends), -1)
        inside = covering[:-1].cumsum() > 0
        return self.count - len(np.unique(self.numbers[inside]))

    @cached_property
    def identity(self) -> str:
        """A hash of the images and of their places. It reads all images, once. Raises CorruptCheckpoint."""
        different, numbers = np.unique(self.numbers, return_inverse=True)
        contents = [self.reader.hashed(number) for number in different.tolist()]
        return cache_key(starts=self.starts, numbers=numbers, contents=contents)

    def taken(self, numbers: Sequence[int], most: int) -> NDArray[np.int64]:
        """Return the numbers of a sample's images, filled up to `most`, and read these images for the encoder."""
        found = np.full(most, NO_IMAGE, np.int64)
        found[: len(numbers)] = numbers
        for number in numbers:
            self.reader.prepare(number)
        return found

    def last_whole(self, first: int, end: int) -> int:
        """Return the end of a part [first, end) of an example that holds whole images: `end`, or the start of its last image."""
        inside = self.within(first, end)
        if inside and inside[-1].start + inside[-1].length > end:
            return inside[-1].start
        return end

    def last_whole_before_label(self, first: int, end: int) -> int:
        """Return `last_whole` for a part whose last token is a label alone."""
        return self.last_whole(first, end - 1) + 1

    def without_tokens(self, kept: NDArray[np.bool_]) -> "Images":
        """Return the images of the same examples without some tokens between images. kept: [tokens of all examples]."""
        before = np.concatenate(([0], np.cumsum(kept, dtype=np.int64)))
        moved = [image._replace(start=int(before[image.start])) for image in self.placed]
        return Images.of(self.reader, moved)

    def positions(self, first: int, end: int) -> NDArray[np.int64]:
        """Return int64 [end - first, 3]: frame, row and column of the tokens of a part of an example."""
        return positions_of(end - first, self._grids(first, end))

    def _grids(self, first: int, end: int) -> Iterator[tuple[int, Grid]]:
        for image in self.within(first, end):
            yield image.start - first, image.grid
