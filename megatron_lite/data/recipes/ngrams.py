"""Finds the n-grams of evaluation tasks in documents, by the rules of Megatron-LM's tools/openwebtext/filter_ngrams.py.

A word is a match of `\\w+` in the lower-cased text. An n-gram is its words, joined by single spaces.

| words of a task's text | n-grams |
|---|---|
| fewer than `shortest` | none |
| fewer than `longest` | the whole text |
| more | every `longest` consecutive words |
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

_WORD, _NO_WORD = re.compile(r"\w+"), re.compile(r"\W")
_PIECE_CHARACTERS = 1 << 14


@dataclass(frozen=True)
class NgramSizes:
    """The numbers of words of an n-gram; the fields are flags of the command."""

    shortest: int = 8
    longest: int = 13


class Hit(NamedTuple):
    """An n-gram that was found in a text."""

    start: int
    """Position of its first character in the text."""
    ngram: str

    @property
    def end(self) -> int:
        """The end as Megatron computes it: the n-gram has single spaces, the text may have more between its words."""
        return self.start + len(self.ngram)


def ngrams_of(texts: Iterable[str], sizes: NgramSizes) -> set[str]:
    """Return the n-grams of a task's texts."""
    found: set[str] = set()
    for text in texts:
        words = _WORD.findall(_lowered(text))
        if len(words) < sizes.shortest:
            continue
        last_start = max(0, len(words) - sizes.longest)
        for start in range(last_start + 1):
            found.add(" ".join(words[start : start + sizes.longest]))
    return found


class Finder:
    """Finds the first n-gram of a set in a text."""

    def __init__(self, ngrams: set[str], longest: int) -> None:
        self._ngrams = ngrams
        self._longest = longest
        sizes = {ngram.count(" ") + 1 for ngram in ngrams}
        self._shorter = sorted(sizes - {longest})
        self._first_words = {ngram.partition(" ")[0] for ngram in ngrams}

    def first(self, text: str) -> Hit | None:
        """Return the first n-gram, as Megatron's walk meets it.

        At each position the longest size is tried before the others, which follow from short to long. Positions with
        fewer than `longest` words behind them come last, by size. Megatron never looks there in a text of at most
        `longest` words.
        """
        lowered, words = _lowered(text), list[str]()
        for number, ngram in self._candidates(lowered, words):
            if ngram in self._ngrams:
                return Hit(_start_of(lowered, number), ngram)
        return None

    def _candidates(self, lowered: str, words: list[str]) -> Iterator[tuple[int, str]]:
        """Yield (number of the first word, n-gram). words: receives the words of the text, as far as it is read."""
        sizes = (self._longest, *self._shorter)
        end = 0
        for piece in _pieces(lowered):
            words += _WORD.findall(piece)
            first, end = end, max(0, len(words) - self._longest + 1)
            for number in range(first, end):
                if words[number] in self._first_words:
                    for size in sizes:
                        yield number, " ".join(words[number : number + size])
        if end > 1:
            yield from self._last_candidates(words, end - 1)

    def _last_candidates(self, words: list[str], start: int) -> Iterator[tuple[int, str]]:
        for size in self._shorter:
            for number in range(start, len(words) - size + 1):
                yield number, " ".join(words[number : number + size])


def count(finder: Finder, text: str, counts: Counter[str]) -> bool:
    """Count the n-grams of a text, and return whether there are any.

    The walk goes on behind each hit, so overlapping n-grams aren't counted.
    """
    hit = first = finder.first(text)
    while hit is not None:
        counts[hit.ngram] += 1
        text = text[hit.end + 1 :]
        hit = finder.first(text)
    return first is not None


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces that divide no word.

    The search for the next n-gram begins again behind each hit. So it must not read a long text to its end.
    """
    start = 0
    while start < len(text):
        between = _NO_WORD.search(text, start + _PIECE_CHARACTERS)
        end = between.start() if between else len(text)
        yield text[start:end]
        start = end


def _start_of(text: str, number: int) -> int:
    """Return the position of a word's first character. number: of the word, from 0."""
    return next(islice(_WORD.finditer(text), number, None)).start()


def _lowered(text: str) -> str:
    """Return the text in lower case, with the same length.

    Megatron cuts a text at wrong places if its lower case is longer. Here characters such as `İ` stay as they are.
    """
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    characters = [(letter, letter.lower()) for letter in text]
    return "".join(lower if len(lower) == 1 else letter for letter, lower in characters)
