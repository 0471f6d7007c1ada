"""One line for each request: time, client, method, path, status and seconds. No text of a request is written."""

import sys
import time
from datetime import datetime, timezone

from starlette.types import ASGIApp, Message, Receive, Scope, Send

NO_ANSWER = 499
"""Stands for a status if the client left before there was one."""
_LONGEST_PATH = 200


class AccessLog:
    """An application whose answers are logged on stderr."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log it after the last byte."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started = NO_ANSWER, time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            print(_line(scope, status, time.monotonic() - started), file=sys.stderr, flush=True)


def _line(scope: Scope, status: int, seconds: float) -> str:
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    client = (scope.get("client") or ("-",))[0]
    # A client chooses the path. Escapes keep it on its line, without control characters.
    path = scope["path"].encode("unicode_escape").decode()[:_LONGEST_PATH]
    return f"{now} {client} {scope['method']} {path} {status} {seconds:.3f}"
