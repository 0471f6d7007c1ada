"""What comes of a running batch in the forms of OpenAI's routes."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.inference.sampling import Likelihood
from megatron_lite.inference.slots import Scored
from megatron_lite.inference.text import Detokenize


@dataclass(frozen=True)
class Piece:
    """Of one choice: text that is certain now, and the tokens that came (of which some text may still be held back)."""

    choice: int
    text: str
    tokens: tuple[tuple[int, Likelihood | None], ...] = ()
    end: str | None = None


@dataclass
class Choice:
    """All pieces of one."""

    text: str = ""
    tokens: list[tuple[int, Likelihood | None]] = field(default_factory=list)
    end: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.end = piece.end or self.end


def of_prompt(prompt: Sequence[int], scored: Scored | None, top: int) -> list[tuple[int, Likelihood | None]]:
    """Its tokens with their log-probabilities; the first has none."""
    if scored is None:
        return [(token, None) for token in prompt]
    found: list[tuple[int, Likelihood | None]] = [(prompt[0], None)]
    for place, token in enumerate(prompt[1:]):
        pairs = zip(scored.top_ids[place, :top].tolist(), scored.top_log_probs[place, :top].tolist(), strict=True)
        found.append((token, Likelihood(float(scored.log_probs[place]), tuple(pairs))))
    return found


@dataclass(frozen=True)
class Form:
    """Of one of the two routes, for one request."""

    chat: bool
    model: str
    detokenize: Detokenize
    log_probs: bool
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice], prompt_tokens: int, generated: int) -> dict[str, Any]:
        made = []
        for number, choice in enumerate(choices):
            said: dict[str, Any] = (
                {"message": {"role": "assistant", "content": choice.text}} if self.chat else {"text": choice.text}
            )
            made.append(self._choice(number, said, choice.tokens, choice.end, 0))
        return self._envelope(made, streamed=False) | {"usage": usage(prompt_tokens, generated)}

    def part(self, piece: Piece, offset: int, *, first: bool) -> dict[str, Any]:
        """offset: characters of the choice before it. first: of its choice."""
        said: dict[str, Any] = {"text": piece.text}
        if self.chat:
            role = {"role": "assistant"} if first else {}
            said = {"delta": role | ({"content": piece.text} if piece.text or first else {})}
        return self._envelope([self._choice(piece.choice, said, piece.tokens, piece.end, offset)], streamed=True)

    def last(self, prompt_tokens: int, generated: int) -> dict[str, Any]:
        return self._envelope([], streamed=True) | {"usage": usage(prompt_tokens, generated)}

    def _envelope(self, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.chat else "text_completion"
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
        said: dict[str, Any],
        tokens: Sequence[tuple[int, Likelihood | None]],
        end: str | None,
        offset: int,
    ) -> dict[str, Any]:
        found = None
        if self.log_probs:
            found = self._of_chat(tokens) if self.chat else self._of_completion(tokens, offset)
        return {"index": number, **said, "logprobs": found, "finish_reason": end}

    def _of_completion(self, tokens: Sequence[tuple[int, Likelihood | None]], offset: int) -> dict[str, Any]:
        words, offsets = [self.detokenize([token]) for token, _ in tokens], []
        for word in words:
            offsets.append(offset)
            offset += len(word)
        top = [
            None
            if known is None
            else {self.detokenize([token]): value for token, value in known.top} | {word: known.log_prob}
            for word, (_, known) in zip(words, tokens, strict=True)
        ]
        values = [None if known is None else known.log_prob for _, known in tokens]
        return {"tokens": words, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def _of_chat(self, tokens: Sequence[tuple[int, Likelihood | None]]) -> dict[str, Any]:
        content = [
            self._token(token, known.log_prob) | {"top_logprobs": [self._token(*pair) for pair in known.top]}
            for token, known in tokens
            if known is not None
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, value: float) -> dict[str, Any]:
        text = self.detokenize([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


def usage(prompt_tokens: int, generated: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": generated, "total_tokens": prompt_tokens + generated}
