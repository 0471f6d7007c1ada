"""Statistics of tensors, streamed: mean, standard deviation, extremes, zeros, NaN and infinities, and a histogram.

Everything is of all elements but the histogram, which is of at most 65,536 of them at equal distances. Means and squares are
summed up in float32 within a chunk that stays in the processor's cache, around the chunk's own mean, and in float64 from
chunk to chunk (Chan, Golub and LeVeque 1979), so that a standard deviation far below the mean isn't lost.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.tensor import ITEMSIZE, Bytes, LazyTensor, byte_count
from megaconv.engine import rounding
from megaconv.engine.fingerprints import read_blocks
from megaconv.threads import thread_pool

BINS = 32
_CHUNK = 1 << 16
"""Elements that are looked at together."""
_SAMPLED = 1 << 16
_SQUARABLE = 1e15
"""Of larger numbers a chunk's squares may be more than float32 holds."""
_ONES = np.ones(_CHUNK, np.float32)

FLOATS = ("bfloat16", "float16", "float32", "float64")
COMPUTED = (*FLOATS, "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")
"""dtypes with statistics. Eight-bit floats have scales elsewhere, without which they mean nothing."""

Numbers = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Statistics:
    """Of one tensor. Mean, deviation and extremes are of its finite elements; all 0 where it has none."""

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
    """Elements that the histogram counts."""

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
    """Statistics of what has been added so far."""

    step: int
    """Distance of the elements that the histogram counts."""
    count: int = 0
    """Finite elements."""
    mean: float = 0.0
    squares: float = 0.0
    """Of distances from the mean, summed up."""
    low: float = float("inf")
    high: float = float("-inf")
    zeros: int = 0
    nan: int = 0
    infinite: int = 0
    _seen: int = 0
    _sample: list[Numbers] = field(default_factory=list)

    def add(self, values: Numbers) -> None:
        """Some elements, in an array that may be written to afterwards.

        The same in as few passes as possible, each of which releases the interpreter lock: products with ones are numpy's
        quickest sums, and comparing with zero and counting truths is quicker than counting what is not zero.
        """
        self.zeros += int(np.count_nonzero(values == 0))
        self._sample.append(values[-self._seen % self.step :: self.step].copy())
        self._seen += values.size
        with np.errstate(all="ignore"):
            low, high = float(values.min()), float(values.max())
            if not max(-low, high) < _SQUARABLE:  # NaN isn't either
                self._add_slowly(values)
                return
            ones = _ONES[: values.size].astype(values.dtype, copy=False)
            about = float(np.dot(values, ones)) / values.size
            values -= values.dtype.type(about)
            beside = float(np.dot(values, ones)) / values.size
            squares = float(np.dot(values, values)) - values.size * beside * beside
            self._combine(values.size, about + beside, max(0.0, squares), low, high)

    def _add_slowly(self, values: Numbers) -> None:
        """In float64, of the finite elements alone: for values that are not all numbers, or very large."""
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
        found = (self.zeros, self.nan, self.infinite, _histogram(sample.astype(np.float64), low, high), sample.size)
        return Statistics(self._seen, self.mean, std, low, high, *found)


def _histogram(sample: NDArray[np.float64], low: float, high: float) -> tuple[int, ...]:
    """Counts of BINS equal steps; all in the middle one where there is one value alone."""
    if high / 2 > low / 2:  # halves, since the distance of two large numbers may be none
        bins = np.minimum((sample / 2 - low / 2) / (high / 2 - low / 2) * BINS, BINS - 1).astype(np.int64)
    else:
        bins = np.full(sample.size, BINS // 2)
    return tuple(int(count) for count in np.bincount(bins, minlength=BINS))


def tensor_statistics(tensor: LazyTensor, advance: Callable[[int], None] | None = None) -> Statistics:
    """Of one tensor, read in blocks. Its dtype is one of COMPUTED."""
    elements = prod(tensor.shape)
    running = Running(max(1, elements // _SAMPLED) | 1)  # an odd step, which visits all columns of a matrix
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
    """As float32 in the buffer where that holds all of a dtype's values, else as float64."""
    if dtype in ("bfloat16", "float16", "float32"):
        rounding.convert(stored, dtype, buffer.view(np.uint8), "float32", overflow=True)
        return buffer
    return stored.view(np.dtype(dtype)).astype(np.float64)


def all_statistics(
    tensors: Iterable[tuple[str, LazyTensor]], workers: int, advance: Callable[[int], None] | None = None
) -> dict[str, Statistics]:
    """Of every tensor that can be computed with, in the given order."""
    items = [(name, tensor) for name, tensor in tensors if tensor.dtype in COMPUTED]
    by_size = sorted(items, key=lambda item: -byte_count(tuple(item[1].shape), item[1].dtype))
    with thread_pool(workers) as pool:
        found = pool.map(lambda item: (item[0], tensor_statistics(item[1], advance)), by_size)
        done = dict(found)
    return {name: done[name] for name, _ in items}
