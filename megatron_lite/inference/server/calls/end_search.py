"""Searches the end mark of a call in text that comes in pieces. Every character is looked at once, but for a mark's length."""

import re
from dataclasses import dataclass

_QUOTE = re.compile(r'\\.|"', re.DOTALL)


@dataclass
class EndSearch:
    """The state of one search."""

    mark: str
    quoted: bool
    """True if the text has JSON strings, in which a mark does not count."""
    place: int | None = None
    """The place of the mark in the text; None: there is none yet."""
    _rest: str = ""
    """The end of the text, which may have the beginning of a mark."""
    _before: int = 0
    """Number of characters before the rest."""
    _inside: bool = False
    """True if the rest begins inside of a JSON string."""

    def add(self, text: str, start: int = 0) -> None:
        """Search on in the text from `start` on."""
        if self.place is not None:
            return
        if self._rest:
            text, start = self._rest + text[start:], 0
        first = start
        while (place := text.find(self.mark, start)) >= 0:
            self._count_quotes(text, start, place)
            if not self._inside:
                self.place = self._before + place - first
                return
            start = place + len(self.mark)
        end = self._end_of_searched(text, start)
        self._count_quotes(text, start, end)
        self._rest = text[end:]
        self._before += end - first

    def _end_of_searched(self, text: str, start: int) -> int:
        """Return the place before which no mark can begin, and where no pair of a backslash and a character is cut."""
        end = max(len(text) - len(self.mark) + 1, start)
        if not self.quoted:
            return end
        searched = text[start:end]
        escapes = len(searched) - len(searched.rstrip("\\"))
        return end - escapes % 2

    def _count_quotes(self, text: str, start: int, end: int) -> None:
        if self.quoted:
            self._inside ^= _QUOTE.findall(text, start, end).count('"') % 2 == 1
