"""Whole matrices dealt out to data-parallel ranks, of which each updates its own: for an optimizer that can't update part of one.

As Megatron core's LayerWiseDistributedOptimizer, but that gradients go to their owners alone (there every rank gets all of them),
and that only matrices are dealt out: everything else is cut as for Adam.
"""

from collections.abc import Sequence


class Dealer:
    """Gives the largest matrices first, each to the rank that has least so far; the same on all ranks."""

    def __init__(self) -> None:
        self._held: dict[str, list[int]] = {}

    def owners(self, elements: Sequence[int], axis: str, ranks: int) -> list[int]:
        """Of each matrix of a bucket. axis: along which the ranks lie; what they got before is taken into account."""
        held = self._held.setdefault(axis, [0] * ranks)
        found = [0] * len(elements)
        for number in sorted(range(len(elements)), key=lambda at: -elements[at]):
            found[number] = held.index(min(held))
            held[found[number]] += elements[number]
        return found
