"""Ranges of tensors that readers will come to, in their order. They are fetched ahead while memory has room.

Without them, a reader of many small tensors would have one or two requests under way, however many connections there are.
"""

from collections import OrderedDict
from typing import Protocol

from formats.partial_files import Span


class Owner(Protocol):
    """The windows of one object."""

    def fetch_from(self, position: int) -> int | None:
        """Have the window at a position fetched, if it isn't in memory. Returns its end; None if memory has no room."""
        ...


class Announced:
    """The ranges that are still to be fetched. The caller locks."""

    def __init__(self) -> None:
        self._reached: OrderedDict[tuple[Owner, Span], int] = OrderedDict()
        """(object, range) -> the position up to which windows are being fetched."""

    def add(self, owner: Owner, span: Span) -> None:
        if span[0] < span[1]:
            self._reached.setdefault((owner, span), span[0])

    def note(self, owner: Owner, tensor: Span, reached: int) -> None:
        """Note that a tensor is being fetched up to a position: its reader was faster than the ranges of it."""
        for each, span in list(self._reached):
            if each is owner and tensor[0] <= span[0] and span[1] <= tensor[1]:
                self._advance(owner, span, reached)

    def _advance(self, owner: Owner, span: Span, reached: int) -> None:
        if reached >= span[1]:
            del self._reached[owner, span]
        elif reached > self._reached[owner, span]:
            self._reached[owner, span] = reached

    def forget(self, owner: Owner) -> None:
        """Forget the ranges of an object."""
        for each in [each for each in self._reached if each[0] is owner]:
            del self._reached[each]

    def fetch(self) -> None:
        """Have windows fetched until memory has no more room."""
        while self._reached:
            (owner, span), position = next(iter(self._reached.items()))
            reached = owner.fetch_from(position)
            if reached is None:
                return
            self._advance(owner, span, reached)
