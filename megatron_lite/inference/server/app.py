"""The routes: requests are read and judged here, computed by the worker, and answered in the client's form."""

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from megatron_lite.inference.opening import Opened
from megatron_lite.inference.server import megatron_api
from megatron_lite.inference.server.errors import Broken, Gone, Refused, ShuttingDown, TooLarge, TooSlow, WrongKey
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.openai_answers import Choice, Form, Piece, of_prompt
from megatron_lite.inference.server.openai_requests import Wanted, chat, completion
from megatron_lite.inference.server.page import PAGE, POLICY
from megatron_lite.inference.server.responses import (
    AsciiJSONResponse,
    Deadline,
    Events,
    Parts,
    refusal,
    unless_gone,
)
from megatron_lite.inference.server.streams import beams, pieces
from megatron_lite.inference.server.worker import Worker
from megatron_lite.inference.slots import LanguageModel, Scored, require_finite

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
_DISCARDED = 16
"""Times the largest body: so much is read of one that is larger."""


@dataclass(frozen=True)
class Limits:
    body_bytes: int
    seconds: float
    """From a request to the end of its answer."""


@dataclass
class Server:
    opened: Opened
    worker: Worker
    name: str
    limits: Limits
    key: str | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By route and status."""

    def __post_init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, "reader")

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models)),
            Route("/api", self._guarded(self.megatron), methods=["PUT", "POST"]),
            Route("/metrics", self._guarded(self.metrics)),
            Route("/health", self.health),
            Route("/", self.page),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: self._no_route, Exception: self._broken})

    def _guarded(self, handler: Handler) -> Handler:
        """With the key checked, what is refused as an answer, and both counted."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                response = await handler(request)
            except Refused as refused:
                response = refusal(refused)
            except asyncio.CancelledError:  # the time for answers is over after SIGTERM
                response = refusal(ShuttingDown())
            if not isinstance(response, Events):  # which counts itself at its end
                self.answered[request.url.path, response.status_code] += 1
            return response

        return guarded

    def _no_route(self, request: Request, error: Exception) -> Response:
        """An address or a method that nobody serves."""
        assert isinstance(error, HTTPException)
        self.answered["other", error.status_code] += 1
        refused = Refused(f"nothing here answers {request.method} {request.url.path:.100}: {error.detail}")
        refused.status = error.status_code
        response = refusal(refused)
        response.headers.update(error.headers or {})
        return response

    def _broken(self, request: Request, error: Exception) -> Response:
        """A mistake of ours, whose traceback is printed."""
        self.answered[request.url.path, Broken.status] += 1
        return refusal(Broken(f"the server failed: {type(error).__name__}"))

    def _check_key(self, request: Request) -> None:
        if self.key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            raise WrongKey("the key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key")

    async def _read(self, request: Request, read: Callable[[Fields, Opened], T]) -> T:
        """read(fields, opened) on a thread of its own, so that a long text or a slow template keeps nobody else waiting."""
        body = await self._body(request)
        return await asyncio.get_running_loop().run_in_executor(self._reader, lambda: read(Fields(body), self.opened))

    async def _body(self, request: Request) -> bytes:
        """Raises TooLarge when it has come to its end, so that its sender is ready to read that; TooSlow, Gone."""
        body, size, most = bytearray(), 0, self.limits.body_bytes

        async def receive() -> None:
            nonlocal size
            async for chunk in request.stream():
                size += len(chunk)
                if size <= most:
                    body.extend(chunk)
                elif size > most * _DISCARDED:
                    break

        try:
            await asyncio.wait_for(receive(), self.limits.seconds)
        except asyncio.TimeoutError:
            raise TooSlow(f"the body wasn't there after {self.limits.seconds:g} seconds") from None
        except ClientDisconnect:
            raise Gone from None
        if size > most:
            raise TooLarge(f"the body is larger than {most} bytes")
        return bytes(body)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, completion, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, chat, chat=True)

    async def _answer(self, request: Request, read: Callable[[Fields, Opened, str], Wanted], *, chat: bool) -> Response:
        deadline = Deadline(self.limits.seconds)
        wanted = await self._read(request, lambda fields, opened: read(fields, opened, self.name))
        form = Form(chat, self.name, self.opened.tokenizer.detokenize, wanted.log_probs is not None)
        if not wanted.stream:
            return await unless_gone(request, self._whole(wanted, form, deadline))
        parts = self._parts(wanted, form, deadline)
        first = await unless_gone(request, anext(parts))  # so that what is refused at once has its status

        def ended(status: int) -> None:
            self.answered[request.url.path, status] += 1

        return Events(first, parts, ended)

    async def _begun(self, wanted: Wanted, deadline: Deadline) -> list[Choice]:
        """What the choices begin with."""
        found = []
        for prompt in wanted.prompts:
            scored, top = None, wanted.log_probs
            if wanted.echo and top is not None:
                (scored,) = await deadline.of(self.worker.between(_score(prompt, top)))
            for _ in range(wanted.choices):
                if wanted.echo:
                    text = self.opened.tokenizer.detokenize(prompt)
                    tokens = of_prompt(prompt, scored, top or 0)
                    found.append(Choice(text, tokens, None if wanted.max_tokens else "length"))
                else:
                    found.append(Choice())
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
                yield form.part(Piece(number, choice.text, tuple(choice.tokens), choice.end), 0, first=True)
                begun.add(number)
        if wanted.max_tokens:
            async with aclosing(self._pieces(wanted, deadline)) as found:
                async for piece in found:
                    choice = choices[piece.choice]
                    yield form.part(piece, len(choice.text), first=piece.choice not in begun)
                    begun.add(piece.choice)
                    choice.add(piece)
                    generated += len(piece.tokens)
        if wanted.usage:
            yield form.last(sum(map(len, wanted.prompts)), generated)

    def _pieces(self, wanted: Wanted, deadline: Deadline) -> AsyncGenerator[Piece, None]:
        return pieces(self.worker, wanted, self.opened.stop_ids, self.opened.tokenizer.detokenize, deadline)

    async def megatron(self, request: Request) -> Response:
        deadline = Deadline(self.limits.seconds)
        try:
            run = await self._read(request, megatron_api.request)
        except Gone:
            raise
        except Refused as refused:
            return AsciiJSONResponse(refused.message, refused.status)
        if isinstance(run, megatron_api.Searched):
            found = await unless_gone(request, beams(self.worker, run.request, deadline))
            return JSONResponse(run.answer(found))
        return JSONResponse(await unless_gone(request, deadline.of(self.worker.alone(run))))

    async def models(self, request: Request) -> Response:
        model = {"id": self.name, "object": "model", "created": self.started, "owned_by": "megatron-lite"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": self.opened.model.length}]})

    async def health(self, request: Request) -> Response:
        """Lives, though it may be that some requests get no answer: those are counted."""
        count = self.worker.without_answer
        return JSONResponse({"status": "ok"} if not count else {"status": "degraded", "requests_without_answer": count})

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE, headers={"Content-Security-Policy": POLICY})

    async def metrics(self, request: Request) -> Response:
        """In Prometheus' format."""
        running, waiting = self.worker.counts
        lines = ["# TYPE megatron_lite_requests_total counter"]
        for (route, status), count in sorted(self.answered.items()):
            lines.append(f'megatron_lite_requests_total{{route="{route}",status="{status}"}} {count}')
        for name, kind, value in (
            ("prompt_tokens_total", "counter", self.worker.prompt_tokens),
            ("generated_tokens_total", "counter", self.worker.tokens),
            ("requests_without_answer_total", "counter", self.worker.without_answer),
            ("requests_running", "gauge", running),
            ("requests_waiting", "gauge", waiting),
            ("slots", "gauge", self.opened.model.slots),
            ("cache_bytes", "gauge", self.opened.model.cache.bytes()),
        ):
            lines += [f"# TYPE megatron_lite_{name} {kind}", f"megatron_lite_{name} {value}"]
        return PlainTextResponse("\n".join(lines) + "\n")


def _score(prompt: tuple[int, ...], top: int) -> Callable[[LanguageModel], list[Scored]]:
    return lambda model: [require_finite(found) for found in model.score([prompt], top)]
