"""Formats the pieces of an answer for OpenAI's routes of completions and chats."""

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.inference.server.errors import Refused, refused_json
from megatron_lite.inference.server.log_probs import Offsets, in_chat, in_completion
from megatron_lite.inference.server.pieces import Choice, Piece, Pieces, Token
from megatron_lite.inference.text import Detokenize

REASONING = "reasoning_content"
"""The field of a message with the model's thinking. Chat templates read it from messages of the assistant."""


@dataclass(frozen=True)
class Form:
    """The format of one of the two routes, for one request."""

    chat: bool
    model: str
    detokenize: Detokenize
    log_probs: bool
    drafts: bool = False
    """True if the usage has the numbers of drafts."""
    prompt_tokens: int = 0
    usage: bool = False
    """True if a stream ends with the numbers of tokens."""
    continued: Sequence[Sequence[int]] = ()
    """For each choice of a completion, the tokens that its text continues."""
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    last_line = "data: [DONE]\n\n"

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """Return the whole answer."""
        choices: defaultdict[int, Choice] = defaultdict(Choice)
        async for piece in pieces:
            choices[piece.choice].add(piece)
        return self.answer([choices[number] for number in sorted(choices)])

    async def events(self, pieces: Pieces) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a stream."""
        choices: dict[int, Choice] = {}
        offsets = self._offsets()
        async for piece in pieces:
            before = choices.get(piece.choice)
            yield self.part(piece, before or Choice(), offsets, first=before is None)
            choices.setdefault(piece.choice, Choice()).add(piece)
        if self.usage:
            yield self._envelope([], streamed=True) | self._usage(list(choices.values()))

    def failure(self, refused: Refused) -> dict[str, Any]:
        """Return the chunk that ends a stream with an error."""
        return refused_json(refused)

    def answer(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer with these choices."""
        made = []
        offsets = self._offsets()
        for number, choice in enumerate(choices):
            fields: dict[str, Any] = {"text": choice.text}
            if self.chat:
                fields = {"message": _message(choice)}
            made.append(self._choice(number, fields, choice.tokens, choice.end, offsets))
        return self._envelope(made, streamed=False) | self._usage(choices)

    def _offsets(self) -> list[Offsets]:
        """Return the offsets of all choices of a completion."""
        return [Offsets(self.detokenize, before) for before in self.continued]

    def part(
        self, piece: Piece, before: Choice, offsets: Sequence[Offsets], *, first: bool
    ) -> dict[str, Any]:
        """Return a chunk of a stream.

        before: the choice up to this chunk. first: whether it is the choice's first chunk.
        """
        fields: dict[str, Any] = {"text": piece.text}
        if self.chat:
            role = {"role": "assistant"} if first else {}
            content = {"content": piece.text} if piece.text or first else {}
            thought = {REASONING: piece.reasoning} if piece.reasoning else {}
            numbered = enumerate(piece.calls, len(before.calls))
            calls = [{"index": number, **call} for number, call in numbered]
            called = {"tool_calls": calls} if calls else {}
            fields = {"delta": role | thought | content | called}
        return self._envelope(
            [self._choice(piece.choice, fields, piece.tokens, piece.end, offsets)],
            streamed=True,
        )

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return OpenAI's object for the numbers of tokens."""
        generated = sum(choice.generated for choice in choices)
        found: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
        }
        if self.drafts:
            found["completion_tokens_details"] = {
                "accepted_prediction_tokens": sum(choice.accepted for choice in choices),
                "rejected_prediction_tokens": sum(choice.rejected for choice in choices),
            }
        return {"usage": found}

    def _envelope(self, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.identity}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(
        self,
        number: int,
        fields: dict[str, Any],
        tokens: Sequence[Token],
        end: str | None,
        offsets: Sequence[Offsets],
    ) -> dict[str, Any]:
        found: dict[str, Any] | None = None
        if self.log_probs and self.chat:
            found = {"content": in_chat(tokens, self.detokenize), "refusal": None}
        elif self.log_probs:
            found = in_completion(tokens, self.detokenize, offsets[number])
        return {"index": number, **fields, "logprobs": found, "finish_reason": end}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message[REASONING] = choice.reasoning
    if choice.calls:
        message |= {"content": choice.text or None, "tool_calls": list(choice.calls)}
    return message
