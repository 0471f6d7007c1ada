"""Finds the rank that blocks a run, from the counts of calls in all heartbeats.

Stacks don't show it. On a GPU the host runs ahead and blocks in any line, and the backward pass runs in another thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.processes.calls import Counts, is_member


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a rank."""

    count: int
    step: int
    still_s: float
    """Time since the rank completed a step, or began or awaited a call."""
    where: str
    """`function (file:line)` of the rank's main thread."""
    calls: Counts
    """The rank's calls of each group."""


def blamed(beats: Sequence[Beat], patience_s: float) -> int | None:
    """Return the rank that others have waited for, for `patience_s`, and that waits for no other; or None.

    beats: of all ranks, in order. If there are several such ranks, it is the one that stands still for the longest time.
    A rank that reads or writes a file for hours is not to blame unless others wait for it.
    """
    stuck = [rank for rank, beat in enumerate(beats) if beat.still_s >= patience_s]
    found = []
    for rank in stuck:
        is_awaited = any(_waits(beats, other, rank) for other in stuck)
        waits_itself = any(_waits(beats, rank, other) for other in range(len(beats)))
        if is_awaited and not waits_itself:
            found.append(rank)
    return max(found, key=lambda rank: beats[rank].still_s, default=None)


def _waits(beats: Sequence[Beat], rank: int, other: int) -> bool:
    """Return whether a rank awaits a call that another rank of the group has not begun."""
    theirs = beats[other].calls
    for key, (_, awaited) in beats[rank].calls.items():
        if not is_member(other, key, theirs):
            continue
        begun, _ = theirs.get(key, (0, 0))
        if awaited > begun:
            return True
    return False
