"""Separates the calls of tools from the text of an answer, piece by piece. The size of the pieces doesn't change the result.

Text is passed on as soon as it can't be the beginning of a mark. The part behind a begin mark is held until its end. If
it has no call of an offered tool, it is text. White space around calls is left out, unless text follows them.

The work is proportional to the length of the answer: a held part is searched piece by piece (end_search.py), and read
when an end is found.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron_lite.inference.answer import Call
from megatron_lite.inference.server.calls.end_search import EndSearch
from megatron_lite.inference.server.calls.form import CallForm, Schemas
from megatron_lite.inference.server.calls.json_values import written
from megatron_lite.inference.text import overlap

_MOST_WITHOUT_CALL = 32
"""Begin marks without a call after which the rest of an answer is text. Each one may read the whole answer."""
_OPENING = "{["
"""First characters of an answer that may be a call without marks."""


class Found(NamedTuple):
    """The text and the calls that a piece adds."""

    text: str
    calls: list[Call]


class _Read(NamedTuple):
    """The calls of a part, and the place behind them in the text."""

    calls: list[Call]
    end: int


@dataclass
class _Ending:
    """A form that an open part may have, and the search for its end."""

    form: CallForm
    end: str
    search: EndSearch
    failed: bool = False
    """True if the text up to the end is no call of this form."""


@dataclass
class _OpenPart:
    """The text behind a begin mark, whose end is searched."""

    endings: list[_Ending]
    start: int = 0
    """The place behind the begin mark."""

    def add(self, text: str, start: int = 0) -> bool:
        """Search on, in the text from `start` on. Returns whether another end was found."""
        missing = [ending for ending in self.endings if ending.search.place is None]
        for ending in missing:
            ending.search.add(text, start)
        return any(ending.search.place is not None for ending in missing)


@dataclass
class CallStream:
    """The state of one answer."""

    forms: Sequence[CallForm]
    schemas: Schemas
    """The schemas of all offered tools."""
    _held: list[str] = field(default_factory=list)
    """Text that may be a call, in pieces."""
    _open: _OpenPart | None = None
    """The part at the beginning of the held text, if it has one."""
    _first: str = ""
    """The first character of the answer that is no white space."""
    _space: list[str] = field(default_factory=list)
    """White space behind the text that was passed on, in pieces."""
    _spoken: bool = False
    """True if text was passed on."""
    _called: bool = False
    """True if there was a call."""
    ends_with_call: bool = False
    """True if only white space follows the last call between marks."""
    _without_call: int = 0
    """Number of begin marks without a call."""

    def add(self, text: str) -> Found:
        """Add a piece, and return what has become final."""
        self._held.append(text)
        if self._open is not None:
            return self._take(last=False) if self._open.add(text) else Found("", [])
        self._first = self._first or text.lstrip()[:1]
        # An empty text, after white space only, is in every text.
        if self._first in _OPENING and not self.has_content and self._alone:
            return Found("", [])
        return self._take(last=False)

    def finish(self) -> Found:
        """End the answer, and return what was held."""
        if not self.has_content:
            whole = "".join(self._held)
            for form in self._alone:
                if calls := self._read(form, whole):
                    return Found("", calls)
        text, calls = self._take(last=True)
        return Found(text if self._called else text + "".join(self._space), calls)

    @property
    def has_content(self) -> bool:
        """True if there was text other than white space, or a call."""
        return self._spoken or self._called

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
        text, said = "".join(self._held), ""
        calls: list[Call] = []
        taken = 0
        while begin := self._next_begin(text, taken):
            said += self._shown(text[taken : begin.start()])
            part, self._open = self._open or self._opened(begin, text), None
            read = self._read_part(part, text, last=last)
            if read is None:
                self._open, self._held = part, [text[begin.start() :]]
                part.start = len(begin[0])
                return Found(said, calls)
            taken = read.end
            calls += read.calls
            if read.calls:
                self._called = self.ends_with_call = True
            else:
                self._without_call += 1
                said += self._shown(begin[0])
        kept = 0 if last else max(overlap(text[taken:], begin) for begin in self._begins)
        end = len(text) - kept
        said += self._shown(text[taken:end])
        self._held = [text[end:]]
        return Found(said, calls)

    def _next_begin(self, text: str, place: int) -> re.Match[str] | None:
        """Return the next begin mark of a text; None also if too many marks began no call."""
        if self._without_call >= _MOST_WITHOUT_CALL:
            return None
        return self._begin.search(text, place)

    def _opened(self, begin: re.Match[str], text: str) -> _OpenPart:
        """Return the part behind a begin mark."""
        endings = [
            _Ending(form, end, EndSearch(end or own, form.quoted))
            for form in self.forms
            for own, end in form.marks
            if own == begin[0]
        ]
        part = _OpenPart(endings, begin.end())
        part.add(text, begin.end())
        return part

    def _read_part(self, part: _OpenPart, text: str, *, last: bool) -> _Read | None:
        """Return the calls of a part; none if it is text. None: its end is still missing."""
        is_open = False
        for ending in part.endings:
            form, place = ending.form, ending.search.place
            if place is None and not last:
                is_open = True
                continue
            if ending.failed or (place is None and form.must_end):
                continue
            end = len(text) if place is None else part.start + place
            if calls := self._read(form, text[part.start : end]):
                return _Read(calls, end if place is None else end + len(ending.end))
            ending.failed = True
        return None if is_open else _Read([], part.start)

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
        visible = text.rstrip()
        if not visible:
            self._space.append(text)
            return ""
        shown = "".join(self._space) + visible
        if self._called and not self._spoken:
            shown = shown.lstrip()
        self._space = [text[len(visible) :]]
        self._spoken, self.ends_with_call = True, False
        return shown
