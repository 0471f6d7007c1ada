"""Blends of a base with parts of the differences of other tensors from it, as in TIES and DARE.

TIES (Yadav et al. 2023) keeps the largest elements of each difference, and averages those of the sign that prevails.
DARE (Yu et al. 2024) keeps elements at random, divides them by the part that is kept, and adds them up.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from threading import Lock
from typing import Protocol

from formats.lazy_numpy import Booleans, Counts, Doubles, Words, np
from formats.tensor import LazyTensor
from megaconv.values.blends import Run, read_together
from megaconv.values.random_numbers import uniform

_HALF = 16
"""Bits of a magnitude that are counted in one pass over the tensors."""


class Trim(Protocol):
    """Decides which elements of a difference are kept."""

    @property
    def factor(self) -> float:
        """The number that kept elements are multiplied by."""
        ...

    def keeps(self, which: int, difference: Doubles, run: Run) -> Booleans:
        """Return True for each element that is kept. which: the number of the difference, from 0."""
        ...


@dataclass
class LargestElements:
    """Keeps the elements of the largest magnitudes in float32: the `density` of each difference, and those of equal magnitude."""

    tensors: Sequence[LazyTensor]
    """The base, then the others."""
    density: float
    factor = 1.0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def keeps(self, which: int, difference: Doubles, run: Run) -> Booleans:
        with self._lock:
            least = self._least[which]
        return _magnitudes(difference) >= least

    @cached_property
    def _least(self) -> list[int]:
        """The least magnitude that is kept of each difference.

        A first pass over the tensors counts the upper halves of all magnitudes, a second one the lower halves of those
        with the upper half that the least one has.
        """
        kept = max(1, int(self.density * prod(self.tensors[0].shape)))
        others = range(len(self.tensors) - 1)
        upper = [_value_of_rank(counts, kept) for counts in self._counts([None for _ in others])]
        lower = self._counts([half for half, _ in upper])
        return [
            half << _HALF | _value_of_rank(counts, rank)[0]
            for (half, rank), counts in zip(upper, lower, strict=True)
        ]

    def _counts(self, upper: Sequence[int | None]) -> list[Counts]:
        """Count halves of magnitudes: the upper ones (None), or the lower ones of magnitudes with this upper half."""
        totals = [np.zeros(1 << _HALF, np.int64) for _ in upper]
        for base, *others in read_together(self.tensors):
            for half, other, total in zip(upper, others, totals, strict=True):
                found = _magnitudes(difference_of(other, base))
                above = found >> _HALF
                halves = above if half is None else found[above == half] & ((1 << _HALF) - 1)
                total += np.bincount(halves, minlength=len(total))
        return totals


def _value_of_rank(counts: Counts, rank: int) -> tuple[int, int]:
    """Return the value of the element that has a rank from above (1: the largest), and its rank among its equals.

    counts: the number of elements of each value.
    """
    at_least = np.cumsum(counts[::-1])[::-1]
    value = int(np.flatnonzero(at_least >= rank)[-1])
    return value, rank - int(at_least[value] - counts[value])


def _magnitudes(numbers: Doubles) -> Words:
    """The magnitudes in float32, as integers of the same order."""
    with np.errstate(over="ignore"):
        return np.abs(numbers).astype(np.float32).view(np.uint32)


@dataclass(frozen=True)
class RandomElements:
    """Keeps each element with the probability `density`.

    The choice depends on the seed, the tensor's name, the number of the difference, and the element's place. So it is
    the same in every format and layout, with any number of threads.
    """

    name: str
    density: float
    seed: int

    @property
    def factor(self) -> float:
        return 1 / self.density

    def keeps(self, which: int, difference: Doubles, run: Run) -> Booleans:
        return uniform(run.places(), f"{self.seed} {which} {self.name}") < self.density


@dataclass(frozen=True)
class Differences:
    """The first tensor plus what is kept of the weighted differences of the others from it."""

    weights: Sequence[float]
    """One for each difference."""
    trim: Trim
    elects: bool
    """True to keep only elements of the sign that their sum has."""
    averages: bool
    """True to divide each sum by the weights of its elements. Needs `elects`."""
    keeps_equal = True

    def blended(self, numbers: Sequence[Doubles], run: Run) -> Doubles:
        base, *others = numbers
        kept = [self._kept(which, base, other, run) for which, other in enumerate(others)]
        total = _sum(kept)
        return base + (self._elected(kept, total) if self.elects else total)

    def _elected(self, kept: Sequence[Doubles], total: Doubles) -> Doubles:
        """The sum of the elements that have the sign of the sum of all, or their mean. kept: one for each difference."""
        sign = np.where(total >= 0, 1.0, -1.0)
        agrees = [np.sign(each) == sign for each in kept]
        # Products, so that NaN stays.
        elected = _sum(each * agreeing for each, agreeing in zip(kept, agrees, strict=True))
        if not self.averages:
            return elected
        weight = _sum(each * agreeing for each, agreeing in zip(self.weights, agrees, strict=True))
        return elected / np.where(weight > 0, weight, 1.0)

    def _kept(self, which: int, base: Doubles, other: Doubles, run: Run) -> Doubles:
        """The kept elements of a weighted difference; 0 elsewhere."""
        difference = difference_of(other, base)
        keeps = self.trim.keeps(which, difference, run)
        return np.where(keeps, difference * (self.weights[which] * self.trim.factor), 0.0)


def _sum(terms: Iterable[Doubles]) -> Doubles:
    """The sum in this order, which numpy's sum along an axis and products of matrices don't promise."""
    first, *rest = terms
    total = first.copy()
    for each in rest:
        total += each
    return total


def difference_of(number: Doubles, base: Doubles) -> Doubles:
    """number - base; 0 for equal numbers, infinite ones too."""
    with np.errstate(over="ignore", invalid="ignore"):
        difference = number - base
    difference[number == base] = 0.0
    return difference
