"""Converts a stream of tokens to text: handles characters that span several tokens, and stop words."""

import sys
from collections.abc import Callable, Sequence

Detokenize = Callable[[Sequence[int]], str]

_UNFINISHED = "�"
"""The character that decoders produce for an incomplete character."""
_NEIGHBOURS = 16
"""Tokens of a prompt on which the text of the next token may depend."""
_PARTS = 4
"""The most tokens of one character: the bytes of UTF-8."""
_MOST_PENDING = 64
"""Tokens without final text that are decoded together. Without a limit, the time grows with the square of their number."""


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
        self._ids = list(after[-_NEIGHBOURS - _PARTS + 1 :])
        self._before = 0
        """Ids from _before on are decoded together, because the text of an id depends on its neighbours.

        The text of ids below _read is returned already.
        """
        self._read = len(self._ids)
        self._begun = False
        """True after the first text. Until then, the ids below _read are those of the prompt."""
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
        if not self._begun:
            self._before = _start_of(self._detokenize, self._ids, spare=self._read - _NEIGHBOURS)
        ids, given = self._ids[self._before :], self._read - self._before
        is_long = len(ids) - given > _MOST_PENDING
        whole = self._detokenize(ids)
        # After so many tokens, it is no character that has only begun, but bytes that are none.
        if not finish and not is_long and whole.endswith(_UNFINISHED):
            return ""
        # Decode with and without the new ids. The difference is the new text.
        if self._begun:
            known = len(self._detokenize(ids[:given]))
        else:
            given, known = _end_of(self._detokenize, ids[:given], ids[given:])
        if not finish and len(whole) <= known:
            if is_long:  # special tokens, which have no text
                del self._ids[self._read : -_PARTS]
            return ""
        self._before, self._read, self._begun = self._before + given, len(self._ids), True
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


def _start_of(detokenize: Detokenize, tokens: Sequence[int], *, spare: int) -> int:
    """Return the first token to decode, after at most `spare` others. It begins a character if one of them does.

    A tokenizer with byte tokens decodes none of them if the first one continues a character.
    """
    starts = range(min(max(spare, 0), _PARTS - 1) + 1)
    return min(starts, key=lambda start: detokenize(tokens[start:]).count(_UNFINISHED))


def _end_of(
    detokenize: Detokenize, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[int, int]:
    """Return the number of the prompt's tokens up to the end of a character, and the length of the prompt's text.

    A character that begins in the prompt and ends in the answer belongs to the answer.
    """
    whole = len(detokenize([*prompt, *answer]))
    for end in range(len(prompt), -1, -1):
        text, rest = detokenize(prompt[:end]), detokenize([*prompt[end:], *answer])
        # Each part of a divided character is decoded to at least one character, which makes the two texts longer.
        if len(text) + len(rest) <= whole:
            break
    # A token may hold the end of one character and the start of the next.
    partial = detokenize(prompt[end:]) if end < len(prompt) else ""
    return end, len(text) + len(partial.rstrip(_UNFINISHED))


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
