"""The process that a command is: its signals, its standard streams, and what it ends with."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from formats.signals import ENDING
from megaconv.commands.endings import errors_reported, say
from megaconv.errors import CODES, Interrupted
from megaconv.terminal import hide_download_bars, log_to_stderr

_AGAIN_SECONDS = 0.01
_INTERRUPTED = CODES["interrupted"].exit_status


def run(command: Callable[[], Any]) -> None:
    """Turns errors into one line and an exit status, and ends with it."""
    hook = sys.unraisablehook
    status: Any = None
    try:
        with errors_reported():
            try:
                _prepare()
                status = command()
            finally:
                ignore_signals()  # what is left to do is to say how it ended
    except SystemExit as end:
        status = end.code
    finally:
        sys.unraisablehook = hook
        gc.freeze()  # or the interpreter would look through everything once more before it ends
        gc.enable()
    status = _flush(status)
    if status == _INTERRUPTED and _threads_at_work():
        os._exit(status)
    sys.exit(status)


def _threads_at_work() -> bool:
    """Whether a library's pool has threads in the middle of something, an upload say, which the interpreter would wait for."""
    return any(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate())


def _flush(status: Any) -> Any:
    """The exit status: not 0 where what was printed hasn't arrived."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not status and not isinstance(error, BrokenPipeError):
            say(f"megaconv: error: {error}")
        with suppress(OSError):  # forgotten, or the interpreter would try, and fail, again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status or 1
    return status


def _prepare() -> None:
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file would get its number, and all that a library prints there
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):  # without a stderr print() would take stdout in its place
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
    log_to_stderr("megaconv")
    hide_download_bars()
    for signum in (*ENDING, signal.SIGALRM):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
            signal.signal(signum, _interrupt)
    sys.unraisablehook = _hand_on
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of numpy, whose threads would spin on the other processors
    gc.disable()  # nothing here makes cycles that count, and looking for them takes a twentieth of the start


def heed_signals() -> None:
    """Again, after ignore_signals(), where something long follows after all."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _interrupt)


def ignore_signals() -> None:
    """From here on, since what follows is short and has to be done."""
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    ignore_signals()  # impatience must not disturb the cleaning up
    raise Interrupted


def _hand_on(swallowed: Any) -> None:
    """Python swallows what is raised while it destroys an object: an interruption that came then comes again."""
    if isinstance(swallowed.exc_value, Interrupted):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(swallowed)
