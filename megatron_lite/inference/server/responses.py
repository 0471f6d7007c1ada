"""Answers in the forms of HTTP: a refusal, a stream of events; and what becomes of one that nobody waits for any more."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from megatron_lite.inference.server.errors import Gone, Refused, ShuttingDown, TimedOut

T = TypeVar("T")


class AsciiJSONResponse(JSONResponse):
    """For what repeats parts of a request: a half of a surrogate pair, which JSON may have, is no UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def refusal(refused: Refused) -> AsciiJSONResponse:
    """As OpenAI says it."""
    headers = {"Retry-After": "1"} if refused.status in (429, 503) else None
    return AsciiJSONResponse({"error": _error(refused)}, refused.status, headers)


def _error(refused: Refused) -> dict[str, Any]:
    return {"message": refused.message, "type": refused.kind, "param": refused.field, "code": refused.code}


class Deadline:
    """Of a request, from its first byte to the last one of its answer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = asyncio.get_running_loop().time() + seconds

    async def of(self, awaitable: Awaitable[T]) -> T:
        """Raises TimedOut."""
        try:
            return await asyncio.wait_for(awaitable, self._end - asyncio.get_running_loop().time())
        except asyncio.TimeoutError:
            raise TimedOut(f"the answer wasn't ready after {self.seconds:g} seconds") from None


async def unless_gone(request: Request, answer: Awaitable[T]) -> T:
    """The answer, which is given up as soon as its client leaves: raises Gone."""

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
    """Server-sent events; what fails on the way is one, too, since the status is out already."""

    def __init__(self, first: dict[str, Any], parts: Parts, ended: Callable[[int], None]) -> None:
        """ended: called with the status that says what came of it, 499 where the client left."""
        self._parts, self._ended, self._outcome = parts, ended, Gone.status
        super().__init__(
            self._events(first), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # the time for answers is over after SIGTERM
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
