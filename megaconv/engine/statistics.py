"""Streamed statistics of tensors: mean, standard deviation, extremes, zeros, NaN and infinities, and a histogram.

All elements count, except in the histogram, which counts at most 65,536 of them at equal distances. Means and squares
are summed in float32 within a chunk that stays in the processor's cache, around the chunk's own mean, and in float64
from chunk to chunk (Chan, Golub and LeVeque 1979). A standard deviation far below the mean isn't lost this way.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.tensor import ITEMSIZE, Bytes, LazyTensor, byte_count
from megaconv.engine.fingerprints import read_blocks
from megaconv.threads import thread_pool
from megaconv.values import rounding

BINS = 32
_CHUNK = 1 << 16
"""Elements of a chunk."""
_SAMPLED = 1 << 16
_SQUARABLE = 1e15
"""From this magnitude on, a chunk's sum of squares may exceed float32."""
_ONES = np.ones(_CHUNK, np.float32)

FLOATS = ("bfloat16", "float16", "float32", "float64")
COMPUTED = (
    *FLOATS,
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
)
"""dtypes with statistics. Eight-bit floats have separate scales, without which they mean nothing."""

Numbers = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Statistics:
    """Statistics of one tensor.

    Mean, deviation and extremes are those of the finite elements, or 0 if there are none.
    """

    elements: int
    mean: float
    std: float
    minimum: float
    maximum: float
    zeros: int
    nan: int
    infinite: int
    histogram: tuple[int, ...]
    """BINS counts at equal steps from minimum to maximum."""
    sampled: int
    """Number of elements that the histogram counts."""

    def to_json(self) -> dict[str, Any]:
        return {
            "elements": self.elements,
            "mean": self.mean,
            "std": self.std,
            "min": self.minimum,
            "max": self.maximum,
            "zeros": self.zeros,
            "nan": self.nan,
            "infinite": self.infinite,
            "histogram": list(self.histogram),
            "sampled": self.sampled,
        }


@dataclass
class Running:
    """Statistics of the elements that have been added so far."""

    step: int
    """Distance between the elements that the histogram counts."""
    count: int = 0
    """Number of finite elements."""
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""
    low: float = float("inf")
    high: float = float("-inf")
    zeros: int = 0
    nan: int = 0
    infinite: int = 0
    _seen: int = 0
    _sample: list[Numbers] = field(default_factory=list)

    def add(self, values: Numbers) -> None:
        """Add some elements, in an array that may be overwritten afterwards.

        This takes as few passes as possible, and each pass releases the interpreter lock. A product with ones is
        numpy's fastest sum. Comparing with zero and counting the matches is faster than counting the elements that
        aren't zero.
        """
        count = values.size
        self.zeros += int(np.count_nonzero(values == 0))
        first_in_sample = -self._seen % self.step
        self._sample.append(values[first_in_sample :: self.step].copy())
        self._seen += count
        with np.errstate(all="ignore"):
            low = float(values.min())
            high = float(values.max())
            if not max(-low, high) < _SQUARABLE:  # also true for NaN
                self._add_slowly(values)
                return
            ones = _ONES[:count].astype(values.dtype, copy=False)
            about = float(np.dot(values, ones)) / count
            values -= values.dtype.type(about)
            # The mean of the remainders corrects the rounding of the first mean, in the squares too.
            correction = float(np.dot(values, ones)) / count
            squares = float(np.dot(values, values))
            squares -= count * correction * correction
            self._combine(count, about + correction, max(0.0, squares), low, high)

    def _add_slowly(self, values: Numbers) -> None:
        """Add only the finite elements, in float64: for values with NaN or infinities, or very large ones."""
        finite = values[np.isfinite(values)].astype(np.float64)
        self.nan += int(np.count_nonzero(np.isnan(values)))
        self.infinite += int(np.count_nonzero(np.isinf(values)))
        if finite.size:
            mean = float(finite.mean())
            squares = float(np.square(finite - mean).sum())
            self._combine(finite.size, mean, squares, float(finite.min()), float(finite.max()))

    def _combine(self, count: int, mean: float, squares: float, low: float, high: float) -> None:
        total = self.count + count
        distance = mean - self.mean
        self.squares += squares + distance * distance * self.count * count / total
        self.mean += distance * count / total
        self.count = total
        self.low, self.high = min(self.low, low), max(self.high, high)

    def statistics(self) -> Statistics:
        sample = np.concatenate(self._sample) if self._sample else np.empty(0, np.float32)
        sample = sample[np.isfinite(sample)]
        low, high = (self.low, self.high) if self.count else (0.0, 0.0)
        std = sqrt(self.squares / self.count) if self.count else 0.0
        found = (
            self.zeros,
            self.nan,
            self.infinite,
            _histogram(sample.astype(np.float64), low, high),
            sample.size,
        )
        return Statistics(self._seen, self.mean, std, low, high, *found)


def _histogram(sample: NDArray[np.float64], low: float, high: float) -> tuple[int, ...]:
    """Counts of BINS equal steps. If all values are equal, the middle bin counts all of them."""
    if high / 2 > low / 2:  # compare halves: the difference of two large numbers may overflow
        bins = np.minimum((sample / 2 - low / 2) / (high / 2 - low / 2) * BINS, BINS - 1).astype(
            np.int64
        )
    else:
        bins = np.full(sample.size, BINS // 2)
    return tuple(int(count) for count in np.bincount(bins, minlength=BINS))


def tensor_statistics(
    tensor: LazyTensor, advance: Callable[[int], None] | None = None
) -> Statistics:
    """Statistics of one tensor, which is read in blocks. Its dtype must be one of COMPUTED."""
    elements = prod(tensor.shape)
    # An odd step visits all columns of a matrix.
    running = Running(max(1, elements // _SAMPLED) | 1)
    itemsize, buffer = ITEMSIZE[tensor.dtype], np.empty(_CHUNK, np.float32)
    for block in read_blocks(tensor):
        flat = block.reshape(-1)
        for start in range(0, flat.size, _CHUNK * itemsize):
            stored = flat[start : start + _CHUNK * itemsize]
            running.add(_numbers(stored, tensor.dtype, buffer[: stored.size // itemsize]))
        if advance is not None:
            advance(block.nbytes)
    return running.statistics()


def _numbers(stored: Bytes, dtype: str, buffer: NDArray[np.float32]) -> Numbers:
    """The elements as float32 in the buffer if float32 holds all values of the dtype, otherwise as float64."""
    if dtype in ("bfloat16", "float16", "float32"):
        rounding.convert(stored, dtype, buffer.view(np.uint8), "float32", overflow=True)
        return buffer
    return stored.view(np.dtype(dtype)).astype(np.float64)


def all_statistics(
    tensors: Iterable[tuple[str, LazyTensor]],
    workers: int,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Statistics]:
    """Statistics of every tensor with a dtype in COMPUTED, in the given order."""
    items = [(name, tensor) for name, tensor in tensors if tensor.dtype in COMPUTED]
    by_size = sorted(items, key=lambda item: -byte_count(tuple(item[1].shape), item[1].dtype))
    with thread_pool(workers) as pool:
        found = pool.map(lambda item: (item[0], tensor_statistics(item[1], advance)), by_size)
        done = dict(found)
    return {name: done[name] for name, _ in items}
