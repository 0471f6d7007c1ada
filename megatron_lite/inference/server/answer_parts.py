"""The parts of an answer in their order: thinking, texts and calls of tools. Newer routes list and stream an answer by parts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from megatron_lite.inference.server.pieces import Piece, Token, Tokens


class Kind(Enum):
    """The kinds of parts."""

    THINKING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass
class Part:
    """One part of an answer."""

    kind: Kind
    number: int
    """Its place among the parts of the answer."""
    text: str = ""
    """The arguments of a call, as JSON."""
    tokens: list[Token] = field(default_factory=list)
    """The tokens of a text."""
    call: str = ""
    """The id of a call."""
    tool: str = ""
    """The name of the tool that is called."""


@dataclass(frozen=True)
class Begun:
    """A part begins. Its text is still empty."""

    part: Part


@dataclass(frozen=True)
class Grown:
    """The text of a part grows."""

    part: Part
    text: str
    tokens: Tokens


@dataclass(frozen=True)
class Ended:
    """A part has ended."""

    part: Part
    complete: bool
    """False if the limit of tokens cut it off."""


Change = Begun | Grown | Ended


@dataclass
class AnswerParts:
    """The parts of an answer with one choice, as far as its pieces have come."""

    parts: list[Part] = field(default_factory=list)
    end: str | None = None
    """The reason for the answer's end, as in a chat."""
    stop_word: str = ""
    """The request's word that ended the answer, if one did."""
    token_count: int = 0
    thinking_count: int = 0
    """Number of the tokens that are thinking."""
    _is_open: bool = False
    """True if the last part has not ended."""
    _held: list[Token] = field(default_factory=list)
    """Tokens whose text has not come yet."""
    _marks: int = 0
    """Number of the tokens before them that have no text: marks and headers."""

    def add(self, piece: Piece) -> Iterator[Change]:
        """Yield the changes that a piece makes."""
        self.token_count += len(piece.tokens)
        self._held += piece.tokens
        if piece.only_marks:
            self._marks += len(self._held)
            self._held.clear()
        if piece.reasoning:
            self.thinking_count += self._marks + len(self._held)
            self._held.clear()
            yield from self._grow(Kind.THINKING, piece.reasoning)
        if piece.text:
            yield from self._grow(Kind.TEXT, piece.text)
        for call in piece.calls:
            yield from self._call(call)
        if piece.end is not None:
            self.end, self.stop_word = piece.end, piece.stop_word
            yield from self._finish()

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if not self._is_open or self.parts[-1].kind is not kind:
            yield from self._close()
            yield self._begin(Part(kind, len(self.parts)))
        part, tokens = self.parts[-1], tuple(self._held)
        self._held.clear()
        self._marks = 0
        part.text += text
        part.tokens += tokens
        yield Grown(part, text, tokens)

    def _call(self, call: dict[str, Any]) -> Iterator[Change]:
        """Yield the changes of a call, which comes whole."""
        self._held.clear()
        self._marks = 0
        yield from self._close()
        function = call["function"]
        part = Part(Kind.CALL, len(self.parts), call=call["id"], tool=function["name"])
        yield self._begin(part)
        part.text = function["arguments"]
        yield Grown(part, part.text, ())
        yield from self._close()

    def _begin(self, part: Part) -> Begun:
        self.parts.append(part)
        self._is_open = True
        return Begun(part)

    def _close(self, *, complete: bool = True) -> Iterator[Change]:
        if self._is_open:
            self._is_open = False
            yield Ended(self.parts[-1], complete)

    def _finish(self) -> Iterator[Change]:
        if not self.parts:  # an answer without text has one part all the same, which is empty
            yield self._begin(Part(Kind.TEXT, 0))
        yield from self._close(complete=self.end != "length")
