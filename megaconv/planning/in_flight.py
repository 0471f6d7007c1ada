"""The passes of which a pipeline rank keeps activations at one time, by chunk."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise
from typing import NamedTuple

from megaconv.planning.pipeline_order import Action, order


class _Moment(NamedTuple):
    """The moment between a forward pass and the backward pass that follows it."""

    forward: int
    backward: int
    """The chunks of the two passes."""
    counts: tuple[int, ...]


@cache
def peaks(pp: int, vpp: int, microbatches: int, pp_rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the counts by chunk at the moments when a rank may keep most.

    While both kinds of passes stay in the same chunks, the counts change by equal steps. So the first and the last of
    these moments are enough.
    """
    # After four times pp microbatches, the order repeats itself.
    actions = order(pp, vpp, min(microbatches, 4 * pp), pp_rank)
    found: dict[tuple[int, ...], None] = {}
    for _, group in groupby(_moments(actions, vpp), key=lambda moment: moment[:2]):
        moments = list(group)
        found[moments[0].counts] = found[moments[-1].counts] = None
    return tuple(found)


def _moments(actions: Sequence[Action], vpp: int) -> Iterator[_Moment]:
    counts = [0] * vpp
    for action, following in pairwise(actions):
        counts[action.chunk] += -1 if action.backward else 1
        if following.backward and not action.backward:
            yield _Moment(action.chunk, following.chunk, tuple(counts))
