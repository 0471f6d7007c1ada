"""Separates a model's thinking from its answer, piece by piece. The size of the pieces doesn't change the result.

Thinking stands at the beginning of an answer, between the marks of a form (thinking_forms.py). Some templates already end
a prompt with the first mark. GPT-OSS marks its thinking by channels (inference/harmony.py).
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum, auto

from megatron_lite.inference.harmony import BETWEEN
from megatron_lite.inference.server.pieces import Piece
from megatron_lite.inference.server.thinking_forms import ThinkingForm
from megatron_lite.inference.text import overlap


class Part(Enum):
    """The part of an answer that its text has reached."""

    START = auto()
    THINKING = auto()
    BEHIND = auto()
    """Behind the thinking: a mark of the answer, or of further thinking, may follow."""
    MARKED = auto()
    """Between the marks of the answer."""
    ANSWER = auto()


@dataclass
class Thinking:
    """The state of one choice."""

    forms: Sequence[ThinkingForm]
    """The forms that the thinking may have; one as soon as it has begun."""
    begun: bool = False
    """True if the prompt ends with the first mark. Some models write it again."""
    part: Part = Part.START
    empty: bool = True
    """True if the present part has no text yet. Line breaks at the beginning of a part are left out."""
    held: str = ""
    """Text that may be the beginning of a mark."""
    thoughts: int = 0
    """Number of parts with thinking that have text."""

    def add(self, text: str, *, last: bool) -> tuple[str, str]:
        """Return (thinking, answer) that the new text adds. last: True if no text follows."""
        thinking = answer = ""
        rest: str | None = self.held + text
        self.held = ""
        while rest is not None:
            if self.part in (Part.START, Part.BEHIND):
                rest = self._open(rest, last=last)
                continue
            is_thinking = self.part is Part.THINKING
            shown, rest = self._until_mark(rest, last=last)
            thinking += shown if is_thinking else ""
            answer += "" if is_thinking else shown
        return thinking, answer

    @property
    def is_between(self) -> bool:
        """True if the text so far ends with a mark, and with line breaks that are left out."""
        if self.part is Part.START:
            return False
        begins = self.part is Part.BEHIND or self.empty
        return begins and not self.held.strip("\n")

    def _open(self, text: str, *, last: bool) -> str | None:
        """Enter the part that begins here, and return its text. None: more text has to say which part it is."""
        start = text.lstrip()
        for mark, part, form in sorted(self._openings(), key=lambda each: -len(each[0])):
            if start.startswith(mark):
                self._enter(part, form)
                return start.removeprefix(mark)
            if mark.startswith(start) and not last:
                self.held = text
                return None
        thinks = self.begun and self.part is Part.START
        # An answer without thinking keeps its line breaks.
        self.empty = thinks or self.part is Part.BEHIND
        self.part = Part.THINKING if thinks else Part.ANSWER
        # A model without a known form has no further thinking.
        self.forms = self.forms if len(self.forms) == 1 else ()
        return text

    def _openings(self) -> Iterator[tuple[str, Part, ThinkingForm]]:
        """Yield (a mark that may be next, the part that it begins, its form)."""
        at_start = self.part is Part.START
        for form in self.forms:
            begins = form.begins if at_start or form.repeats else ()
            yield from ((mark, Part.THINKING, form) for mark in begins)
            # Without thinking, some models begin with the end of it.
            yield from ((mark, Part.BEHIND, form) for mark in form.ends if at_start)
            if form.answer is not None and (form.answer[0] or not at_start):
                yield form.answer[0], Part.MARKED, form

    def _enter(self, part: Part, form: ThinkingForm) -> None:
        self.part, self.forms, self.empty = part, (form,), True

    def _until_mark(self, text: str, *, last: bool) -> tuple[str, str | None]:
        """Return (text of the present part, the text behind its end). None: it has not ended."""
        marks = self._closings()
        places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
        if not places:
            kept = 0 if last else max((overlap(text, mark) for mark in marks), default=0)
            end = len(text) - kept
            self.held = text[end:]
            return self._shown(text[:end]), None
        place, mark = min(places)
        shown, rest = self._shown(text[:place]), text[place:]
        if self.part is Part.MARKED:
            self.part, self.empty = Part.ANSWER, True
            return shown, rest.removeprefix(mark)
        if self.part is Part.THINKING:
            rest = rest.removeprefix(mark)
        self.part = Part.BEHIND
        return shown, rest

    def _closings(self) -> tuple[str, ...]:
        """Return the marks that end the present part."""
        found: list[str] = []
        for form in self.forms:
            if self.part is Part.THINKING:
                found += form.ends
            elif self.part is Part.MARKED:
                found += form.answer_ends
            elif form.repeats:
                found += form.begins
        return tuple(found)

    def _shown(self, text: str) -> str:
        shown = text.lstrip("\n") if self.empty else text
        if not shown or not self.empty:
            return shown
        self.empty = False
        if self.part is not Part.THINKING:
            return shown
        self.thoughts += 1
        return shown if self.thoughts == 1 else BETWEEN + shown


def begun_by(prompt: str, forms: Sequence[ThinkingForm]) -> tuple[ThinkingForm, ...]:
    """Return the form whose first mark a prompt ends with; () if the answer does not begin inside of the thinking.

    prompt: the end of the prompt's text, with special tokens.
    """
    end = prompt.rstrip()
    begun = [form for form in forms for mark in form.begins if end.endswith(mark.rstrip())]
    return tuple(begun[:1])


async def with_reasoning(
    pieces: AsyncGenerator[Piece, None], forms: Sequence[ThinkingForm], prompt: str
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces with thinking and answer apart. prompt: see begun_by."""
    begun = begun_by(prompt, forms)
    choices: dict[int, Thinking] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            if piece.choice not in choices:
                choices[piece.choice] = Thinking(begun or forms, begun=bool(begun))
            state = choices[piece.choice]
            thought, text = state.add(piece.text, last=piece.end is not None)
            is_hidden = bool(piece.text) and not (thought or text)
            only_marks = is_hidden and state.is_between
            yield replace(piece, text=text, reasoning=thought, only_marks=only_marks)


async def without_reasoning(
    pieces: AsyncGenerator[Piece, None],
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces without the thinking, for clients that didn't ask for it."""
    async with aclosing(pieces):
        async for piece in pieces:
            yield replace(piece, reasoning="")
