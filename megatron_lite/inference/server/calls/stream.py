"""Separates the calls of tools from the text of an answer, piece by piece. The size of the pieces doesn't change the result.

Text is passed on as soon as it can't be the beginning of a mark. The part behind a begin mark is held until its end. If
it has no call of an offered tool, it is text. White space around calls is left out, unless text follows them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_lite.inference.answer import Call
from megatron_lite.inference.server.calls.form import CallForm, Schemas
from megatron_lite.inference.server.calls.json_values import written
from megatron_lite.inference.text import overlap

_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_MOST_WITHOUT_CALL = 32
"""Begin marks without a call after which the rest of an answer is text. Each one may read the whole answer."""
_OPENING = "{["
"""First characters of an answer that may be a call without marks."""


class Found(NamedTuple):
    """The text and the calls that a piece adds."""

    text: str
    calls: list[Call]


class _Part(NamedTuple):
    """The text behind a begin mark: its calls, and the place behind them in the held text."""

    calls: list[Call]
    end: int


@dataclass
class CallStream:
    """The state of one answer."""

    forms: Sequence[CallForm]
    schemas: Schemas
    """The schemas of all offered tools."""
    _held: str = ""
    """Text that may be a call."""
    _space: str = ""
    """White space behind the text that was passed on."""
    _spoken: bool = False
    """True if text was passed on."""
    _called: bool = False
    """True if there was a call."""
    _without_call: int = 0
    """Number of begin marks without a call."""

    def add(self, text: str) -> Found:
        """Add a piece, and return what has become final."""
        self._held += text
        # An empty text, after white space only, is in every text.
        may_be_call = self._held.lstrip()[:1] in _OPENING
        if may_be_call and self._is_at_start and self._alone:
            return Found("", [])
        return self._take(last=False)

    def finish(self) -> Found:
        """End the answer, and return what was held."""
        if self._is_at_start:
            for form in self._alone:
                if calls := self._read(form, self._held):
                    return Found("", calls)
        text, calls = self._take(last=True)
        return Found(text if self._called else text + self._space, calls)

    @property
    def _is_at_start(self) -> bool:
        return not self._spoken and not self._called

    @cached_property
    def _alone(self) -> list[CallForm]:
        return [form for form in self.forms if form.alone]

    @cached_property
    def _begins(self) -> list[str]:
        return [begin for form in self.forms for begin, _ in form.marks]

    @cached_property
    def _begin(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._begins)))

    def _take(self, *, last: bool) -> Found:
        """Return what is final of the held text. last: True if no text follows."""
        said = ""
        calls: list[Call] = []
        taken = 0
        while begin := self._next_begin(taken):
            said += self._shown(self._held[taken : begin.start()])
            part = self._part(begin, last=last)
            if part is None:
                self._held = self._held[begin.start() :]
                return Found(said, calls)
            taken = part.end
            calls += part.calls
            if part.calls:
                self._called = True
            else:
                self._without_call += 1
                said += self._shown(begin[0])
        kept = 0 if last else max(overlap(self._held[taken:], begin) for begin in self._begins)
        end = len(self._held) - kept
        said += self._shown(self._held[taken:end])
        self._held = self._held[end:]
        return Found(said, calls)

    def _next_begin(self, place: int) -> re.Match[str] | None:
        """Return the next begin mark of the held text; None also if too many marks began no call."""
        if self._without_call >= _MOST_WITHOUT_CALL:
            return None
        return self._begin.search(self._held, place)

    def _part(self, begin: re.Match[str], *, last: bool) -> _Part | None:
        """Return the part behind a begin mark; without calls if it is text. None: its end is still missing."""
        text, start = self._held, begin.end()
        is_open = False
        for form in self.forms:
            for own, end in form.marks:
                if own != begin[0]:
                    continue
                place = _place(text, end or own, start, quoted=form.quoted)
                if place is None and not last:
                    is_open = True
                    continue
                if place is None and form.must_end:
                    continue
                if calls := self._read(form, text[start:place]):
                    return _Part(calls, len(text) if place is None else place + len(end))
        return None if is_open else _Part([], start)

    def _read(self, form: CallForm, text: str) -> list[Call]:
        """Return the calls of offered tools, without those whose arguments have no form in JSON."""
        try:
            named = form.read(text, self.schemas)
        except (ValueError, RecursionError):
            return []
        found = []
        for name, arguments, identity in named:
            text_of_arguments = written(arguments)
            if name in self.schemas and text_of_arguments is not None:
                found.append(Call(name, text_of_arguments, identity or form.new_id()))
        return found

    def _shown(self, text: str) -> str:
        """Return text that is no call, without the white space at its end, which may be that before a call."""
        text = self._space + text
        if self._called and not self._spoken:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._spoken = self._spoken or bool(shown)
        return shown


def _place(text: str, mark: str, start: int, *, quoted: bool) -> int | None:
    """Return the place of a mark's first occurrence from `start` on. None: there is none.

    quoted: whether the text has JSON strings, in which a mark does not count.
    """
    inside = False
    while (place := text.find(mark, start)) >= 0:
        quotes = _QUOTE.findall(text, start, place) if quoted else []
        inside ^= quotes.count('"') % 2 == 1
        if not inside:
            return place
        start = place + len(mark)
    return None
