"""Decides at which events of a pass sharded parameters are fetched and freed. The plan of a run counts the same events.

The caller reports each event: a pass begins or ends, a unit's forward pass begins or ends, a unit's output gets its gradient.
"""

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar


class Fetched(Protocol):
    """Parameters that have memory only around their use."""

    present: bool
    """True if they have memory, though they may still be on their way."""

    def start(self) -> None:
        """Start to fetch them, unless they are there or on their way."""

    def ready(self) -> None:
        """Fetch them and wait for them."""

    def release(self) -> None:
        """Free their memory."""


Parameters = TypeVar("Parameters", bound=Fetched)


class Fetching(Generic[Parameters]):
    """Fetches and frees the sharded parameters of one chunk."""

    def __init__(
        self,
        units: Sequence[Sequence[Parameters]],
        held: Iterable[Parameters],
        *,
        needs_parameters: Sequence[bool],
        ahead: bool,
    ) -> None:
        """units: the parameters of each unit, in the order of a forward pass. held: parameters that stay during a whole pass.

        needs_parameters: whether the backward pass of each unit needs its parameters.
        ahead: whether the next unit's parameters are fetched in advance.
        """
        self._units = [unique(unit) for unit in units]
        self._held = unique(held)
        self._all = unique([*self._held, *(each for unit in self._units for each in unit)])
        self._needs_parameters = needs_parameters
        self._ahead = ahead
        self._backward = False
        self._reached = -1
        """The last unit that this forward pass has called. Further tokens call the embedding again."""

    def begin(self, *, backward: bool) -> None:
        """Start a pass."""
        self._backward = backward
        self._reached = -1
        for each in self._held:
            each.ready()

    def end(self, *, backward_follows: bool) -> None:
        """End a pass: free all parameters, except those that the following backward pass begins with."""
        kept = [*self._units[-1], *self._held] if backward_follows else []
        self._release(self._all, kept)
        self._backward = False

    def before_forward(self, number: int) -> None:
        """Fetch a unit's parameters. A layer that is recomputed reports this event in the backward pass."""
        for each in self._units[number]:
            each.ready()
        is_next = number > self._reached and number + 1 < len(self._units)
        self._reached = max(self._reached, number)
        if self._ahead and is_next and not self._backward:
            for each in self._units[number + 1]:
                each.start()

    def after_forward(self, number: int) -> None:
        """Free a unit's parameters, unless the next unit uses them. The caller leaves out recomputed layers."""
        if number + 1 < len(self._units):
            self._release(self._units[number], [*self._units[number + 1], *self._held])

    def before_backward(self, number: int) -> None:
        """Fetch a unit's parameters, and free those of the units behind it."""
        if not self._needs_parameters[number]:
            return
        own = self._units[number]
        for each in own:
            each.ready()
        earlier = self._units[number - 1] if number else []
        for later in self._units[number + 1 :]:
            self._release(later, [*own, *earlier, *self._held])
        if self._ahead and number and self._needs_parameters[number - 1]:
            for each in earlier:
                each.start()

    def _release(self, found: Iterable[Parameters], still_used: Iterable[Parameters]) -> None:
        used = {id(each) for each in still_used}
        for each in found:
            if each.present and id(each) not in used:
                each.release()


def unique(found: Iterable[Parameters]) -> list[Parameters]:
    """Return each object once."""
    return list({id(each): each for each in found}.values())
