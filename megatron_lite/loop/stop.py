"""Signals that make a run save and end. A second Ctrl-C ends it at once.

A step may keep the main thread outside Python for as long as it lasts, and Python runs signal handlers only in that
thread. So a separate thread reads the signals, from a pipe that the interpreter writes to when a signal arrives.

torchrun sends Ctrl-C to each worker once, as SIGINT. Workers have their own sessions, which a terminal doesn't reach.
After a second Ctrl-C torchrun sends SIGTERM, and SIGKILL after its --shutdown-timeout (30 seconds).
"""

import os
import signal
import threading
from types import FrameType

INTERRUPTED_STATUS = 130
_STDERR = 2


class Stop:
    """The requests that this rank received. All ranks agree on them at the end of a step."""

    def __init__(self, *, speaks: bool, saves: bool) -> None:
        """speaks: whether this rank prints messages. saves: whether the run has a --save."""
        self.terminated = self.interrupted = False
        self._speaks, self._saves = speaks, saves
        if threading.current_thread() is threading.main_thread():
            self._listen()

    def _listen(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _left_to_the_thread)
        for number in (signal.SIGINT, signal.SIGHUP):
            # They are ignored in the background of a script, or under nohup.
            is_ignored = signal.getsignal(number) == signal.SIG_IGN
            if not is_ignored:
                signal.signal(number, _left_to_the_thread)
        reader = threading.Thread(target=self._read, args=(reading,), name="signals", daemon=True)
        reader.start()

    def _read(self, descriptor: int) -> None:
        while arrived := os.read(descriptor, 1):
            self.heard(arrived[0])

    def heard(self, number: int) -> None:
        """Handle a signal."""
        if self.interrupted and (
            number == signal.SIGINT or (number == signal.SIGTERM and _under_torchrun())
        ):
            self._say("Ctrl-C again: the run ends at once, without saving")
            os._exit(INTERRUPTED_STATUS)
        if number == signal.SIGINT:
            self.interrupted = True
            then = (
                "the run saves after this step and ends"
                if self._saves
                else "the run ends after this step (no --save)"
            )
            self._say(f"Ctrl-C: {then}; Ctrl-C again ends it at once, without saving")
        elif number in (signal.SIGTERM, signal.SIGHUP):
            self.terminated = True

    def _say(self, text: str) -> None:
        """Write directly to stderr, because the main thread may hold the locks of Python's buffers."""
        if self._speaks:
            os.write(_STDERR, f"megatron-lite: {text}\n".encode())


def _left_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing. Python needs a handler; without one, the signal would end the process."""


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ
