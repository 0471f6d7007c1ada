"""The signals that ask a process to end, and a block that they have to wait for."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, what a batch system sends, and a terminal that is closed."""


@contextmanager
def held() -> Iterator[None]:
    """What arrives inside is delivered after the block; after an error there it isn't, since the run ends anyway.

    Only the main thread can be interrupted: in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    # A handler that wasn't installed from Python is None, and can't be put back.
    former = {number: handler for number in ENDING if (handler := signal.getsignal(number)) is not None}
    try:
        for number, handler in former.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, wait)
        yield
    except BaseException:
        arrived.clear()
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])
