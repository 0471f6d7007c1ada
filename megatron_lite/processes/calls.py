"""Counts this rank's calls of each group, so that the heartbeat can find the rank that the others wait for.

A call is a collective, or one message. All ranks of a group make the same calls in the same order. So a rank that awaits
call 7 of a group waits for every rank that has begun only 6. This also holds on a GPU, where the host runs ahead.
"""

Counts = dict[str, tuple[int, int]]
"""(calls begun, calls awaited) by key: the name of a group, or message_key()."""


def message_key(group: str, source: int, target: int) -> str:
    """Return the key of the messages between two global ranks in one direction. Both ranks count them."""
    return f"{group} {source}>{target}"


def is_member(rank: int, key: str, counts: Counts) -> bool:
    """Return whether a rank with these counts takes part in the calls of a key.

    A rank has called each of its groups once before the first step. It may not have used a pair of ranks yet.
    """
    source, arrow, target = key.rpartition(" ")[2].partition(">")
    is_in_pair = bool(arrow) and str(rank) in (source, target)
    return key in counts or is_in_pair


class Calls:
    """The calls of one rank."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        self._awaited: dict[str, int] = {}

    def begin(self, key: str) -> int:
        """Count a call that begins. Returns its number, from 1."""
        number = self._begun.get(key, 0) + 1
        self._begun[key] = number
        return number

    def await_call(self, key: str, number: int) -> None:
        """Count a call that this rank can't continue without."""
        self._awaited[key] = max(number, self._awaited.get(key, 0))

    def counts(self) -> Counts:
        """Return all counts. Any thread may call this."""
        awaited = dict(self._awaited)
        return {key: (begun, awaited.get(key, 0)) for key, begun in dict(self._begun).items()}


CALLS = Calls()
"""The calls of this process. A group has no place for them: torch makes it."""
