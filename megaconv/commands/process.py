"""The process of a command: its signals, its standard streams, and its exit status."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO

from formats.signals import ENDING, arrived
from megaconv.commands.endings import errors_reported, say
from megaconv.errors import CODES, Interrupted
from megaconv.terminal import hide_download_bars, log_to_stderr, open_closed_streams

_AGAIN_SECONDS = 0.01
_INTERRUPTED = CODES["interrupted"].exit_status


def run(command: Callable[[], Any]) -> None:
    """Run a command and end the process. An error becomes one line and an exit status."""
    hook = sys.unraisablehook
    status: Any = None
    try:
        with errors_reported():
            try:
                _prepare()
                status = command()
            finally:
                ignore_signals()  # nothing is left to do but to report the result
    except SystemExit as end:
        status = end.code
    finally:
        sys.unraisablehook = hook
        gc.freeze()  # without this, the interpreter would search all objects for cycles before it ends
        gc.enable()
    status = _flush(status)
    _flush_messages()
    if status == _INTERRUPTED and _threads_at_work():
        os._exit(status)
    sys.exit(status)


def _threads_at_work() -> bool:
    """True if a library's thread pool is still at work, for example on an upload.

    The interpreter would wait for it.
    """
    return any(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate())


def _flush(status: Any) -> Any:
    """Flush stdout. Returns the exit status, which isn't 0 if the output didn't arrive."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not status and not isinstance(error, BrokenPipeError):
            say(f"megaconv: error: stdout: {error.strerror}")
        _drop(sys.stdout)
        return status or 1
    return status


def _flush_messages() -> None:
    """Flush stderr. Messages that can't be written don't change the exit status."""
    try:
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Drop what a stream still holds: the interpreter would try to write it again, and fail."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _prepare() -> None:
    arrived.clear()
    open_closed_streams()
    log_to_stderr("megaconv")
    hide_download_bars()
    for signum in (*ENDING, signal.SIGALRM):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            # Under nohup, SIGHUP stays ignored.
            signal.signal(signum, _interrupt)
    sys.unraisablehook = _hand_on
    # For numpy, whose threads would busy-wait on the other processors.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # megaconv makes few cycles, and the search for them takes a twentieth of the start time


def heed_signals() -> None:
    """Handle signals again after ignore_signals(), before a long task."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _interrupt)


def ignore_signals() -> None:
    """Ignore signals from here on, because the next steps are short and must complete."""
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    ignore_signals()  # a second signal must not disturb the cleanup
    arrived.set()
    raise Interrupted


def _hand_on(swallowed: Any) -> None:
    """Repeat an interruption that Python swallows because it was raised while an object was destroyed."""
    if isinstance(swallowed.exc_value, Interrupted):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(swallowed)
