"""The routes: requests are read and judged here, computed by the worker, and answered in the client's form."""

import asyncio
import hmac
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron_lite.inference.opening import Opened
from megatron_lite.inference.server import megatron_api
from megatron_lite.inference.server.errors import Refused, TimedOut, TooLarge, WrongKey
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.openai_answers import Choice, Form, Piece, of_prompt
from megatron_lite.inference.server.openai_requests import Wanted, chat, completion
from megatron_lite.inference.server.page import PAGE
from megatron_lite.inference.server.streams import pieces
from megatron_lite.inference.server.worker import Worker

Handler = Callable[[Request], Awaitable[Response]]


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
    prompt_tokens: int = 0

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
        return Starlette(routes=routes)

    def _guarded(self, handler: Handler) -> Handler:
        """With the key checked, what is refused as an answer, and both counted."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                response = await handler(request)
            except Refused as refused:
                response = error(refused)
            self.answered[request.url.path, response.status_code] += 1
            return response

        return guarded

    def _check_key(self, request: Request) -> None:
        if self.key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            raise WrongKey("the key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key")

    async def _fields(self, request: Request) -> Fields:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.limits.body_bytes:
                raise TooLarge(f"the body is larger than {self.limits.body_bytes} bytes")
        return Fields(bytes(body))

    async def completions(self, request: Request) -> Response:
        wanted = completion(await self._fields(request), self.opened, self.name)
        return await self._answer(request, wanted, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, chat(await self._fields(request), self.opened, self.name), chat=True)

    async def _answer(self, request: Request, wanted: Wanted, *, chat: bool) -> Response:
        form = Form(chat, self.name, self.opened.tokenizer.detokenize, wanted.log_probs is not None)
        self.prompt_tokens += sum(map(len, wanted.prompts))
        begun = [await self._echoed(prompt, wanted) for prompt in wanted.prompts for _ in range(wanted.choices)]
        if not wanted.stream:
            return await _unless_gone(request, self._whole(wanted, form, begun))
        parts = self._parts(wanted, form, begun)
        first = await anext(parts)  # so that what is refused at once has its status
        return StreamingResponse(
            _events(first, parts), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def _echoed(self, prompt: tuple[int, ...], wanted: Wanted) -> Choice:
        """What a choice begins with."""
        if not wanted.echo:
            return Choice()
        scored, top = None, wanted.log_probs
        if top is not None:
            (scored,) = await self.worker.between(lambda model: model.score([prompt], top))
        end = None if wanted.max_tokens else "length"
        return Choice(self.opened.tokenizer.detokenize(prompt), of_prompt(prompt, scored, top or 0), end)

    async def _whole(self, wanted: Wanted, form: Form, choices: list[Choice]) -> Response:
        before = sum(len(choice.tokens) for choice in choices)
        if wanted.max_tokens:
            async for piece in self._pieces(wanted):
                choices[piece.choice].add(piece)
        generated = sum(len(choice.tokens) for choice in choices) - before
        return JSONResponse(form.whole(choices, sum(map(len, wanted.prompts)), generated))

    async def _parts(self, wanted: Wanted, form: Form, choices: list[Choice]) -> AsyncIterator[dict[str, Any]]:
        generated, begun = 0, set()
        for number, choice in enumerate(choices):
            if wanted.echo:
                yield form.part(Piece(number, choice.text, tuple(choice.tokens), choice.end), 0, first=True)
                begun.add(number)
        if wanted.max_tokens:
            async for piece in self._pieces(wanted):
                choice = choices[piece.choice]
                yield form.part(piece, len(choice.text), first=piece.choice not in begun)
                begun.add(piece.choice)
                choice.add(piece)
                generated += len(piece.tokens)
        if wanted.usage:
            yield form.last(sum(map(len, wanted.prompts)), generated)

    def _pieces(self, wanted: Wanted) -> AsyncIterator[Any]:
        return pieces(self.worker, wanted, self.opened.stop_ids, self.opened.tokenizer.detokenize, self.limits.seconds)

    async def megatron(self, request: Request) -> Response:
        try:
            run = megatron_api.request(await self._fields(request), self.opened)
        except Refused as refused:
            return JSONResponse(refused.message, refused.status)
        try:
            return JSONResponse(await asyncio.wait_for(self.worker.alone(run), self.limits.seconds))
        except asyncio.TimeoutError:
            raise TimedOut(f"the answer wasn't ready after {self.limits.seconds:g} seconds") from None

    async def models(self, request: Request) -> Response:
        model = {"id": self.name, "object": "model", "created": self.started, "owned_by": "megatron-lite"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": self.opened.model.length}]})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE)

    async def metrics(self, request: Request) -> Response:
        """In Prometheus' format."""
        running, waiting = self.worker.counts
        lines = ["# TYPE megatron_lite_requests_total counter"]
        for (route, status), count in sorted(self.answered.items()):
            lines.append(f'megatron_lite_requests_total{{route="{route}",status="{status}"}} {count}')
        for name, kind, value in (
            ("prompt_tokens_total", "counter", self.prompt_tokens),
            ("generated_tokens_total", "counter", self.worker.tokens),
            ("requests_running", "gauge", running),
            ("requests_waiting", "gauge", waiting),
            ("slots", "gauge", self.opened.model.slots),
            ("cache_bytes", "gauge", self.opened.model.cache.bytes()),
        ):
            lines += [f"# TYPE megatron_lite_{name} {kind}", f"megatron_lite_{name} {value}"]
        return PlainTextResponse("\n".join(lines) + "\n")


def error(refused: Refused) -> Response:
    said = {"message": refused.message, "type": refused.kind, "param": refused.field, "code": refused.code}
    headers = {"Retry-After": "1"} if refused.status in (429, 503) else None
    return JSONResponse({"error": said}, refused.status, headers)


async def _unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """The answer, which is given up as soon as its client leaves."""
    working = asyncio.ensure_future(answer)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=499)  # nobody reads it
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _events(first: dict[str, Any], parts: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Server-sent events; what fails on the way is one, too, since the status is out already."""
    yield _event(first)
    try:
        async for part in parts:
            yield _event(part)
    except Refused as refused:
        yield _event(
            {"error": {"message": refused.message, "type": refused.kind, "param": refused.field, "code": refused.code}}
        )
    finally:
        await parts.aclose()  # type: ignore[attr-defined]
    yield "data: [DONE]\n\n"


def _event(part: dict[str, Any]) -> str:
    return f"data: {json.dumps(part, ensure_ascii=False)}\n\n"
