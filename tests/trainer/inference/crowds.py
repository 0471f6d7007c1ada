"""Clients that come at different times and behave differently: they read slowly, stall, leave, or send half a request."""

import asyncio
import json
import random
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.inference.batching import generate
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.openai_requests import completion
from tests.trainer.inference.serving import KEY, Serving
from tests.trainer.inference.storms import COMPLETIONS, WRONG, Shot, fire, said

PATIENCE_S = 900.0
"""The time for all clients, on a machine that is busy with other things."""
SPREAD_S = 4.0
"""Seconds over which the clients arrive."""
SYSTEM = "You answer one client alone, and never repeat the secret of another one. "
"""The beginning of most prompts, so that clients share rows of the cache."""


@dataclass(frozen=True)
class Answered:
    """The answer that a client saw."""

    behavior: str
    body: bytes
    found: str


@dataclass
class Crowd:
    """A server, the clients that visit it, and what they saw."""

    serving: Serving
    alone: Opened
    answers: list[Answered] = field(default_factory=list)
    statuses: list[tuple[int | None, int | None]] = field(default_factory=list)
    """(found, expected) of wrong requests."""
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when clients that hold half a request may leave."""
    texts: dict[bytes, str] = field(default_factory=dict)
    """Request -> the text that it gets alone."""

    def wanted(self, body: bytes) -> str:
        """Return the text that a request gets alone."""
        if body not in self.texts:
            parsed = completion(Fields.parse(body), self.alone, "tiny")
            (answer,) = generate(self.alone.model, parsed.requests(self.alone.stop_ids))
            kept = answer.tokens[:-1] if answer.end == "stop" else answer.tokens
            self.texts[body] = self.alone.tokenizer.detokenize(kept)
        return self.texts[body]

    def seen(self, behavior: str, body: bytes, answer: bytes) -> None:
        """Keep a whole answer."""
        head, _, content = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), (behavior, head)
        self.answers.append(Answered(behavior, body, said(content)))

    def wrong(self) -> list[tuple[Answered, str]]:
        """Return the answers that differ from what their prompts get alone, and this text."""
        judged = [(answer, self.wanted(answer.body)) for answer in self.answers]
        return [(answer, wanted) for answer, wanted in judged if answer.found != wanted]

    async def connect(self, limit: int = 1 << 16) -> tuple[asyncio.StreamReader, Any]:
        """Open a connection. limit: bytes that the client takes before it reads them."""
        host, port = self.serving.url.removeprefix("http://").split(":")
        return await asyncio.open_connection(host, int(port), limit=limit)


def question(number: int, *, stream: bool, tokens: int | None = None) -> bytes:
    """Return the body of a client's own request; every second one begins like the others."""
    begin = SYSTEM if number % 2 else f"{number}: "
    fields: dict[str, Any] = {
        "prompt": f"{begin}The secret of client {number} is {zlib.crc32(bytes([number % 256]))}.",
        "max_tokens": tokens or 4 + number % 21,
        "temperature": 0,
    }
    return json.dumps(fields | ({"stream": True} if stream else {})).encode()


def request(body: bytes) -> bytes:
    """Return a whole request to /v1/completions."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def reads(crowd: Crowd, number: int) -> None:
    """Ask, read the answer at once, and ask a question that continues it."""
    body = question(number, stream=number % 3 == 0)
    for _ in range(2):
        reader, writer = await crowd.connect()
        writer.write(request(body))
        crowd.seen("reads", body, await reader.read())
        writer.transport.abort()
        fields = json.loads(body)
        body = json.dumps(fields | {"prompt": fields["prompt"] + " And then"}).encode()


async def reads_slowly(crowd: Crowd, number: int) -> None:
    """Read a stream a few bytes at a time."""
    body = question(number, stream=True)
    reader, writer = await crowd.connect(limit=64)
    writer.write(request(body))
    answer = b""
    while part := await reader.read(40 + number % 60):
        answer += part
        await asyncio.sleep(0.01)
    crowd.seen("reads slowly", body, answer)
    writer.transport.abort()


async def stalls(crowd: Crowd, number: int) -> None:
    """Begin to read a stream, do nothing until the others have their answers, and read the rest."""
    body = question(number, stream=True, tokens=60)
    reader, writer = await crowd.connect(limit=64)
    writer.write(request(body))
    answer = await reader.readexactly(20)
    await crowd.holding.wait()
    crowd.seen("stalls", body, answer + await reader.read())
    writer.transport.abort()


async def leaves(crowd: Crowd, number: int) -> None:
    """Leave in the midst of a stream, or before it begins."""
    body = question(number, stream=number % 5 > 0, tokens=120)
    reader, writer = await crowd.connect()
    writer.write(request(body))
    if number % 5:
        with suppress(asyncio.IncompleteReadError):  # an answer may be shorter
            await reader.readexactly(15 + 150 * (number % 4))
    else:
        await asyncio.sleep(0.05)
    writer.transport.abort()


async def sends_half(crowd: Crowd, number: int) -> None:
    """Send a part of a request and hold the connection until the others have their answers."""
    whole = request(question(number, stream=False))
    reader, writer = await crowd.connect()
    writer.write(whole[: len(whole) * (number % 9 + 1) // 10])
    await crowd.holding.wait()
    if number % 2:
        writer.transport.abort()
        return
    writer.write_eof()  # the server sees the end of a request that is too short
    await reader.read()
    writer.transport.abort()


async def is_wrong(crowd: Crowd, number: int) -> None:
    """Send a request that is refused."""
    shot: Shot = ALWAYS_WRONG[number % len(ALWAYS_WRONG)]
    status, _ = await fire(crowd.serving, shot)
    crowd.statuses.append((status, shot.status))


Behavior = Callable[[Crowd, int], Awaitable[None]]
ALWAYS_WRONG = [shot for shot in WRONG if b"7, 7, 7" not in shot.body]
"""The wrong requests, without the prompt of 200 tokens: this server has room for it."""
OTHERS: Sequence[Behavior] = (reads, reads_slowly, leaves, is_wrong, reads)
HOLDING: Sequence[Behavior] = (stalls, sends_half)


def visit(crowd: Crowd, clients: int, seed: int) -> None:
    """Let clients come over SPREAD_S seconds. Every fourth one holds its connection until the others are done."""
    arrivals = random.Random(seed)

    async def come(behavior: Behavior, number: int) -> None:
        await asyncio.sleep(arrivals.uniform(0, SPREAD_S))
        await behavior(crowd, number)

    async def all_of_them() -> None:
        crowd.holding = asyncio.Event()
        held, others = [], []
        for number in range(clients):
            if number % 4 == 0:
                held.append(asyncio.ensure_future(come(HOLDING[number // 4 % 2], number)))
            else:
                others.append(come(OTHERS[number % len(OTHERS)], number))
        await asyncio.gather(*others)
        crowd.holding.set()
        await asyncio.gather(*held)

    async def in_time() -> None:
        await asyncio.wait_for(all_of_them(), PATIENCE_S)

    asyncio.run(in_time())
