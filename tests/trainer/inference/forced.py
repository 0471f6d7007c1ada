"""A server that answers with given texts, in place of a model's."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.inference.batching import Step
from megatron_lite.inference.gallery import TEXT_ALONE
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import PLAIN, Likelihood
from megatron_lite.inference.server.worker import Ticket


class ForcedWorker:
    """Answers each request with the tokens of a given text, up to its longest answer."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, texts: Sequence[str]) -> None:
        self._rows = [tokenizer.tokenize(text) for text in texts]
        self.cancelled: list[int] = []

    def submit(self, requests: Sequence[Request]) -> Ticket:
        ticket = Ticket(asyncio.Queue(), asyncio.get_running_loop())
        for which, (request, row) in enumerate(zip(requests, self._rows, strict=True)):
            for place, token in enumerate(row[: request.max_tokens]):
                is_last = place == request.max_tokens - 1
                end = "stop" if token in request.stop_ids else "length" if is_last else None
                known = None if request.log_probs is None else Likelihood(-1.0)
                ticket.steps.put_nowait((which, Step(which, token, known, end)))
        return ticket

    def cancel_one(self, ticket: Ticket, which: int) -> None:
        self.cancelled.append(which)

    def cancel(self, ticket: Ticket) -> None:
        pass


def byte_tokenizer(directory: Path, special: Sequence[str], template: str) -> HuggingFaceTokenizer:
    """A tokenizer of bytes with special tokens, the first of which ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {word: number for number, word in enumerate([*special, *letters])}
    inner = Tokenizer(models.BPE(ids, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=special[0], additional_special_tokens=list(special[1:])
    )
    made.chat_template = template
    made.save_pretrained(directory)
    return HuggingFaceTokenizer(str(directory))


def answered(
    tokenizer: HuggingFaceTokenizer, texts: Sequence[str], fields: Mapping[str, Any], **options: Any
) -> list[dict[str, Any]]:
    """The JSON objects of the answer to a chat whose choices have these texts. options: those of the server."""
    body = {"messages": [{"role": "user", "content": "Rain?"}], **fields}
    return answered_at("/v1/chat/completions", tokenizer, texts, body, **options)


def answered_at(
    route: str,
    tokenizer: HuggingFaceTokenizer,
    texts: Sequence[str],
    body: Mapping[str, Any],
    **options: Any,
) -> list[dict[str, Any]]:
    """The JSON objects of a route's answer whose choices have these texts."""
    from megatron_lite.inference.server.app import Limits, Server

    worker: Any = ForcedWorker(tokenizer, texts)
    opened: Any = SimpleNamespace(
        tokenizer=tokenizer, stop_ids=frozenset([0]), adapters=(), harmony=None, sampling=PLAIN, images=TEXT_ALONE,
        model=SimpleNamespace(length=4096), config=SimpleNamespace(vocab=tokenizer.vocab_size),
    )  # fmt: skip
    app = Server(opened, worker, "tiny", Limits(1 << 20, 60.0), **options).app()
    scope = {
        "type": "http",
        "method": "POST",
        "path": route,
        "raw_path": route.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    answer = b""
    given = False

    async def receive() -> Any:
        nonlocal given
        if given:
            await asyncio.sleep(60)
        given = True
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        nonlocal answer
        answer += message.get("body", b"")

    asyncio.run(app(scope, receive, send))
    lines = [line.removeprefix("data: ") for line in answer.decode().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]
