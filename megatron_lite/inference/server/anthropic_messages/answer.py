"""Answers of /v1/messages: a list of blocks, and a stream of events that make it."""

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.inference.server.answer_parts import (
    AnswerParts,
    Begun,
    Change,
    Grown,
    Kind,
    Part,
)
from megatron_lite.inference.server.anthropic_messages.errors import error_json
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.event_stream import EventStream
from megatron_lite.inference.server.pieces import Pieces

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Reason for a chat's end -> reason here."""


@dataclass
class MessageForm:
    """The format of the answer to one request."""

    model: str
    prompt_tokens: int
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    last_line = ""

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """Return the whole answer."""
        answer = AnswerParts()
        async for piece in pieces:
            for _ in answer.add(piece):
                pass
        content = [_block(part) for part in answer.parts]
        return self._message(content, answer) | _end(answer)

    async def events(self, pieces: Pieces) -> EventStream:
        """Yield the events of a stream."""
        answer, begun = AnswerParts(), False
        async for piece in pieces:
            if not begun:
                yield {"type": "message_start", "message": self._message([], answer)}
                begun = True
            for change in answer.add(piece):
                for event in _events_of(change):
                    yield event
        counted = self._usage(answer)
        yield {"type": "message_delta", "delta": _end(answer), "usage": counted}
        yield {"type": "message_stop"}

    def failure(self, refused: Refused) -> dict[str, Any]:
        """Return the event of an error."""
        return error_json(refused)

    def _message(self, content: list[dict[str, Any]], answer: AnswerParts) -> dict[str, Any]:
        return {
            "id": f"msg_{self.identity}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(answer),
        }

    def _usage(self, answer: AnswerParts) -> dict[str, Any]:
        return {"input_tokens": self.prompt_tokens, "output_tokens": answer.token_count}


def _end(answer: AnswerParts) -> dict[str, Any]:
    reason = _REASONS[answer.end or "stop"]
    word = answer.stop_word or None
    if word is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": word}


def _events_of(change: Change) -> Iterator[dict[str, Any]]:
    number = change.part.number
    if isinstance(change, Begun):
        block = _block(change.part)
        yield {"type": "content_block_start", "index": number, "content_block": block}
    elif isinstance(change, Grown):
        yield _delta(number, change.part.kind, change.text)
    else:
        if change.part.kind is Kind.THINKING:
            signature = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": number, "delta": signature}
        yield {"type": "content_block_stop", "index": number}


def _delta(number: int, kind: Kind, text: str) -> dict[str, Any]:
    delta = {"type": "text_delta", "text": text}
    if kind is Kind.THINKING:
        delta = {"type": "thinking_delta", "thinking": text}
    elif kind is Kind.CALL:
        delta = {"type": "input_json_delta", "partial_json": json.dumps(_input(text))}
    return {"type": "content_block_delta", "index": number, "delta": delta}


def _block(part: Part) -> dict[str, Any]:
    if part.kind is Kind.TEXT:
        return {"type": "text", "text": part.text}
    if (
        part.kind is Kind.THINKING
    ):  # nothing is signed: the server can't tell whose thinking it gets
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "tool_use", "id": part.call, "name": part.tool, "input": _input(part.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Text that is no object, as GPT-OSS may write it, is its only field.

    The same holds for an object that can't be sent: with NaN, or with half of a surrogate pair.
    """
    try:
        found = json.loads(arguments or "{}")
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
