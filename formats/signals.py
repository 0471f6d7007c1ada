"""The signals that end a process, and a block that delays them."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the signal of a batch system, and the signal of a closed terminal."""
arrived = threading.Event()
"""Set when a signal ends the command of this process. Its threads then wait for no other machine any more."""


@contextmanager
def held() -> Iterator[None]:
    """Delay signals that arrive inside the block until its end. After an error they are dropped, since the run ends
    anyway.

    Only the main thread can be interrupted. In other threads the block does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    delayed: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        delayed.append(number)

    # A handler that wasn't installed from Python is None, and can't be restored.
    former = {
        number: handler for number in ENDING if (handler := signal.getsignal(number)) is not None
    }
    try:
        for number, handler in former.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, wait)
        yield
    except BaseException:
        delayed.clear()
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if delayed:
            signal.raise_signal(delayed[0])
