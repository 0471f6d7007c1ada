"""Streams of server-sent events, in the format of a route."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from megatron_lite.inference.server.errors import Gone, Refused, ShuttingDown
from megatron_lite.inference.server.pieces import Pieces

EventStream = AsyncGenerator[dict[str, Any], None]


class AnswerForm(Protocol):
    """The format of a route's answer to one request."""

    last_line: str
    """The end of a stream."""

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """Return the whole answer."""

    def events(self, pieces: Pieces) -> EventStream:
        """Yield the events of a stream."""

    def failure(self, refused: Refused) -> dict[str, Any]:
        """Return the event of an error, after which no other comes."""


class Events(StreamingResponse):
    """Server-sent events. An error during the stream is sent as an event, because the status has been sent."""

    def __init__(
        self,
        first: dict[str, Any],
        rest: EventStream,
        form: AnswerForm,
        ended: Callable[[int], None],
    ) -> None:
        """ended: called with the status of the outcome; 499 if the client disconnected."""
        self._rest, self._form, self._ended, self._outcome = rest, form, ended, Gone.status
        super().__init__(
            self._events(first), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # after SIGTERM, the time for open answers has ended
            self._outcome = ShuttingDown.status
            last = _event(self._form.failure(ShuttingDown())).encode()
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._ended(self._outcome)
            await self._rest.aclose()

    async def _events(self, first: dict[str, Any]) -> AsyncIterator[str]:
        yield _event(first)
        outcome = 200
        try:
            async for event in self._rest:
                yield _event(event)
        except Refused as refused:
            outcome = refused.status
            yield _event(self._form.failure(refused))
        if self._form.last_line:
            yield self._form.last_line
        self._outcome = outcome


def _event(event: dict[str, Any]) -> str:
    """Return the lines of an event. The type of an event, if it has one, is also its name."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n"
