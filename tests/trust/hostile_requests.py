"""Hostile requests to serve-hf: raw bytes to its socket. It answers what was asked rightly, refuses the rest, and goes on.

A status of 500 or 503, an answer with other bytes than those of the file, an error of Python in the log, or a server that
doesn't answer a plain request afterwards, is a failure.
"""

import logging
import socket
from functools import cache
from http.client import HTTPException, HTTPResponse
from random import Random
from threading import Thread
from typing import Any, NamedTuple

from megaconv.options import ConvertOptions
from megaconv.serving.repository import open_repositories
from megaconv.serving.server import Server
from tests.trust.bench import Bench
from tests.trust.judging import Failure

PATIENCE_S = 20.0
_WEIGHTS = "/org/run/resolve/main/model.safetensors"
_PATHS = (
    "/", "/api/models", "/api/models/org/run", "/api/models/org/run/tree/main", "/org/run/resolve/main/config.json", _WEIGHTS,
    "/org/run", "/api/models/org/run/revision/main", "/diff?a=org/run&b=org/run",
)  # fmt: skip
_EVIL = (
    "..", "../" * 20 + "etc/passwd", "%2e%2e%2f", "%00", "\x00", "\xff", "a" * 70_000, "?" * 9, "//evil.example/", "http://evil/",
    "%", "%zz", "\\..\\..", ";", "\r", "\t", "\u202e", "@{upstream}", "refs/../../..",
)  # fmt: skip
_NUMBERS = ("0", "-0", "1", "-1", str(2**31), str(2**63), "9" * 4000, "1e9", "0x10", " 5", "٣", "")
_NAMES = (
    "Range",
    "Host",
    "If-None-Match",
    "If-Range",
    "Content-Length",
    "Transfer-Encoding",
    "Connection",
    "Expect",
    "Accept",
)


class _Served(NamedTuple):
    server: Server
    content: bytes
    """The content of the file of weights."""
    logged: list[str]


def attack(bench: Bench, number: int) -> None:
    random = bench.random("requests", number)
    served = _served(bench)
    request = _request(random)
    what = f"request {request[:200]!r}"
    answered = _exchange(served, request, what)
    for status, headers, body in answered:
        if status in (500, 503):
            raise Failure("traceback", f"{what}: status {status}: {body[:200]!r}")
        if b"root:x:0" in body:
            raise Failure("outside", what)
        if status == 206:
            _judge_range(served, headers, body, what)
    if served.logged:
        raise Failure("traceback", f"{what}: {served.logged.pop()}")
    plain = f"GET {_WEIGHTS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    for status, _, body in _exchange(served, plain, what)[:1]:
        if (status, body) == (200, served.content):
            return
    raise Failure("wrong", f"{what}: a plain request isn't answered afterwards")


def _judge_range(served: _Served, headers: Any, body: bytes, what: str) -> None:
    ends, _, size = headers["Content-Range"].removeprefix("bytes ").partition("/")
    first, last = map(int, ends.split("-"))
    if int(size) == len(served.content) and body and body != served.content[first : last + 1]:
        raise Failure("wrong", f"{what}: other bytes than those of the file")


@cache
def _served(bench: Bench) -> _Served:
    """A server in this process, for all cases of a worker."""
    place = bench.checkpoints["core"].path
    repositories = open_repositories([str(place)], ["org/run"], ConvertOptions())
    server = Server(("127.0.0.1", 0), repositories, 64 << 20)
    Thread(target=server.serve_forever, daemon=True).start()
    logged: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logging.getLogger("megaconv").addHandler(Kept())
    plain = f"GET {_WEIGHTS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    found = _Served(server, b"", logged)
    ((status, _, content),) = _exchange(found, plain, "a plain request")
    assert status == 200, content
    return found._replace(content=content)


def _request(random: Random) -> bytes:
    """Half of them are almost right, the others are not HTTP."""
    kind = random.choice(
        [
            "path",
            "path",
            "headers",
            "headers",
            "range",
            "range",
            "line",
            "garbage",
            "pipelined",
            "half",
        ]
    )
    method = random.choice(["GET", "GET", "HEAD"])
    path, headers = random.choice(_PATHS), {"Host": "localhost"}
    if kind == "path":
        place = random.randrange(len(path) + 1)
        path = path[:place] + random.choice(_EVIL) + path[place:]
    elif kind == "headers":
        for _ in range(random.choice([1, 3, 99, 300])):
            name = random.choice([*_NAMES, f"X-{random.random()}"])
            headers[name] = random.choice([*_EVIL, *_NUMBERS])
    elif kind == "range":
        path = _WEIGHTS
        unit = random.choice(["bytes", "bytes", "bytes", "lines", ""])
        parts = [
            f"{random.choice(_NUMBERS)}-{random.choice(_NUMBERS)}"
            for _ in range(random.choice([1, 1, 2, 2000]))
        ]
        headers["Range"] = f"{unit}={','.join(parts)}"
    elif kind == "line":
        method = random.choice(
            ["", "G\x00T", "GET GET", "A" * 70_000, "PRI", "get", "CONNECT", "TRACE"]
        )
    elif kind == "garbage":
        return random.randbytes(random.choice([1, 100, 100_000]))
    line = f"{method} {path} HTTP/{random.choice(['1.1', '1.1', '1.0', '2.0', '0.9', '1.1.1', 'x'])}\r\n"
    text = line + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    content = text.encode("utf-8", "surrogateescape")
    if kind == "pipelined":
        return content * 20
    return content[: random.randrange(len(content))] if kind == "half" else content


def _exchange(served: _Served, request: bytes, what: str) -> list[tuple[int, Any, bytes]]:
    """Send bytes, end the sending side, and read all answers: (status, headers, body)."""
    answers: list[tuple[int, Any, bytes]] = []
    with socket.create_connection(("127.0.0.1", served.server.server_port), PATIENCE_S) as line:
        try:
            line.sendall(request)
            line.shutdown(socket.SHUT_WR)
            method = "HEAD" if request.startswith(b"HEAD") else "GET"
            for _ in range(20):
                reply = HTTPResponse(line, method=method)
                reply.begin()
                answers.append((reply.status, reply.headers, reply.read()))
                if reply.will_close:
                    break
        except TimeoutError:
            raise Failure("hang", f"{what}: no answer for {PATIENCE_S:.0f} s") from None
        except (OSError, ValueError, HTTPException):
            return answers  # a connection that the server has ended, or an answer of HTTP 0.9
    return answers
