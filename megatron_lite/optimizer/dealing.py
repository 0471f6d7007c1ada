"""Assigns whole matrices to data-parallel ranks for an optimizer that can't update a part of a matrix (Muon).

It follows Megatron core's LayerWiseDistributedOptimizer with two differences:

- Only the owner of a matrix receives its gradient; in Megatron every rank receives all gradients.
- Only matrices are assigned to ranks; other parameters are divided as for Adam.
"""

from collections.abc import Callable, Sequence

from megatron_lite.parallel.parameters import ParameterInfo


def _none(_: ParameterInfo) -> bool:
    return False


class Dealer:
    """Assigns the largest matrices first, each to the rank with the fewest elements so far. The same on all ranks."""

    def __init__(self, deals: Callable[[ParameterInfo], bool] = _none) -> None:
        """deals: returns whether a parameter is assigned to one rank as a whole."""
        self.deals = deals
        self._held: dict[str, list[int]] = {}

    def owners(self, elements: Sequence[int], axis: str, ranks: int) -> list[int]:
        """Return the owner of each matrix of a bucket. axis: the grid axis of the ranks. Earlier assignments are counted."""
        held = self._held.setdefault(axis, [0] * ranks)
        found = [0] * len(elements)
        for number in sorted(range(len(elements)), key=lambda at: -elements[at]):
            found[number] = held.index(min(held))
            held[found[number]] += elements[number]
        return found
