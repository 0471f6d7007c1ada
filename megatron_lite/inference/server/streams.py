"""Converts a ticket's steps to pieces of text until all choices have ended, the time is over, or the client disconnects."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from megatron_lite.inference.answer import Answer, PlainAnswer, Said
from megatron_lite.inference.beams import Beam
from megatron_lite.inference.harmony import HarmonyStream
from megatron_lite.inference.requests import Request
from megatron_lite.inference.server.errors import NoAnswer
from megatron_lite.inference.server.openai_requests import Wanted
from megatron_lite.inference.server.pieces import Piece
from megatron_lite.inference.server.responses import Deadline
from megatron_lite.inference.server.worker import Worker
from megatron_lite.inference.text import Detokenize, TextStream


def _answer(wanted: Wanted, request: Request, detokenize: Detokenize) -> Answer:
    if wanted.harmony is None:
        before = request.prompt if wanted.continues else ()
        return PlainAnswer(TextStream(detokenize, wanted.stop, before))
    names = () if wanted.tools is None else wanted.tools.names
    return HarmonyStream(wanted.harmony, detokenize, request.prompt, wanted.stop, names)


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
    answers = {
        which: _answer(wanted, request, detokenize) for which, request in enumerate(requests)
    }
    try:
        while answers:
            which, step = await deadline.of(ticket.steps.get())
            if step.end == "error":
                raise NoAnswer
            answer = answers.get(which)
            if answer is None:
                continue  # it ended with a stop word in an earlier turn
            is_stop = step.token in stop_ids
            said = Said() if is_stop else answer.add(step.token)
            tokens = () if is_stop else ((step.token, step.likelihood),)
            reason = "stop" if answer.stop_word else step.end
            if answer.stop_word:
                worker.cancel_one(ticket, which)
            calls: tuple[dict[str, Any], ...] = ()
            if reason is not None:
                said += answer.finish(complete=step.end == "stop")
                # The text that was held back may hold a stop word too.
                reason = "stop" if answer.stop_word else reason
                if wanted.tools is not None:
                    calls = wanted.tools.openai_calls(answer.calls)
                reason = "tool_calls" if calls else reason
                del answers[which]
            accepted = int(step.drafted and not is_stop)
            yield Piece(
                which, said.text, tokens, reason, calls, said.thinking, accepted, step.rejected,
                stop_word=answer.stop_word, only_marks=said.only_marks,
            )  # fmt: skip
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
