"""A worker of the server that answers with given texts, in place of a model."""

import asyncio
from collections.abc import Sequence

from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.inference.batching import Step
from megatron_lite.inference.requests import Request
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
                ticket.steps.put_nowait((which, Step(which, token, None, end)))
        return ticket

    def cancel_one(self, ticket: Ticket, which: int) -> None:
        self.cancelled.append(which)

    def cancel(self, ticket: Ticket) -> None:
        pass
