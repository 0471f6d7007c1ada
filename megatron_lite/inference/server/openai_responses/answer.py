"""Answers of /v1/responses: a list of items, and a stream of events that make it."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
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
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.event_stream import EventStream
from megatron_lite.inference.server.log_probs import in_response
from megatron_lite.inference.server.pieces import Pieces, Token
from megatron_lite.inference.text import Detokenize

_PREFIXES = {Kind.THINKING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
_TEXTS = {Kind.THINKING: "response.reasoning_text", Kind.TEXT: "response.output_text"}
"""Beginnings of the names of events of a text."""
_ARGUMENTS = "response.function_call_arguments"


@dataclass
class ResponseForm:
    """The format of the answer to one request."""

    model: str
    detokenize: Detokenize
    log_probs: bool
    prompt_tokens: int
    echoed: Mapping[str, Any]
    """Fields of the request that the answer repeats."""
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    last_line = ""
    _sent: int = 0
    """Number of events so far."""

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """Return the whole answer."""
        answer = AnswerParts()
        async for piece in pieces:
            for _ in answer.add(piece):
                pass
        return self._response(answer)

    async def events(self, pieces: Pieces) -> EventStream:
        """Yield the events of a stream."""
        answer = AnswerParts()
        async for piece in pieces:
            if not self._sent:
                yield self._event("response.created", response=self._response(answer))
                yield self._event("response.in_progress", response=self._response(answer))
            for change in answer.add(piece):
                for event in self._events_of(change):
                    yield event
        response = self._response(answer)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, refused: Refused) -> dict[str, Any]:
        """Return the event of an error."""
        return self._event(
            "error", code=refused.code or refused.kind, message=refused.message, param=refused.field
        )

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._sent
        self._sent += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _events_of(self, change: Change) -> Iterator[dict[str, Any]]:
        place = {"item_id": self._id(change.part), "output_index": change.part.number}
        if isinstance(change, Begun):
            yield from self._begin(change.part, place)
        elif isinstance(change, Grown):
            yield self._grow(change, place)
        else:
            status = "completed" if change.complete else "incomplete"
            yield from self._end(change.part, place, status)

    def _begin(self, part: Part, place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        item = self._item(part, "in_progress")
        if part.kind is not Kind.CALL:
            item["content"] = []  # its only part follows in an event of its own
        yield self._event("response.output_item.added", item=item, output_index=part.number)
        if part.kind is not Kind.CALL:
            content = self._content(part)
            yield self._event("response.content_part.added", **place, content_index=0, part=content)

    def _grow(self, change: Grown, place: Mapping[str, Any]) -> dict[str, Any]:
        if change.part.kind is Kind.CALL:
            return self._event(f"{_ARGUMENTS}.delta", **place, delta=change.text)
        name, likely = f"{_TEXTS[change.part.kind]}.delta", self._likely(change.part, change.tokens)
        return self._event(name, **place, content_index=0, delta=change.text, **likely)

    def _end(self, part: Part, place: Mapping[str, Any], status: str) -> Iterator[dict[str, Any]]:
        if part.kind is Kind.CALL:
            yield self._event(f"{_ARGUMENTS}.done", **place, name=part.tool, arguments=part.text)
        else:
            name, likely = f"{_TEXTS[part.kind]}.done", self._likely(part, part.tokens)
            yield self._event(name, **place, content_index=0, text=part.text, **likely)
            content = self._content(part)
            yield self._event("response.content_part.done", **place, content_index=0, part=content)
        item = self._item(part, status)
        yield self._event("response.output_item.done", item=item, output_index=part.number)

    def _likely(self, part: Part, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return the field with the log-probabilities of a text's tokens. Thinking has none."""
        if part.kind is not Kind.TEXT:
            return {}
        found = in_response(tokens, self.detokenize) if self.log_probs else []
        return {"logprobs": found}

    def _content(self, part: Part) -> dict[str, Any]:
        if part.kind is Kind.THINKING:
            return {"type": "reasoning_text", "text": part.text}
        likely = self._likely(part, part.tokens)
        return {"type": "output_text", "text": part.text, "annotations": [], **likely}

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(part), "status": status}
        if part.kind is Kind.CALL:
            call = {"call_id": part.call, "name": part.tool, "arguments": part.text}
            return item | {"type": "function_call", **call}
        content = [self._content(part)]
        if part.kind is Kind.THINKING:
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _id(self, part: Part) -> str:
        return f"{_PREFIXES[part.kind]}_{self.identity}{part.number:04x}"

    def _response(self, answer: AnswerParts) -> dict[str, Any]:
        """Return the object of the whole response, as far as its pieces have come."""
        ended, cut = answer.end is not None, answer.end == "length"
        status = "incomplete" if cut else "completed"
        parts = answer.parts if ended else []
        items = [self._item(part, "completed") for part in parts]
        if cut:
            items[-1]["status"] = status
        return {
            "id": f"resp_{self.identity}",
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if ended and not cut else None,
            "status": status if ended else "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.model,
            "output": items,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": self._usage(answer) if ended else None,
            **self.echoed,
        }

    def _usage(self, answer: AnswerParts) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.token_count,
            "output_tokens_details": {"reasoning_tokens": answer.thinking_count},
            "total_tokens": self.prompt_tokens + answer.token_count,
        }
