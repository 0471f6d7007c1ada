"""Memory of 8 MiB that is used again, for windows and parts.

New memory costs more processor time than the copy into it: the kernel and Python both fill it with zeros, and Python
stops all other threads meanwhile.
"""

from collections import deque

BUFFER_BYTES = 8 << 20
MOST_IDLE = 8
"""Buffers that wait for their next use. Others are given back to the system."""

_idle: deque[bytearray] = deque(maxlen=MOST_IDLE)
"""A deque, because it needs no lock: a buffer may come back while Python collects garbage."""


def take(nbytes: int) -> bytearray:
    """A buffer of exactly this size. Its content is arbitrary."""
    if nbytes == BUFFER_BYTES:
        try:
            return _idle.pop()
        except IndexError:  # all are in use
            pass
    return bytearray(nbytes)


def give_back(buffer: bytearray) -> None:
    """Let the next caller of `take` use a buffer. Nobody may read or write it any more."""
    if len(buffer) == BUFFER_BYTES:
        _idle.append(buffer)
