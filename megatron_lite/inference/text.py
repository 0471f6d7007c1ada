"""Tokens that come one by one as text: characters of several tokens, and words at which to stop."""

import sys
from collections.abc import Callable, Sequence

Detokenize = Callable[[Sequence[int]], str]

_UNFINISHED = "�"
"""What decoders make of bytes that don't end a character yet."""


def say(text: str) -> None:
    """Print a part of an answer at once. A model may write anything: on a terminal what would steer it is shown instead."""
    if sys.stdout.isatty():
        text = "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    print(text, end="", flush=True)


class TextStream:
    """The text of one row as far as it is certain; what may become a stop word, or half a character, is held back."""

    def __init__(self, detokenize: Detokenize, stop: Sequence[str] = ()) -> None:
        self._detokenize, self._stop = detokenize, tuple(word for word in stop if word)
        self._ids: list[int] = []
        self._before = self._read = 0
        """Ids from _before on are decoded together, since what one becomes depends on its neighbours; those below _read have been given."""
        self._held = ""
        self.stopped = False
        """Whether a stop word came; nothing follows then."""

    def add(self, token: int) -> str:
        """What is certain now and wasn't before."""
        self._ids.append(token)
        return self._check(self._decode(finish=False), finish=False)

    def finish(self) -> str:
        """What was held back, at the end of the row."""
        return self._check(self._decode(finish=True), finish=True)

    def _decode(self, *, finish: bool) -> str:
        given = self._detokenize(self._ids[self._before : self._read])
        whole = self._detokenize(self._ids[self._before :])
        if not finish and (len(whole) <= len(given) or whole.endswith(_UNFINISHED)):
            return ""
        self._before, self._read = self._read, len(self._ids)
        return whole[len(given) :]

    def _check(self, text: str, *, finish: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        places = [place for place in (text.find(word) for word in self._stop) if place >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        keep = 0 if finish else max((_overlap(text, word) for word in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, word: str) -> int:
    """The longest end of the text with which the word begins."""
    return next((size for size in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:size])), 0)
