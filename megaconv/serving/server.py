"""The HTTP server: GET and HEAD alone, for clients on this machine unless the user opens it for others.

A page of any site can make its visitor's browser send requests to 127.0.0.1, under a host name of its own (DNS
rebinding). The header `Host` shows that name, so requests with another one than a local name are refused.
"""

import logging
import re
import socket
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore
from typing import Any

from megaconv._version import __version__
from megaconv.errors import CheckpointError
from megaconv.serving.answers import WINDOW, Answer, answer, refusal
from megaconv.serving.repository import Repository

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names of this machine in the header `Host`."""
IDLE_SECONDS = 60
"""A client that sends nothing for so long is left."""
_BUFFERS = 4
"""Bytes of memory that a window takes at most, in windows: its bytes, blocks of the source, and copies of them."""
_log = logging.getLogger("megaconv")


class Server(ThreadingHTTPServer):
    """Serves repositories. Each connection has a thread; few of them compute at once."""

    daemon_threads = True
    request_queue_size = 128
    """Connections that wait until they are accepted. Clients open tens at once; the system resets those beyond 5, Python's default."""

    def __init__(
        self, address: tuple[str, int], repositories: Mapping[str, Repository], max_memory: int
    ) -> None:
        """address: host and port; port 0: any that is free. max_memory: of the windows that are computed at once.

        Raises OSError if the address can't be listened at.
        """
        self.address_family = _family_of(address[0])
        super().__init__(address, _Request)
        self.repositories = repositories
        self.is_local = address[0] in LOCAL
        self.computing = BoundedSemaphore(max(1, max_memory // (_BUFFERS * WINDOW)))

    @property
    def url(self) -> str:
        """The address, as clients need it in HF_ENDPOINT."""
        host = str(self.server_address[0])
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that leave."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            _log.error("a request of %s failed: %r", client_address[0], error)


def _family_of(host: str) -> socket.AddressFamily:
    """Return the kind of a host's addresses: IPv4 if there is one, as for `localhost`. Raises OSError for an unknown host."""
    found = {family for family, *_ in socket.getaddrinfo(host or None, 0)}
    return socket.AF_INET6 if found == {socket.AF_INET6} else socket.AF_INET


class _Request(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = f"megaconv/{__version__}"
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer with a body."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer with the headers alone."""
        self._answer(with_body=False)

    def _refuse_method(self) -> None:
        """Answer a request that would change something. The connection ends, since its body is not read."""
        self.close_connection = True
        self._send(refusal(405, f"{self.command}: only GET and HEAD are served"))

    do_POST = do_PUT = do_DELETE = do_PATCH = _refuse_method  # noqa: N815

    def _answer(self, *, with_body: bool) -> None:
        found = self._found()
        if not with_body:
            self._begin(found)
            return
        self._send(found)

    def _send(self, found: Answer) -> None:
        """Send an answer with its body. An error in the first piece becomes a refusal."""
        pieces = found.body()
        try:
            piece = self._next(pieces)
        except CheckpointError as error:
            _log.error("%s", error)
            self._send(refusal(503, f"{error}; start the server again"))
            return
        self._begin(found)
        try:
            while piece:
                self.wfile.write(piece)
                piece = self._next(pieces)
        except CheckpointError as error:
            _log.error("%s", error)
            self.close_connection = True  # the client sees that bytes are missing

    def _next(self, pieces: Any) -> bytes | bytearray:
        """The next piece of a body; empty at its end."""
        with self.server.computing:
            found: bytes | bytearray = next(pieces, b"")
            return found

    def _found(self) -> Answer:
        if self.server.is_local and not self._is_local(self.headers.get("Host", "")):
            return refusal(
                403, "the header Host names another machine; --host opens the server for others"
            )
        try:
            asked, if_range = self.headers.get("Range"), self.headers.get("If-Range")
            return answer(self.server.repositories, self.path, asked, if_range)
        except CheckpointError as error:
            _log.error("%s", error)
            return refusal(503, str(error))

    @staticmethod
    def _is_local(host: str) -> bool:
        name = re.sub(r":\d+$", "", host).strip("[]")
        return name in LOCAL

    def _begin(self, found: Answer) -> None:
        self.send_response(found.status)
        for name, value in found.headers.items():
            self.send_header(name, re.sub(r"[^\x20-\x7e]", "?", value))
        self.send_header("Content-Length", str(found.length))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print no line for each request."""
