"""Ends orphaned ranks: watches whether the store of their rendezvous can still be reached.

torchrun runs the store in its own process. If torchrun is killed, it can't end its ranks. The ranks talk to each other
directly, so without this watch they would continue, or wait for a value that no rank can put into the store any more.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

SILENT_SECONDS = 10.0
_TICK_SECONDS = 0.5
_KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds, seconds, probes. Keep-alive is needed because a machine that is gone closes no connection."""


def silence(address: str) -> str:
    """The error message for a lost store."""
    return (
        f"the store of the rendezvous at {address} couldn't be reached for {SILENT_SECONDS:g} seconds; "
        "was the process that started the ranks killed?"
    )


def is_kept_by_torchrun() -> bool:
    """True if torchrun started this process and keeps the store. The store then runs before the ranks do."""
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return has_store and "TORCHELASTIC_RUN_ID" in os.environ


def can_be_reached(address: str) -> bool:
    """Return whether a store answers within SILENT_SECONDS. address: host:port."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < end:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), _TICK_SECONDS),
        ):
            return True
        time.sleep(_TICK_SECONDS)
    return False


class StoreWatch:
    """A thread that holds a connection to the store, and never sends anything over it."""

    def __init__(self, address: str, lost: Callable[[], None]) -> None:
        """Start the thread.

        address: host:port. lost: called once in that thread, after SILENT_SECONDS without a connection.
        """
        host, _, port = address.rpartition(":")
        self._address, self._lost = (host, int(port)), lost
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="store watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        since = time.monotonic()
        while not self._over.is_set():
            if self._connect():
                since = time.monotonic()
            elif time.monotonic() - since > SILENT_SECONDS:
                self._lost()
                return
            self._over.wait(_TICK_SECONDS)

    def _connect(self) -> bool:
        """Connect, and wait until either side closes the connection. Returns True if there was a connection."""
        try:
            with socket.create_connection(self._address, _TICK_SECONDS) as connection:
                if connection.getsockname() == connection.getpeername():
                    return False  # a connection to an unused port of this machine can connect to itself
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in _KEEPALIVE.items():
                    if hasattr(socket, name):
                        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
                self._wait_for_end(connection)
                return True
        except OSError:
            return False

    def _wait_for_end(self, connection: socket.socket) -> None:
        while not self._over.is_set():
            try:
                if not connection.recv(1):
                    return
            except OSError as error:
                if error.errno is not None:  # recv()'s own timeout has none
                    return
