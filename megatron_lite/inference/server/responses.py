"""HTTP responses: refusals, limits of time, and answers whose client has disconnected."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from megatron_lite.inference.server.errors import (
    Gone,
    Refused,
    TimedOut,
    refused_json,
)

T = TypeVar("T")

LINGER_S = 5.0
"""Time for a client to finish sending its body after an early answer."""


class AsciiJSONResponse(JSONResponse):
    """JSON with ASCII escapes, for answers that repeat parts of a request.

    JSON allows half of a surrogate pair, which has no UTF-8 encoding.
    """

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


Described = Callable[[Refused], dict[str, Any]]
"""Describes a refusal in the format of a route."""


def refusal(refused: Refused, described: Described = refused_json) -> AsciiJSONResponse:
    """Return a refusal, described in the route's format."""
    headers = {"Retry-After": "1"} if refused.status in (429, 503) else None
    return AsciiJSONResponse(described(refused), refused.status, headers)


class Unread(Response):
    """An answer that is sent at once, while the request's body is still arriving. The rest of the body is discarded.

    A client that reads nothing before its body is sent would never see the answer if the connection closed at once.
    """

    def __init__(self, answer: Response, most_bytes: int) -> None:
        """most_bytes: number of bytes to discard; with a longer body the connection closes."""
        super().__init__(
            answer.body, answer.status_code, dict(answer.headers) | {"Connection": "close"}
        )
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(asyncio.TimeoutError, asyncio.CancelledError):
            # The end of the server cancels this wait.
            await asyncio.wait_for(self._discard(receive), LINGER_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self, receive: Receive) -> None:
        size, more = 0, True
        while more and size <= self._most_bytes:
            message = await receive()
            more = bool(message.get("more_body"))
            size += len(message.get("body", b""))


class Deadline:
    """The time limit of a request, from its first byte to the last byte of its answer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = asyncio.get_running_loop().time() + seconds

    async def of(self, awaitable: Awaitable[T]) -> T:
        """Await within the time limit. Raises TimedOut."""
        # wait_for of Python before 3.12 ignores a cancellation that comes together with the result.
        working, left = (
            asyncio.ensure_future(awaitable),
            self._end - asyncio.get_running_loop().time(),
        )
        try:
            if left > 0:
                await asyncio.wait((working,), timeout=left)
            if not working.done():
                raise TimedOut(f"the answer wasn't ready after {self.seconds:g} seconds")
            return working.result()
        finally:
            working.cancel()


async def unless_gone(request: Request, answer: Awaitable[T]) -> T:
    """Return the answer, or cancel it as soon as the client disconnects and raise Gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(answer), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
