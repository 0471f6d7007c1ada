"""A ticket's steps as pieces of text, until all of its choices have ended, its time is over or its client has gone."""

from collections.abc import AsyncGenerator

from megatron_lite.inference.server.openai_answers import Piece
from megatron_lite.inference.server.openai_requests import Wanted
from megatron_lite.inference.server.responses import Deadline
from megatron_lite.inference.server.worker import Worker
from megatron_lite.inference.text import Detokenize, TextStream


async def pieces(
    worker: Worker, wanted: Wanted, stop_ids: frozenset[int], detokenize: Detokenize, deadline: Deadline
) -> AsyncGenerator[Piece, None]:
    """Of all choices as they come. Raises Overloaded at the start, TimedOut later; frees every slot however it ends."""
    requests = wanted.requests(stop_ids)
    ticket = worker.submit(requests)
    texts = {which: TextStream(detokenize, wanted.stop) for which in range(len(requests))}
    try:
        while texts:
            which, step = await deadline.of(ticket.steps.get())
            text = texts.get(which)
            if text is None:
                continue  # it ended with a stop word a turn ago
            said = "" if step.end == "stop" else text.add(step.token)
            tokens = () if step.end == "stop" else ((step.token, step.likelihood),)
            reason = "stop" if text.stopped else step.end
            if text.stopped:
                worker.cancel_one(ticket, which)
            if reason is not None:
                said += text.finish()
                del texts[which]
            yield Piece(which, said, tokens, reason)
    finally:
        worker.cancel(ticket)
