"""Converts a ticket's steps to pieces of text until all choices have ended, the time is over, or the client disconnects."""

from collections.abc import AsyncGenerator, Sequence

from megatron_lite.inference.batching import Request
from megatron_lite.inference.beams import Beam
from megatron_lite.inference.server.errors import NoAnswer
from megatron_lite.inference.server.openai_answers import Piece
from megatron_lite.inference.server.openai_requests import Wanted
from megatron_lite.inference.server.responses import Deadline
from megatron_lite.inference.server.worker import Worker
from megatron_lite.inference.text import Detokenize, TextStream


async def pieces(
    worker: Worker,
    wanted: Wanted,
    stop_ids: frozenset[int],
    detokenize: Detokenize,
    deadline: Deadline,
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of all choices as they come. It always frees every slot at the end.

    Raises Overloaded at the start, TimedOut and NoAnswer later.
    """
    requests = wanted.requests(stop_ids)
    ticket = worker.submit(requests)
    texts = {
        which: TextStream(detokenize, wanted.stop, request.prompt if wanted.continues else ())
        for which, request in enumerate(requests)
    }
    try:
        while texts:
            which, step = await deadline.of(ticket.steps.get())
            if step.end == "error":
                raise NoAnswer
            text = texts.get(which)
            if text is None:
                continue  # it ended with a stop word in an earlier turn
            is_stop = step.token in stop_ids
            new_text = "" if is_stop else text.add(step.token)
            tokens = () if is_stop else ((step.token, step.likelihood),)
            reason = "stop" if text.stopped else step.end
            if text.stopped:
                worker.cancel_one(ticket, which)
            if reason is not None:
                new_text += text.finish()
                del texts[which]
            yield Piece(which, new_text, tokens, reason)
    finally:
        worker.cancel(ticket)


async def beams(worker: Worker, request: Request, deadline: Deadline) -> Sequence[Beam]:
    """Return the result of a beam search. Raises Overloaded, TimedOut, NoAnswer. It always frees its slots at the end."""
    ticket = worker.submit([request])
    try:
        _, step = await deadline.of(ticket.steps.get())
        if step.end == "error":
            raise NoAnswer
        return step.beams
    finally:
        worker.cancel(ticket)
