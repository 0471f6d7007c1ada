"""Writes bytes at a position of a file, all of them: the system may take only a part at a time."""

import os


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes at an offset. Any thread may call it. Raises OSError, also for a disk that becomes full."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
