"""Delays Ctrl-C and SIGTERM while a process starts others, or waits for their end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM at the end of the block.

    Processes that the block starts never receive Ctrl-C, not even before they choose a handler. In another thread than
    the main one, in which Python handles no signals, nothing else changes.
    """
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    delayed = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    handlers = {number: signal.signal(number, note) for number in delayed}
    # A mask isn't enough for this process, because the system gives the signal to another thread of it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for each in arrived:
            signal.raise_signal(each)
