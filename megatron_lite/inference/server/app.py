"""The HTTP routes: they read and check requests, let the worker compute them, and answer in the client's format."""

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron_lite.inference.opening import Opened
from megatron_lite.inference.prompts import template_for_tools
from megatron_lite.inference.server import megatron_api
from megatron_lite.inference.server.calls.form import CallForm
from megatron_lite.inference.server.calls.table import BY_TEMPLATE, forms_of
from megatron_lite.inference.server.errors import (
    Broken,
    Gone,
    Refused,
    ShuttingDown,
    TooLarge,
    TooSlow,
    WrongKey,
)
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.local_only import LocalOnly
from megatron_lite.inference.server.metrics import metrics
from megatron_lite.inference.server.model_card import model_card
from megatron_lite.inference.server.openai_answers import Choice, Form, Piece, of_prompt
from megatron_lite.inference.server.openai_requests import Wanted, chat, completion, unknown_model
from megatron_lite.inference.server.page import POLICY, page
from megatron_lite.inference.server.reasoning import with_reasoning, without_reasoning
from megatron_lite.inference.server.responses import (
    AsciiJSONResponse,
    Deadline,
    Events,
    Parts,
    Unread,
    refusal,
    unless_gone,
)
from megatron_lite.inference.server.shown_marks import showing_marks
from megatron_lite.inference.server.streams import beams, pieces
from megatron_lite.inference.server.thinking_forms import ThinkingForm, thinking_forms_of
from megatron_lite.inference.server.tools import with_calls
from megatron_lite.inference.server.worker import Worker
from megatron_lite.inference.slots import Drafter, LanguageModel, Scored, require_finite
from megatron_lite.inference.text import Detokenize

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
MODELS = "/v1/models"
_DISCARDED = 16
"""If a body is refused before it is read, at most this many times the largest body is discarded."""
_OF_MARK = 16
"""Number of tokens at a prompt's end that may have the mark of thinking."""


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
        self._detokenizers: dict[tuple[bool, bool], Detokenize] = {}
        """By (shows the marks of calls, shows those of thinking)."""

    def app(self) -> ASGIApp:
        """Return the ASGI app."""
        guarded = self._guarded
        routes = [
            Route("/v1/completions", guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", guarded(self.chat), methods=["POST"]),
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
            try:
                self._check_key(request)
                response = await handler(request)
            except (TooLarge, WrongKey) as refused:
                response = self._unread(refusal(refused))
            except Refused as refused:
                response = refusal(refused)
            except asyncio.CancelledError:  # after SIGTERM, the time for open answers has ended
                response = refusal(ShuttingDown())
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
        response = refusal(refused)
        response.headers.update(headers)
        return response

    def _other_site(self, refused: Refused) -> Response:
        self.answered["other", refused.status] += 1
        return self._unread(refusal(refused))

    def _unread(self, answer: Response) -> Unread:
        return Unread(answer, self.limits.body_bytes * _DISCARDED)

    def _broken(self, request: Request, error: Exception) -> Response:
        """Answer after an internal error, whose traceback is printed."""
        self.answered[request.url.path, Broken.status] += 1
        return refusal(Broken(f"the server failed: {type(error).__name__}"))

    def _check_key(self, request: Request) -> None:
        if self.key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            raise WrongKey(
                "the key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _read(self, request: Request, read: Callable[[Fields, Opened], T]) -> T:
        """Run read(fields, opened) on a separate thread, so that a long text or a slow template blocks no other request."""
        body = await self._body(request)
        return await asyncio.get_running_loop().run_in_executor(
            self._reader, lambda: read(Fields(body), self.opened)
        )

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

    async def completions(self, request: Request) -> Response:
        """Answer /v1/completions."""
        return await self._answer(request, completion, chat=False)

    async def chat(self, request: Request) -> Response:
        """Answer /v1/chat/completions."""
        return await self._answer(request, chat, chat=True)

    async def _answer(
        self, request: Request, read: Callable[[Fields, Opened, str], Wanted], *, chat: bool
    ) -> Response:
        deadline = Deadline(self.limits.seconds)
        wanted = await self._read(request, lambda fields, opened: read(fields, opened, self.name))
        form = Form(
            chat,
            wanted.model,
            self.opened.tokenizer.detokenize,
            wanted.log_probs is not None,
            isinstance(self.opened.model, Drafter),
        )
        if not wanted.stream:
            return await unless_gone(request, self._whole(wanted, form, deadline))
        parts = self._parts(wanted, form, deadline)
        # Wait for the first part, so that an early refusal still sets the HTTP status.
        first = await unless_gone(request, anext(parts))

        def ended(status: int) -> None:
            self.answered[request.url.path, status] += 1

        return Events(first, parts, ended)

    async def _begun(self, wanted: Wanted, deadline: Deadline) -> list[Choice]:
        """Return the initial content of the choices: with echo the prompt."""
        found: list[Choice] = []
        if not wanted.echo:
            count = len(wanted.prompts) * wanted.choices
            return [Choice() for _ in range(count)]
        top = wanted.log_probs
        end = None if wanted.max_tokens else "length"
        for prompt in wanted.prompts:
            scored = None
            if top is not None:
                scoring = self.worker.between(_score(prompt, top, wanted.adapter))
                (scored,) = await deadline.of(scoring)
            for _ in range(wanted.choices):
                text = self.opened.tokenizer.detokenize(prompt)
                tokens = of_prompt(prompt, scored, top or 0)
                choice = Choice(text, tokens, end)
                found.append(choice)
        return found

    async def _whole(self, wanted: Wanted, form: Form, deadline: Deadline) -> Response:
        choices = await self._begun(wanted, deadline)
        before = sum(len(choice.tokens) for choice in choices)
        if wanted.max_tokens:
            async with aclosing(self._pieces(wanted, deadline)) as found:
                async for piece in found:
                    choices[piece.choice].add(piece)
        generated = sum(len(choice.tokens) for choice in choices) - before
        return JSONResponse(form.whole(choices, sum(map(len, wanted.prompts)), generated))

    async def _parts(self, wanted: Wanted, form: Form, deadline: Deadline) -> Parts:
        generated, begun, choices = 0, set(), await self._begun(wanted, deadline)
        for number, choice in enumerate(choices):
            if wanted.echo:
                echoed = Piece(number, choice.text, tuple(choice.tokens), choice.end)
                yield form.part(echoed, Choice(), first=True)
                begun.add(number)
        if wanted.max_tokens:
            async with aclosing(self._pieces(wanted, deadline)) as found:
                async for piece in found:
                    choice = choices[piece.choice]
                    yield form.part(piece, choice, first=piece.choice not in begun)
                    begun.add(piece.choice)
                    choice.add(piece)
                    generated += len(piece.tokens)
        if wanted.usage:
            yield form.last(choices, sum(map(len, wanted.prompts)), generated)

    def _pieces(self, wanted: Wanted, deadline: Deadline) -> AsyncGenerator[Piece, None]:
        found = pieces(
            self.worker, wanted, self.opened.stop_ids, self._detokenize(wanted), deadline
        )
        if wanted.harmony is not None:
            return found if self.reasoning else without_reasoning(found)
        if self._separates(wanted):
            prompt = self.opened.tokenizer.spelled(wanted.prompts[0][-_OF_MARK:])
            found = with_reasoning(found, self._thinking_forms, prompt)
        if wanted.tools is None:
            return found
        return with_calls(found, replace(wanted.tools, forms=self._call_forms))

    def _separates(self, wanted: Wanted) -> bool:
        """Return whether thinking is apart from the answer. An answer of a demanded form has none."""
        return self.reasoning is not None and not wanted.continues and wanted.grammar is None

    def _detokenize(self, wanted: Wanted) -> Detokenize:
        may_call = wanted.tools is not None and not wanted.tools.forced
        if wanted.harmony is not None:
            return self.opened.tokenizer.detokenize
        return self._shown(calls=may_call, thinking=self._separates(wanted))

    def _shown(self, *, calls: bool, thinking: bool) -> Detokenize:
        """Return the function from tokens to text with the marks that are read in it."""
        if (calls, thinking) not in self._detokenizers:
            forms = [*self._call_forms] * calls + [*self._thinking_forms] * thinking
            marks = {mark for form in forms for mark in form.all_marks}
            made = showing_marks(self.opened.tokenizer, marks)
            self._detokenizers[calls, thinking] = made
        return self._detokenizers[calls, thinking]

    @cached_property
    def _template(self) -> str:
        return template_for_tools(self.opened.tokenizer)

    @cached_property
    def _call_forms(self) -> tuple[CallForm, ...]:
        """The forms in which the model may write calls."""
        return forms_of(self.tool_calls, self._template)

    @cached_property
    def _thinking_forms(self) -> tuple[ThinkingForm, ...]:
        """The forms in which the model may mark its thinking."""
        return thinking_forms_of(self.reasoning or BY_TEMPLATE, self._template)

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


def _route(request: Request) -> str:
    """Return the path of a request's route, without the name of a model, so that clients add no lines to the metrics."""
    path = request.url.path
    return MODELS if path.startswith(f"{MODELS}/") else path


def _score(
    prompt: tuple[int, ...], top: int, adapter: int | None
) -> Callable[[LanguageModel], list[Scored]]:
    return lambda model: [require_finite(found) for found in model.score([prompt], top, adapter)]
