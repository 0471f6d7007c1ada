"""Formats the pieces of an answer for OpenAI's routes of completions and chats."""

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.inference.sampling import Likelihood
from megatron_lite.inference.server.errors import Refused, refused_json
from megatron_lite.inference.server.pieces import Choice, Piece, Pieces
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
        async for piece in pieces:
            before = choices.get(piece.choice)
            yield self.part(piece, before or Choice(), first=before is None)
            choices.setdefault(piece.choice, Choice()).add(piece)
        if self.usage:
            yield self._envelope([], streamed=True) | self._usage(list(choices.values()))

    def failure(self, refused: Refused) -> dict[str, Any]:
        """Return the chunk that ends a stream with an error."""
        return refused_json(refused)

    def answer(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer with these choices."""
        made = []
        for number, choice in enumerate(choices):
            fields: dict[str, Any] = {"text": choice.text}
            if self.chat:
                fields = {"message": _message(choice)}
            made.append(self._choice(number, fields, choice.tokens, choice.end, 0))
        return self._envelope(made, streamed=False) | self._usage(choices)

    def part(self, piece: Piece, before: Choice, *, first: bool) -> dict[str, Any]:
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
            [self._choice(piece.choice, fields, piece.tokens, piece.end, len(before.text))],
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
        tokens: Sequence[tuple[int, Likelihood | None]],
        end: str | None,
        offset: int,
    ) -> dict[str, Any]:
        found = None
        if self.log_probs:
            found = self._of_chat(tokens) if self.chat else self._of_completion(tokens, offset)
        return {"index": number, **fields, "logprobs": found, "finish_reason": end}

    def _of_completion(
        self, tokens: Sequence[tuple[int, Likelihood | None]], offset: int
    ) -> dict[str, Any]:
        words, offsets = [self.detokenize([token]) for token, _ in tokens], []
        for word in words:
            offsets.append(offset)
            offset += len(word)
        top: list[dict[str, float] | None] = []
        for token, known in tokens:
            if known is None:
                top.append(None)
                continue
            names = self._names(token, known)
            values_by_token = dict(known.top) | {token: known.log_prob}
            top.append({names[each]: value for each, value in values_by_token.items()})
        values = [None if known is None else known.log_prob for _, known in tokens]
        return {
            "tokens": words,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _of_chat(self, tokens: Sequence[tuple[int, Likelihood | None]]) -> dict[str, Any]:
        content = []
        for token, known in tokens:
            if known is None:
                continue
            names = self._names(token, known)
            top = [self._token(each, names[each], value) for each, value in known.top]
            content.append(self._token(token, names[token], known.log_prob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _names(self, chosen: int, known: Likelihood) -> dict[int, str]:
        """Return unique names of the chosen token and the likeliest ones.

        A name is the token's text, or `token_id:5` if another token has the same text.
        """
        names: dict[int, str] = {}
        for token in (chosen, *(each for each, _ in known.top)):
            text = self.detokenize([token])
            if token not in names:
                names[token] = f"token_id:{token}" if text in names.values() else text
        return names

    def _token(self, token: int, name: str, value: float) -> dict[str, Any]:
        text = self.detokenize([token])
        # A part of a character has no text. Its bytes are not those of the replacement character.
        known_bytes = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": name, "logprob": value, "bytes": known_bytes}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message[REASONING] = choice.reasoning
    if choice.calls:
        message |= {"content": choice.text or None, "tool_calls": list(choice.calls)}
    return message
