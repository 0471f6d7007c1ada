"""A running server of checkpoints, for tests: in a thread of the test's own process."""

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from megaconv.options import ConvertOptions
from megaconv.serving.repository import open_repositories
from megaconv.serving.server import Server

MEMORY = 64 << 20


@contextmanager
def serving(
    checkpoints: Mapping[str, Path | str], options: ConvertOptions | None = None
) -> Iterator[Server]:
    """checkpoints: paths or URIs by the names that they are served under."""
    places = [str(place) for place in checkpoints.values()]
    repositories = open_repositories(places, list(checkpoints), options or ConvertOptions())
    with Server(("127.0.0.1", 0), repositories, MEMORY) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Reply(NamedTuple):
    """A server's answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> Reply:
    """Send one request. headers: `_` stands for `-` in their names."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    connection.request(method, path, headers=named)
    found = connection.getresponse()
    reply = Reply(found.status, found.headers, found.read())
    connection.close()
    return reply
