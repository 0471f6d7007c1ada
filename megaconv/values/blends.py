"""Blends of several tensors to one: a weighted sum, and a point on the arc between two tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import acos, sin, sqrt
from threading import Lock
from typing import NamedTuple, Protocol

from formats.lazy_numpy import Doubles, Longs, np
from formats.tensor import ITEMSIZE, Box, LazyTensor, row_blocks
from megaconv.values import rounding
from megaconv.values.scaled import read_bytes

_BLOCK_ELEMENTS = 1 << 17
"""Elements of a tensor that are read at a time, before it is blended."""
_STRAIGHT = 0.9995
"""The cosine beyond which an arc is taken for a line, as in mergekit."""


class Run(NamedTuple):
    """Consecutive elements of a rectangle of a tensor, in row-major order."""

    box: Box
    start: int
    """The first element, counted within the rectangle."""
    stop: int
    columns: int
    """Columns of the whole tensor."""

    def places(self) -> Longs:
        """The place of each element in the tensor, in row-major order."""
        rows, cols = np.divmod(np.arange(self.start, self.stop), self.box.cols)
        places = (rows + self.box.row0) * self.columns + cols + self.box.col0
        return places.astype(np.uint64)


class Blend(Protocol):
    """The computation of one tensor from several tensors of its shape."""

    @property
    def keeps_equal(self) -> bool:
        """True if numbers that are equal in all tensors are their own blend."""
        ...

    def blended(self, numbers: Sequence[Doubles], run: Run) -> Doubles:
        """The result for a run of elements. numbers: those of each tensor, which may be overwritten."""
        ...


@dataclass(frozen=True)
class WeightedSum:
    """The sum of the tensors, each times its share, in their order. Shares add up to 1."""

    shares: Sequence[float]
    keeps_equal = True

    def blended(self, numbers: Sequence[Doubles], run: Run) -> Doubles:
        return weighted_sum(numbers, self.shares)


def _dot(a: Doubles, b: Doubles) -> float:
    # The order of a BLAS product's sum depends on the processor.
    return float(np.multiply(a, b).sum())


@dataclass
class Arc:
    """A point on the arc between two tensors, taken as vectors: spherical linear interpolation.

    Two tensors of nearly the same or the opposite direction, and a tensor of zeros, are interpolated along a line.
    """

    ends: Sequence[LazyTensor]
    """Both tensors."""
    place: float
    """0 is the first tensor, 1 the second one."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def keeps_equal(self) -> bool:
        """True on a line, whose shares add up to 1. Those of an arc add up to more."""
        return self._shares == (1 - self.place, self.place)

    def blended(self, numbers: Sequence[Doubles], run: Run) -> Doubles:
        return weighted_sum(numbers, self._shares)

    @property
    def _shares(self) -> tuple[float, float]:
        with self._lock:
            return self._computed_shares

    @cached_property
    def _computed_shares(self) -> tuple[float, float]:
        cosine = self._cosine()
        if not abs(cosine) <= _STRAIGHT:  # NaN too
            return 1 - self.place, self.place
        angle = acos(cosine)
        return sin((1 - self.place) * angle) / sin(angle), sin(self.place * angle) / sin(angle)

    def _cosine(self) -> float:
        """The cosine of the angle between both tensors; NaN if one of them is zero, or has a number that isn't finite."""
        product = first = second = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            for a, b in read_together(self.ends):
                product += _dot(a, b)
                first += _dot(a, a)
                second += _dot(b, b)
        norms = sqrt(first) * sqrt(second) if first > 0 and second > 0 else 0.0
        return product / norms if norms else float("nan")


def weighted_sum(numbers: Sequence[Doubles], shares: Sequence[float]) -> Doubles:
    """Return the sum, in the order of the shares. The numbers are overwritten."""
    total = np.zeros_like(numbers[0])
    for each, share in zip(numbers, shares, strict=True):
        total += np.multiply(each, share, out=each)
    return total


def read_together(tensors: Sequence[LazyTensor]) -> Iterator[list[Doubles]]:
    """Yield the numbers of all of some tensors of one shape, a block of elements at a time."""
    shape = tensors[0].shape
    for box in row_blocks(shape, "float64", _BLOCK_ELEMENTS * ITEMSIZE["float64"]):
        yield [_numbers(tensor, box) for tensor in tensors]


def _numbers(tensor: LazyTensor, box: Box) -> Doubles:
    stored = read_bytes(tensor, box, ITEMSIZE[tensor.dtype])
    return rounding.numbers(stored.reshape(-1), tensor.dtype)
