"""Answers in JSON: llguidance says at each token which tokens may come next, for any JSON or for that of a schema."""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from megaconv.errors import UsageError
from megatron_lite.data.packages import package
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, RustTokenizer, Tokenizer

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of every JSON object."""
_WHITESPACE = "[ \\n]{0,20}"
"""Whitespace between JSON's parts. Without the limit a model could write nothing else until its tokens end."""


@dataclass(frozen=True)
class Grammar:
    """The form of an answer."""

    _tokens: Any
    """llguidance's description of the tokenizer."""
    _rules: str
    _ends: tuple[int, ...]

    def start(self) -> "Matcher":
        """Return the state before the first token of an answer."""
        return Matcher(_llguidance().LLMatcher(self._tokens, self._rules), self._ends)


class Matcher:
    """The state of one answer."""

    def __init__(self, inner: Any, ends: tuple[int, ...]) -> None:
        """inner: llguidance's matcher. ends: tokens that may follow a complete answer."""
        self._inner, self._ends = inner, ends

    def allowed(self, vocab: int) -> Tensor:
        """Return bool [vocab]: True for tokens that may come next. At the end of an answer these are the stop tokens."""
        known = bytearray(self._inner.compute_logit_bias())[:vocab]
        mask = torch.frombuffer(known, dtype=torch.uint8).bool()
        if not bool(mask.any()):
            # llguidance has reached one of its limits. The answer ends here.
            mask[list(self._ends)] = True
        return torch.nn.functional.pad(mask, (0, vocab - len(mask)))

    def take(self, token: int) -> None:
        """Append an allowed token."""
        self._inner.consume_token(token)

    @property
    def ended(self) -> bool:
        """True if nothing may follow."""
        return bool(self._inner.is_stopped())


def json_grammar(
    schema: Mapping[str, Any], tokenizer: Tokenizer, vocab: int, stop_ids: frozenset[int]
) -> Grammar:
    """Return the grammar of all JSON texts that a JSON schema allows.

    vocab: number of the model's logits. stop_ids: tokens that may follow a complete answer.
    Raises UsageError for a schema with a part that llguidance doesn't know, and for a tokenizer that it can't read.
    """
    overrides = {"whitespace_pattern": _WHITESPACE}

    def rules(matcher: Any) -> str:
        made: str = matcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)
        return made

    return _grammar(rules, tokenizer, vocab, stop_ids)


def harmony_grammar(
    answers: Sequence[tuple[str, Mapping[str, Any]]],
    tokenizer: Tokenizer,
    vocab: int,
    stop_ids: frozenset[int],
) -> Grammar:
    """Return the grammar of an answer in harmony: thinking, if the model wants it, then one message of JSON.

    answers: (header, JSON schema) of each message that the answer may be. A header is a rule of llguidance's Lark, such as
    `<|channel|> "final"`. Raises UsageError as json_grammar.
    """
    lines = [
        "start: thinking? answer",
        r'thinking: <|channel|> "analysis" <|message|> /(.|\n)*/ <|end|> <|start|> "assistant"',
        "answer: " + " | ".join(f"message{number}" for number in range(len(answers))),
    ]
    for number, (header, schema) in enumerate(answers):
        formed = json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}})
        lines.append(f"message{number}: {header} <|message|> json{number}")
        lines.append(f"json{number}: %json {formed}")
    text = "\n".join(lines)
    return _grammar(
        lambda matcher: str(matcher.grammar_from_lark(text)), tokenizer, vocab, stop_ids
    )


def _grammar(
    rules_of: Callable[[Any], str], tokenizer: Tokenizer, vocab: int, stop_ids: frozenset[int]
) -> Grammar:
    """Return a grammar. rules_of: makes its rules by llguidance's matcher."""
    matcher = _llguidance().LLMatcher
    ends = tuple(sorted(token for token in stop_ids if token < vocab))
    if not ends:
        raise UsageError("an answer's form can't be given: the model has no token that ends a text")
    tokens = _described(cast("Hashable", tokenizer), vocab, ends)
    try:
        rules = rules_of(matcher)
        first = matcher(tokens, rules)
    except ValueError as error:
        raise UsageError(f"the schema can't be read: {error}") from error
    if first.is_error():
        raise UsageError(f"the schema can't be used: {first.get_error()}")
    first.compute_logit_bias()
    if first.is_error():  # no token may come first
        raise UsageError("the schema can't be used: no JSON fits it; look for a $ref to itself")
    return Grammar(tokens, rules, ends)


@lru_cache(maxsize=1)
def _described(tokenizer: Hashable, vocab: int, ends: tuple[int, ...]) -> Any:
    """Return llguidance's description of a tokenizer. It takes about a second for a large vocabulary."""
    inner = None
    if isinstance(tokenizer, HuggingFaceTokenizer):
        inner = getattr(tokenizer.inner, "backend_tokenizer", None)
    elif isinstance(tokenizer, RustTokenizer):
        inner = tokenizer.inner
    if inner is None:
        raise UsageError(
            f"an answer's form can't be given with a {type(tokenizer).__name__}: "
            "it needs a tokenizer with a tokenizer.json"
        )
    text = _without_padding(inner)
    size = max(vocab, inner.get_vocab_size())
    return _llguidance().LLTokenizer(text, n_vocab=size, eos_token=list(ends))


def _llguidance() -> Any:
    return package("llguidance", "an answer whose form is given", "serve")


def _without_padding(inner: Any) -> str:
    """Return a tokenizer as JSON. Padding and truncation would change the tokens of short and long texts."""
    found = json.loads(inner.to_str())
    return json.dumps(found | {"padding": None, "truncation": None})
