"""Many requests at the same time, good ones, wrong ones, and clients that leave; and what has to come of each."""

import asyncio
import json
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_lite.inference.batching import generate
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.openai_requests import completion
from tests.trainer.inference.serving import KEY, Serving

PATIENCE_S = 900.0
"""The time for all answers, on a machine that is busy with other things."""
OK = b"HTTP/1.1 200 "
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Shot:
    """One request, and what is to come of it."""

    route: str
    body: bytes
    status: int | None
    """None: the client leaves without reading it."""
    text: str | None = None
    tokens: int = 0
    """Generated for it."""
    method: str = "POST"
    key: str = KEY
    leaves_after: int | None = None
    """Bytes of an answer; 0 at once, -1 in the midst of its own body."""


def post(
    status: int | None, route: str = COMPLETIONS, leaves_after: int | None = None, **fields: Any
) -> Shot:
    return Shot(route, json.dumps(fields).encode(), status, leaves_after=leaves_after)


WRONG = [
    Shot(COMPLETIONS, b"{", 400),
    Shot(COMPLETIONS, b"\xff\xfe{}", 400),
    Shot(COMPLETIONS, b"[" * 100_000, 400),
    Shot(COMPLETIONS, b'{"prompt": "x", "max_tokens": ' + b"9" * 10_000 + b"}", 400),
    Shot(COMPLETIONS, b" " * (5 << 20), 413),
    Shot(COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400),
    Shot(COMPLETIONS, b'{"prompt": "\\ud800"}', 400),
    Shot(COMPLETIONS, b'{"prompt": "x", "\\ud800": 1}', 400),
    Shot(COMPLETIONS, b'{"prompt": "\xed\xa0\x80"}', 400),
    Shot(CHAT, b'{"messages": [{"role": "\\uD800", "content": "x"}]}', 400),
    post(400, prompt="x", max_tokens=1000),
    post(400, prompt="x" * 5000),
    post(400, prompt=[7] * 200),
    post(400, prompt=[7, -1]),
    post(400, prompt=[[7, 8], []]),
    post(400, prompt="x", stop=[""]),
    post(400, prompt="x", n=1000),
    post(400, prompt="x", logit_bias={"one": 5}),
    post(404, prompt="x", model="another"),
    post(400, CHAT, messages=[]),
    post(400, CHAT, messages=[{"role": "user", "content": {"type": "image"}}]),
    post(400, "/api", prompts=["x"], beam_width=2, top_k=3),
    Shot("/v1/completion", b"{}", 404),
    Shot("/v1/images/generations", b"{}", 404),
    Shot("/v1/embeddings", b"{}", 400),
    Shot(COMPLETIONS, b"", 405, method="DELETE"),
    Shot(COMPLETIONS, b'{"prompt": "x"}', 401, key="wrong"),
]  # fmt: skip


def good(opened: Opened, count: int) -> list[Shot]:
    """Requests with the answers that each gets when nobody else is there."""
    shots = []
    for number in range(count):
        fields: dict[str, Any] = {
            "prompt": f"{number} and so on" * (number % 4 + 1),
            "max_tokens": 3 + number % 14,
        }
        fields |= (
            {"temperature": 0} if number % 3 else {"temperature": 0.7, "top_k": 9, "seed": number}
        )
        fields |= {"stream": True} if number % 4 == 1 else {}
        body = json.dumps(fields).encode()
        wanted = completion(Fields.parse(body), opened, "tiny")
        (answer,) = generate(opened.model, wanted.requests(opened.stop_ids))
        kept = answer.tokens[:-1] if answer.end == "stop" else answer.tokens
        shots.append(
            Shot(COMPLETIONS, body, 200, opened.tokenizer.detokenize(kept), len(answer.tokens))
        )
    return shots


LEAVING = [
    post(None, prompt="go on", max_tokens=80, leaves_after=0),
    post(None, prompt="go on", max_tokens=80, stream=True, leaves_after=0),
    post(None, prompt="go on", max_tokens=80, stream=True, leaves_after=600),
    post(None, prompt="go on", max_tokens=20, n=4, stream=True, leaves_after=400),
    post(None, CHAT, messages=[{"role": "user", "content": "go on"}], leaves_after=0),
    post(None, prompt="go on " * 500, leaves_after=-1),
    post(None, "/api", prompts=["go on"], tokens_to_generate=80, leaves_after=0),
]


def streams(opened: Opened, count: int) -> list[Shot]:
    """Streams alone, of both routes and of several choices: every second client leaves, each at another place."""
    shots = []
    for number in range(count):
        fields: dict[str, Any] = {
            "stream": True,
            "max_tokens": 2 + number % 19,
            "temperature": 0.8,
            "seed": number,
        }
        text = f"{number} and so on" * (number % 5 + 1)
        if number % 2:
            places = (0, 1, 200, 400, 700, 1500)
            leaves_after = places[number // 2 % len(places)]
            long = fields | {"max_tokens": 60, "n": number // 4 % 2 + 1}
            chat = {"messages": [{"role": "user", "content": "go on"}]}
            route, asked = (CHAT, chat) if number % 4 == 1 else (COMPLETIONS, {"prompt": "go on"})
            shots.append(post(None, route, leaves_after, **long, **asked))
            continue
        body = json.dumps(fields | {"prompt": text}).encode()
        wanted = completion(Fields.parse(body), opened, "tiny")
        (answer,) = generate(opened.model, wanted.requests(opened.stop_ids))
        kept = answer.tokens[:-1] if answer.end == "stop" else answer.tokens
        shots.append(
            Shot(COMPLETIONS, body, 200, opened.tokenizer.detokenize(kept), len(answer.tokens))
        )
    return shots


def storm(serving: Serving, shots: list[Shot]) -> list[tuple[int | None, bytes]]:
    """All of them at once: (status, body)."""

    async def all_at_once() -> list[tuple[int | None, bytes]]:
        return await asyncio.wait_for(
            asyncio.gather(*(fire(serving, shot) for shot in shots)), PATIENCE_S
        )

    return asyncio.run(all_at_once())


async def fire(serving: Serving, shot: Shot) -> tuple[int | None, bytes]:
    host, port = serving.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"{shot.method} {shot.route} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {shot.key}\r\nConnection: close\r\n"
    try:
        writer.write(f"{head}Content-Length: {len(shot.body)}\r\n\r\n".encode())
        if shot.leaves_after == -1:
            writer.write(shot.body[: len(shot.body) // 2])
            await asyncio.sleep(0.1)
            return None, b""
        writer.write(shot.body)
        if shot.leaves_after is not None:
            if not shot.leaves_after:
                await asyncio.sleep(0.1)
                return None, b""
            with suppress(asyncio.IncompleteReadError):  # an answer may be shorter
                begin = await reader.readexactly(min(shot.leaves_after, len(OK)))
                assert OK.startswith(begin), begin
                await reader.readexactly(shot.leaves_after - len(begin))
            return None, b""
        line, _, rest = (await reader.read()).partition(b"\r\n")
        return int(line.split()[1]), rest.partition(b"\r\n\r\n")[2]
    finally:
        writer.transport.abort()


def said(body: bytes) -> str:
    """The text of an answer, streamed or whole."""
    if not body.startswith(b"{"):
        plain = body if body.startswith(b"data: ") else _unchunked(body)
        events = [part.partition(b"data: ")[2] for part in plain.split(b"\n\n") if part]
        assert events.pop() == b"[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)
    text: str = json.loads(body)["choices"][0]["text"]
    return text


def _unchunked(body: bytes) -> bytes:
    """A body that came in chunks, without their lengths."""
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        found, body = found + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return found


def mixed(alone: Opened, count: int) -> list[Shot]:
    """Requests in a mixed order: wrong ones, leaving ones, and good ones for the rest of `count`."""
    wrong, leaving = WRONG * (count // 100 or 1), LEAVING * (count // 50 or 1)
    right = good(alone, max(count - len(wrong) - len(leaving), 20))
    others = [*wrong, *leaving]
    return sorted([*right, *others], key=lambda shot: zlib.crc32(shot.body))


def judge(shots: list[Shot], found: list[tuple[int | None, bytes]]) -> None:
    assert [status for status, _ in found] == [shot.status for shot in shots]
    for shot, (status, body) in zip(shots, found, strict=True):
        if shot.text is not None:
            assert said(body) == shot.text, shot
        elif status is not None and shot.route != "/api":
            assert json.loads(body)["error"]["message"], shot
