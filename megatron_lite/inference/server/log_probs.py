"""Log-probabilities of an answer's tokens, in OpenAI's two formats."""

from collections.abc import Sequence
from typing import Any

from megatron_lite.inference.sampling import Likelihood
from megatron_lite.inference.server.pieces import Token
from megatron_lite.inference.text import Detokenize, TextStream


class Offsets:
    """The places of tokens in a text that comes in pieces. The text of a token alone may be another one than within a text."""

    def __init__(self, detokenize: Detokenize, before: Sequence[int]) -> None:
        """before: the tokens that the text continues."""
        self._text = TextStream(detokenize, after=before)
        self._end = 0

    def of(self, tokens: Sequence[Token]) -> list[int]:
        """Return where the next tokens begin. All parts of a character begin where it begins."""
        found = []
        for token, _ in tokens:
            found.append(self._end)
            self._end += len(self._text.add(token))
        return found


def in_completion(
    tokens: Sequence[Token], detokenize: Detokenize, offsets: Offsets
) -> dict[str, Any]:
    """Return the `logprobs` of a completion's next tokens."""
    top: list[dict[str, float] | None] = []
    for token, known in tokens:
        if known is None:
            top.append(None)
            continue
        names = _names(token, known, detokenize)
        values_by_token = dict(known.top) | {token: known.log_prob}
        top.append({names[each]: value for each, value in values_by_token.items()})
    values = [None if known is None else known.log_prob for _, known in tokens]
    return {
        "tokens": [detokenize([token]) for token, _ in tokens],
        "token_logprobs": values,
        "top_logprobs": top,
        "text_offset": offsets.of(tokens),
    }


def in_response(tokens: Sequence[Token], detokenize: Detokenize) -> list[dict[str, Any]]:
    """Return the log-probabilities of a text of /v1/responses, whose bytes are always a list."""
    content = in_chat(tokens, detokenize)
    for chosen in content:
        for each in (chosen, *chosen["top_logprobs"]):
            each["bytes"] = each["bytes"] or []
    return content


def in_chat(tokens: Sequence[Token], detokenize: Detokenize) -> list[dict[str, Any]]:
    """Return the log-probabilities of a chat, an object for each token that has one."""
    content = []
    for token, known in tokens:
        if known is None:
            continue
        names = _names(token, known, detokenize)
        top = [_token(names[each], value, detokenize([each])) for each, value in known.top]
        chosen = _token(names[token], known.log_prob, detokenize([token]))
        content.append(chosen | {"top_logprobs": top})
    return content


def _names(chosen: int, known: Likelihood, detokenize: Detokenize) -> dict[int, str]:
    """Return unique names of the chosen token and the likeliest ones.

    A name is the token's text, or `token_id:5` if another token has the same text.
    """
    names: dict[int, str] = {}
    for token in (chosen, *(each for each, _ in known.top)):
        text = detokenize([token])
        if token not in names:
            names[token] = f"token_id:{token}" if text in names.values() else text
    return names


def _token(name: str, value: float, text: str) -> dict[str, Any]:
    # A part of a character has no text. Its bytes are not those of the replacement character.
    known_bytes = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": name, "logprob": value, "bytes": known_bytes}
