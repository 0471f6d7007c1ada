"""The HTTP routes: they read and check requests, let the worker compute them, and answer in the client's format."""

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron_lite.inference.opening import Opened
from megatron_lite.inference.server import embeddings, megatron_api
from megatron_lite.inference.server.answering import Answering
from megatron_lite.inference.server.anthropic_messages.errors import error_json
from megatron_lite.inference.server.anthropic_messages.request import count_tokens, read_message
from megatron_lite.inference.server.calls.table import BY_TEMPLATE
from megatron_lite.inference.server.embeddings import read_embeddings
from megatron_lite.inference.server.errors import (
    Broken,
    Gone,
    Refused,
    ShuttingDown,
    TooLarge,
    TooSlow,
    WrongKey,
    refused_json,
)
from megatron_lite.inference.server.event_stream import AnswerForm, Events, EventStream
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.local_only import LocalOnly
from megatron_lite.inference.server.metrics import metrics
from megatron_lite.inference.server.model_card import model_card
from megatron_lite.inference.server.openai_requests import Wanted, unknown_model
from megatron_lite.inference.server.openai_responses.request import read_response
from megatron_lite.inference.server.openai_routes import read_chat, read_completion
from megatron_lite.inference.server.page import POLICY, page
from megatron_lite.inference.server.pieces import Pieces
from megatron_lite.inference.server.responses import (
    AsciiJSONResponse,
    Deadline,
    Described,
    Unread,
    refusal,
    unless_gone,
)
from megatron_lite.inference.server.streams import beams
from megatron_lite.inference.server.worker import Worker

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
Read = Callable[[Fields, Opened, str], tuple[Wanted, AnswerForm]]
"""Reads a request: (fields, model, name of the model) -> (request, form of its answer). Raises Refused."""
MODELS, MESSAGES = "/v1/models", "/v1/messages"
ANTHROPIC_KEY = "x-api-key"
"""The header in which Anthropic's clients send their key."""
_DISCARDED = 16
"""If a body is refused before it is read, at most this many times the largest body is discarded."""


@dataclass(frozen=True)
class Limits:
    """Limits for one request."""

    body_bytes: int
    seconds: float
    """Time from a request to the end of its answer."""


@dataclass
class Server:
    """The routes and state of the server."""

    opened: Opened
    worker: Worker
    name: str
    limits: Limits
    key: str | None = None
    reasoning: str | None = None
    """The name of the form of thinking (thinking_forms.py), which chats have apart from the answer; None: they don't."""
    local_name: str | None = None
    """The server's host name if only this machine can reach it; None if other machines can."""
    tool_calls: str = BY_TEMPLATE
    """The name of the form of calls of tools (calls/table.py)."""
    started: int = field(default_factory=lambda: int(time.time()))
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Number of answers by route and status."""

    def __post_init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, "reader")
        self._answering = Answering(self.opened, self.worker, self.reasoning, self.tool_calls)

    def app(self) -> ASGIApp:
        """Return the ASGI app."""
        guarded, answers = self._guarded, self._answers
        routes = [
            Route("/v1/completions", guarded(answers(read_completion)), methods=["POST"]),
            Route("/v1/chat/completions", guarded(answers(read_chat)), methods=["POST"]),
            Route("/v1/responses", guarded(answers(read_response)), methods=["POST"]),
            Route(MESSAGES, guarded(answers(read_message)), methods=["POST"]),
            Route("/v1/embeddings", guarded(self.embeddings), methods=["POST"]),
            Route(f"{MESSAGES}/count_tokens", guarded(self.count_tokens), methods=["POST"]),
            Route(MODELS, guarded(self.models)),
            Route(f"{MODELS}/{{name:path}}", guarded(self.one_model)),
            Route("/api", guarded(self.megatron), methods=["PUT", "POST"]),
            Route("/metrics", guarded(self.metrics)),
            Route("/health", self.health),
            Route("/", self.page),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={HTTPException: self._no_route, Exception: self._broken},
        )
        if self.local_name is None:
            return app
        return LocalOnly(app, self.local_name, self._other_site)

    def _guarded(self, handler: Handler) -> Handler:
        """Wrap a handler: check the key, turn a refusal into an answer, and count answers."""

        async def guarded(request: Request) -> Response:
            described = _described(request.url.path)
            try:
                self._check_key(request)
                response = await handler(request)
            except (TooLarge, WrongKey) as refused:
                response = self._unread(refusal(refused, described))
            except Refused as refused:
                response = refusal(refused, described)
            except asyncio.CancelledError:  # after SIGTERM, the time for open answers has ended
                response = refusal(ShuttingDown(), described)
            if not isinstance(response, Events):  # Events counts itself at its end
                self.answered[_route(request), response.status_code] += 1
            return response

        return guarded

    def _no_route(self, request: Request, error: Exception) -> Response:
        """Answer a request for an unknown path or method."""
        assert isinstance(error, HTTPException)
        self.answered["other", error.status_code] += 1
        headers = error.headers or {}
        methods = f"; send {headers['Allow']}" if "Allow" in headers else ""
        refused = Refused(
            f"nothing here answers {request.method} {request.url.path:.100}: {error.detail}{methods}"
        )
        refused.status = error.status_code
        response = refusal(refused, _described(request.url.path))
        response.headers.update(headers)
        return response

    def _other_site(self, path: str, refused: Refused) -> Response:
        self.answered["other", refused.status] += 1
        return self._unread(refusal(refused, _described(path)))

    def _unread(self, answer: Response) -> Unread:
        return Unread(answer, self.limits.body_bytes * _DISCARDED)

    def _broken(self, request: Request, error: Exception) -> Response:
        """Answer after an internal error, whose traceback is printed."""
        self.answered[request.url.path, Broken.status] += 1
        broken = Broken(f"the server failed: {type(error).__name__}")
        return refusal(broken, _described(request.url.path))

    def _check_key(self, request: Request) -> None:
        if self.key is None:
            return
        authorization = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = authorization or request.headers.get(ANTHROPIC_KEY, "")
        # Starlette decodes the bytes of headers as Latin-1, and clients send other characters in UTF-8.
        if not hmac.compare_digest(given.encode("latin-1"), self.key.encode()):
            raise WrongKey(
                "the key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _read(self, request: Request, read: Callable[[Fields, Opened], T]) -> T:
        """Run read(fields, opened) on a separate thread, so that a long text or a slow template blocks no other request."""
        body = await self._body(request)

        def parsed() -> T:
            try:
                return read(Fields.parse(body), self.opened)
            except RecursionError:
                raise Refused("the body has too many levels of lists and objects") from None

        return await asyncio.get_running_loop().run_in_executor(self._reader, parsed)

    async def _body(self, request: Request) -> bytes:
        """Return the body. Raises TooLarge as soon as it exceeds the limit; TooSlow, Gone."""
        body, most = bytearray(), self.limits.body_bytes
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most:
            raise TooLarge(most)

        async def receive() -> None:
            async for chunk in request.stream():
                body.extend(chunk)
                if len(body) > most:
                    raise TooLarge(most)

        try:
            await asyncio.wait_for(receive(), self.limits.seconds)
        except asyncio.TimeoutError:
            raise TooSlow(f"the body wasn't there after {self.limits.seconds:g} seconds") from None
        except ClientDisconnect:
            raise Gone from None
        return bytes(body)

    def _answers(self, read: Read) -> Handler:
        """Return the handler of a route whose requests are read by this function."""

        async def answer(request: Request) -> Response:
            deadline = Deadline(self.limits.seconds)
            wanted, form = await self._read(
                request, lambda fields, opened: read(fields, opened, self.name)
            )
            pieces = self._answering.pieces(wanted, deadline)
            if not wanted.stream:
                return JSONResponse(await unless_gone(request, _whole(form, pieces)))
            events = _events(form, pieces)
            # Wait for the first event, so that an early refusal still sets the HTTP status.
            first = await unless_gone(request, anext(events))

            def ended(status: int) -> None:
                self.answered[request.url.path, status] += 1

            return Events(first, events, form, ended)

        return answer

    async def count_tokens(self, request: Request) -> Response:
        """Answer /v1/messages/count_tokens."""

        def count(fields: Fields, opened: Opened) -> dict[str, int]:
            return count_tokens(fields, opened, self.name)

        return JSONResponse(await self._read(request, count))

    async def embeddings(self, request: Request) -> Response:
        """Answer /v1/embeddings."""
        deadline = Deadline(self.limits.seconds)
        wanted = await self._read(
            request, lambda fields, opened: read_embeddings(fields, opened, self.name)
        )
        answer = embeddings.answer(wanted, self.worker, deadline)
        return JSONResponse(await unless_gone(request, answer))

    async def megatron(self, request: Request) -> Response:
        """Answer Megatron's /api."""
        deadline = Deadline(self.limits.seconds)
        try:
            run = await self._read(request, megatron_api.request)
        except Gone:
            raise
        except Refused as refused:
            answer = AsciiJSONResponse(refused.message, refused.status)
            return self._unread(answer) if isinstance(refused, TooLarge) else answer
        if isinstance(run, megatron_api.Searched):
            found = await unless_gone(request, beams(self.worker, run.request, deadline))
            return JSONResponse(run.answer(found))
        return JSONResponse(await unless_gone(request, deadline.of(self.worker.alone(run))))

    @cached_property
    def _card(self) -> dict[str, Any]:
        """The model's facts. Counting the tensors of a model with many experts takes tens of milliseconds."""
        return model_card(self.opened)

    def _models(self) -> list[dict[str, Any]]:
        """Return the model and its adapters."""
        model = {
            "object": "model",
            "created": self.started,
            "owned_by": "megatron-lite",
            "max_model_len": self.opened.model.length,
            "meta": self._card,
        }
        listed = [{"id": self.name, **model}]
        for name in self.opened.adapters:
            listed.append({"id": name, **model, "parent": self.name})
        return listed

    async def models(self, request: Request) -> Response:
        """Answer /v1/models."""
        return JSONResponse({"object": "list", "data": self._models()})

    async def one_model(self, request: Request) -> Response:
        """Answer /v1/models/NAME. Raises UnknownModel."""
        name = request.path_params["name"]
        for model in self._models():
            if model["id"] == name:
                return JSONResponse(model)
        raise unknown_model(name, (self.name, *self.opened.adapters))

    async def health(self, request: Request) -> Response:
        """Report that the server is alive. Requests that ended without an answer are counted here."""
        count = self.worker.without_answer
        return JSONResponse(
            {"status": "ok"}
            if not count
            else {"status": "degraded", "requests_without_answer": count}
        )

    async def page(self, request: Request) -> Response:
        """Answer / with the chat."""
        return HTMLResponse(page(), headers={"Content-Security-Policy": POLICY})

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus' format."""
        return PlainTextResponse(metrics(self.worker, self.opened.model, self.answered))


def _described(path: str) -> Described:
    """Return the format of the errors of a path."""
    is_message = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return error_json if is_message else refused_json


def _route(request: Request) -> str:
    """Return the path of a request's route, without the name of a model, so that clients add no lines to the metrics."""
    path = request.url.path
    return MODELS if path.startswith(f"{MODELS}/") else path


async def _whole(form: AnswerForm, pieces: Pieces) -> dict[str, Any]:
    async with aclosing(pieces):
        return await form.whole(pieces)


async def _events(form: AnswerForm, pieces: Pieces) -> EventStream:
    async with aclosing(pieces), aclosing(form.events(pieces)) as events:
        async for event in events:
            yield event
