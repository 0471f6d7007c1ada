"""Ends ranks that nobody looks after any more: whether the store of their rendezvous can still be reached.

torchrun keeps the store in its own process. Ranks talk to each other directly: without this they would go on for ever, or
wait for ever for what another one can't put into the store, when torchrun is killed without a chance to end them.
"""

import socket
import threading
import time
from collections.abc import Callable

SILENT_SECONDS = 10.0
_TICK_SECONDS = 0.5
_KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds, seconds, probes: a machine that is gone closes no connection."""


def silence(address: str) -> str:
    """What an error says."""
    return (
        f"the store of the rendezvous at {address} couldn't be reached for {SILENT_SECONDS:g} seconds; "
        "was the process that started the ranks killed?"
    )


class StoreWatch:
    """A thread that holds a connection to the store, over which nothing is ever sent."""

    def __init__(self, address: str, lost: Callable[[], None]) -> None:
        """address: host:port. lost: called in that thread, once, when there was no connection for SILENT_SECONDS."""
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
        """Whether there was a connection; returns when it is closed, from this side too."""
        try:
            with socket.create_connection(self._address, _TICK_SECONDS) as connection:
                if connection.getsockname() == connection.getpeername():
                    return False  # a port of this machine that nobody listens at can meet itself
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
