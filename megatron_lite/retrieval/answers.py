"""Searches passages for answers, by ORQA's two rules.

string    NFD, tokens, lower case; the answer's tokens follow each other in the passage
regex     NFD of both; the answer is a pattern that is searched. A pattern that does not compile is not found
"""

import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from megatron_lite.data.packages import package

Matches = Callable[[Sequence[str], str], bool]
"""(answers, text) -> whether one of the answers is in the text"""

_TOKEN = r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]"


def matcher(kind: str) -> Matches:
    """Return the rule `string` or `regex`. Raises UsageError if the package regex is not installed."""
    _regex()
    return {"string": has_string, "regex": has_pattern}[kind]


def has_string(answers: Sequence[str], text: str) -> bool:
    """Return whether the words of an answer follow each other in the text."""
    words = words_of(text)
    return any(_follow(words_of(answer), words) for answer in answers)


def has_pattern(answers: Sequence[str], text: str) -> bool:
    """Return whether a pattern is found in the text."""
    normalized = unicodedata.normalize("NFD", text)
    return any(_found(answer, normalized) for answer in answers)


@lru_cache(maxsize=1 << 14)
def words_of(text: str) -> tuple[str, ...]:
    """Return the tokens of a text in lower case: words, and single other characters."""
    found = _token().findall(unicodedata.normalize("NFD", text))
    return tuple(token.lower() for token in found)


def _follow(part: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether `part` stands somewhere in `words`. Nothing stands everywhere."""
    size = len(part)
    starts = range(len(words) - size + 1)
    return not size or any(words[start : start + size] == part for start in starts)


def _found(answer: str, text: str) -> bool:
    pattern = _pattern(unicodedata.normalize("NFD", answer))
    return pattern is not None and pattern.search(text) is not None


def _regex() -> Any:
    return package("regex", "the search for answers", "retrieval")


def _flags() -> int:
    module = _regex()
    flags: int = module.IGNORECASE | module.UNICODE | module.MULTILINE
    return flags


@lru_cache(maxsize=1)
def _token() -> Any:
    return _regex().compile(_TOKEN, _flags())


@lru_cache(maxsize=1 << 14)
def _pattern(answer: str) -> Any | None:
    """Return the compiled pattern; None if it does not compile."""
    module = _regex()
    try:
        return module.compile(answer, _flags())
    except module.error:
        return None
