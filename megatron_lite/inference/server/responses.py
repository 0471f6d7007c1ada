"""HTTP responses: refusals, streams of events, and answers whose client has disconnected."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from megatron_lite.inference.server.errors import Gone, Refused, ShuttingDown, TimedOut

T = TypeVar("T")

LINGER_S = 5.0
"""Time for a client to finish sending its body after an early answer."""


class AsciiJSONResponse(JSONResponse):
    """JSON with ASCII escapes, for answers that repeat parts of a request.

    JSON allows half of a surrogate pair, which has no UTF-8 encoding.
    """

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def refusal(refused: Refused) -> AsciiJSONResponse:
    """Return a refusal in OpenAI's format."""
    headers = {"Retry-After": "1"} if refused.status in (429, 503) else None
    return AsciiJSONResponse({"error": _error(refused)}, refused.status, headers)


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


def _error(refused: Refused) -> dict[str, Any]:
    return {
        "message": refused.message,
        "type": refused.kind,
        "param": refused.field,
        "code": refused.code,
    }


class Deadline:
    """The time limit of a request, from its first byte to the last byte of its answer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = asyncio.get_running_loop().time() + seconds

    async def of(self, awaitable: Awaitable[T]) -> T:
        """Await within the time limit. Raises TimedOut."""
        try:
            return await asyncio.wait_for(awaitable, self._end - asyncio.get_running_loop().time())
        except asyncio.TimeoutError:
            raise TimedOut(f"the answer wasn't ready after {self.seconds:g} seconds") from None


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


Parts = AsyncGenerator[dict[str, Any], None]


class Events(StreamingResponse):
    """Server-sent events. An error during the stream is sent as an event, because the status has been sent."""

    def __init__(self, first: dict[str, Any], parts: Parts, ended: Callable[[int], None]) -> None:
        """ended: called with the status of the outcome; 499 if the client disconnected."""
        self._parts, self._ended, self._outcome = parts, ended, Gone.status
        super().__init__(
            self._events(first), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # after SIGTERM, the time for open answers has ended
            self._outcome = ShuttingDown.status
            last = _event({"error": _error(ShuttingDown())}).encode()
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._ended(self._outcome)
            await self._parts.aclose()

    async def _events(self, first: dict[str, Any]) -> AsyncIterator[str]:
        yield _event(first)
        outcome = 200
        try:
            async for part in self._parts:
                yield _event(part)
        except Refused as refused:
            outcome = refused.status
            yield _event({"error": _error(refused)})
        yield "data: [DONE]\n\n"
        self._outcome = outcome


def _event(part: dict[str, Any]) -> str:
    return f"data: {json.dumps(part, ensure_ascii=False)}\n\n"
