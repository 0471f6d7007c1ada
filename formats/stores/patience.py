"""Decides how often and for how long a request to a store is repeated.

The pause before attempt n is random, up to 0.1 s * 2^n and at most 20 s ("full jitter": many processes don't return at
the same moment). A store that limits requests may ask for a longer pause. Progress of the request starts the count again.
"""

import random
import time

from formats import signals
from formats.errors import CheckpointError

ATTEMPTS = 8
"""Most attempts in a row without a byte of progress."""
MOST_ATTEMPTS = 64
"""Most attempts of one request in all: a store that sends a few bytes each time must not keep a run for ever."""
SECONDS = 300.0
"""Longest time without a byte of progress."""
_ATTEMPTS_AT_END = 2
"""Most attempts of a request that begins after a signal has ended the command: it removes what was written."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 20.0


class Transient(Exception):
    """A failure of a request that may not happen again."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        """reason: for the message of the end. after: seconds that the store asks to wait."""
        super().__init__(reason)
        self.after = after


class Patience:
    """Counts the failures of one request."""

    def __init__(self, request: str) -> None:
        """request: its name in the message, such as `s3:GetObject on bucket/key`."""
        self._request = request
        self._failures = self._attempts = 0
        self._since = time.monotonic()
        self._began_at_end = signals.arrived.is_set()

    def progress(self) -> None:
        """Note that bytes came."""
        self._failures = 0
        self._since = time.monotonic()

    def wait(self, failure: Transient) -> None:
        """Pause before the next attempt. Raises CheckpointError if there should be none."""
        self._failures += 1
        self._attempts += 1
        waited = time.monotonic() - self._since
        is_over = self._failures >= self._most_failures or self._attempts >= MOST_ATTEMPTS
        if is_over or waited > SECONDS:
            raise CheckpointError(
                f"{self._request}: failed {self._attempts} times, last with: {failure}; "
                "check the network and the endpoint, and run again",
                code="store-unreachable",
            )
        pause = random.uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**self._failures))
        pause = max(pause, min(failure.after, SECONDS - waited))
        signals.arrived.wait(pause)

    @property
    def _most_failures(self) -> int:
        """The number of failures in a row after which there is no further attempt."""
        if not signals.arrived.is_set():
            return ATTEMPTS
        return _ATTEMPTS_AT_END if self._began_at_end else 1
