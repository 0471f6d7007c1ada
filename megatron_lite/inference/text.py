"""Converts a stream of tokens to text: handles characters that span several tokens, and stop words."""

import sys
from collections.abc import Callable, Sequence
from itertools import product

Detokenize = Callable[[Sequence[int]], str]

_UNFINISHED = "�"
"""The character that decoders produce for an incomplete character."""
_NEIGHBOURS = 16
"""Tokens of a prompt on which the text of the next token may depend."""
_PARTS = 4
"""The most tokens of one character: the bytes of UTF-8."""


def say(text: str) -> None:
    """Print a part of an answer at once. On a terminal, control characters of the model's text are escaped."""
    if sys.stdout.isatty():
        text = "".join(
            c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode()
            for c in text
        )
    print(text, end="", flush=True)


def continuation(detokenize: Detokenize, before: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of tokens that continue others."""
    stream = TextStream(detokenize, after=before)
    return "".join(map(stream.add, tokens)) + stream.finish()


class TextStream:
    """The text of one row as far as it is final. Text that may become a stop word, and partial characters, are held back."""

    def __init__(
        self, detokenize: Detokenize, stop: Sequence[str] = (), after: Sequence[int] = ()
    ) -> None:
        """after: the tokens that the text continues. A tokenizer such as Llama 2's omits the first word's space otherwise."""
        self._detokenize, self._stop = detokenize, tuple(word for word in stop if word)
        self._ids, self._read = _end_of(detokenize, after)
        self._before = 0
        """Ids from _before on are decoded together, because the text of an id depends on its neighbours.

        The text of ids below _read is returned already.
        """
        self._prompt = detokenize(self._ids) if self._read < len(self._ids) else ""
        """A prompt that ends with a partial character; "" if it doesn't, and after the first text."""
        self._held = ""
        self.stop_word = ""
        """The stop word that ended the text; "" without one."""

    @property
    def stopped(self) -> bool:
        """True after a stop word. No text follows."""
        return bool(self.stop_word)

    def add(self, token: int) -> str:
        """Add a token and return the text that has become final."""
        self._ids.append(token)
        return self._check(self._decode(finish=False), finish=False)

    def finish(self) -> str:
        """End the row and return the text that was held back."""
        return self._check(self._decode(finish=True), finish=True)

    def _decode(self, *, finish: bool) -> str:
        # Decode with and without the new ids. The difference is the new text.
        given = self._detokenize(self._ids[self._before : self._read])
        whole = self._detokenize(self._ids[self._before :])
        # A partial character of the prompt that the answer doesn't complete belongs to the prompt.
        known = max(len(given), len(self._prompt) if whole.startswith(self._prompt) else 0)
        if not finish and (len(whole) <= known or whole.endswith(_UNFINISHED)):
            return ""
        self._before, self._read, self._prompt = self._read, len(self._ids), ""
        return whole[known:]

    def _check(self, text: str, *, finish: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        places = {word: place for word in self._stop if (place := text.find(word)) >= 0}
        if places:
            self.stop_word = min(places, key=lambda word: places[word])
            self._held = ""
            return text[: places[self.stop_word]]
        kept = 0
        if not finish:
            kept = max((overlap(text, word) for word in self._stop), default=0)
        end = len(text) - kept
        self._held = text[end:]
        return text[:end]


def _end_of(detokenize: Detokenize, tokens: Sequence[int]) -> tuple[list[int], int]:
    """Return the last tokens, from the start of a character on, and the number of them before a partial character.

    A tokenizer with byte tokens decodes none of them if the first or the last character is partial.
    """
    for partial, more in product(range(_PARTS), repeat=2):
        last = list(tokens[-_NEIGHBOURS - more :])
        whole = last[: max(len(last) - partial, 0)]
        text = detokenize(whole)
        if not text.startswith(_UNFINISHED) and not text.endswith(_UNFINISHED):
            return last, len(whole)
    last = list(tokens[-_NEIGHBOURS:])
    return last, len(last)


def overlap(text: str, word: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the word."""
    return next(
        (
            size
            for size in range(min(len(word) - 1, len(text)), 0, -1)
            if text.endswith(word[:size])
        ),
        0,
    )
