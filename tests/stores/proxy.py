"""A proxy in front of a store: it counts requests and bytes, and makes requests fail in the ways of a network."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

LARGE = 64 << 10


class Request(NamedTuple):
    """One request that came in."""

    number: int
    method: str
    key: str
    """Path without the bucket; empty for a listing."""
    span: str
    """The header Range without `bytes=`."""
    sent: int
    """Bytes of the answer's body that went out."""


class Fault(NamedTuple):
    """A thing that happens to a request instead of its answer."""

    kind: str
    """status, reset, half, slow, ignore-range, no-condition (If-Match is ignored), or other-tag."""
    status: int = 0
    code: str = ""
    seconds: float = 0.0


Faults = Callable[[int, str, str], Fault | None]
"""(number, method, key) of a request -> its fault."""


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target)
        self.requests: list[Request] = []
        self.headers: list[str] = []
        """All headers of all requests, as text."""
        self.faults: Faults = lambda number, method, key: None
        self.lock = threading.Lock()
        self.count = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reset(self) -> None:
        self.requests, self.headers, self.count = [], [], 0
        self.faults = lambda number, method, key: None

    def of(self, method: str) -> list[Request]:
        return [each for each in self.requests if each.method == method]

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *arguments: object) -> None:
        pass

    def _handle(self) -> None:
        address = urlsplit(self.path)
        key = unquote(address.path.lstrip("/").partition("/")[2])
        with self.server.lock:
            number = self.server.count = self.server.count + 1
            self.server.headers.append(str(self.headers))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.faults(number, self.command, key)
        if fault is not None and fault.kind == "status":
            self._fail(fault)
            sent = 0
        elif fault is not None and fault.kind == "reset":
            self.close_connection = True
            self.connection.close()
            sent = 0
        else:
            sent = self._forward(body, fault)
        span = self.headers.get("Range", "").removeprefix("bytes=")
        with self.server.lock:
            self.server.requests.append(Request(number, self.command, key, span, sent))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815

    def _fail(self, fault: Fault) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>no</Message></Error>"
        self.send_response(fault.status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode())

    def _forward(self, body: bytes, fault: Fault | None) -> int:
        target = self.server.target
        connection = http.client.HTTPConnection(str(target.hostname), target.port, timeout=60)
        headers = {
            name: value for name, value in self.headers.items() if name.lower() != "connection"
        }
        if fault is not None and fault.kind == "ignore-range":
            headers.pop("Range", None)
        if fault is not None and fault.kind == "no-condition":
            headers.pop("If-Match", None)
        connection.request(self.command, self.path, body=body, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() == "etag" and fault is not None and fault.kind == "other-tag":
                value = '"0123456789abcdef0123456789abcdef"'
            if name.lower() not in (
                "connection",
                "transfer-encoding",
                "content-length",
                "date",
                "server",
            ):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command == "HEAD":
            return 0
        return self._send(content, fault)

    def _send(self, content: bytes, fault: Fault | None) -> int:
        if fault is not None and fault.kind == "half":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            self.connection.close()
            return len(content) // 2
        if fault is not None and fault.kind == "slow":
            threading.Event().wait(fault.seconds)
        self.wfile.write(content)
        return len(content)


@contextmanager
def running(target: str) -> Iterator[Proxy]:
    """A proxy in front of a store at an address."""
    proxy = Proxy(target)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
