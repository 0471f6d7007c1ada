"""Ctrl-C on a server: the first one lets running answers end, and says so. The second one ends them at once."""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from formats.wording import counted

_STDERR = 2


def announce_end(server: Any, running: Callable[[], int], seconds: int) -> None:
    """Let a server of uvicorn report its end on stderr.

    running: returns the number of requests without a complete answer. seconds: the time that they have to end in.
    """
    end, interrupted = server.handle_exit, False

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        # After a second Ctrl-C, torchrun sends SIGTERM.
        server.force_exit = server.force_exit or interrupted
        if number == signal.SIGINT and not server.should_exit and running():
            interrupted = True
            text = (
                f"Ctrl-C: the server waits for {counted(running(), 'request')}, {seconds} s at most, and ends; "
                "Ctrl-C again ends it at once"
            )
            # The main thread may hold the locks of Python's buffers.
            os.write(_STDERR, f"megatron-lite: {text}\n".encode())
        end(number, frame)

    server.handle_exit = heard
