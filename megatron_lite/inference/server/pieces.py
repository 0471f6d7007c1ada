"""Pieces of answers, as they come from the model, and the choices that they add up to."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.inference.sampling import Likelihood

Token = tuple[int, Likelihood | None]
"""A token with its log-probability, if that is wanted."""
Tokens = tuple[Token, ...]


@dataclass(frozen=True)
class Piece:
    """New text and tokens of one choice. The text of some tokens may still be held back."""

    choice: int
    text: str
    tokens: Tokens = ()
    end: str | None = None
    calls: tuple[dict[str, Any], ...] = ()
    """Calls of tools."""
    reasoning: str = ""
    """New text of the model's thinking, if it is separated from the answer."""
    accepted: int = 0
    """Number of the tokens that drafts guessed."""
    rejected: int = 0
    """Number of wrong drafts."""
    stop_word: str = ""
    """The request's word that ended the choice, if one did."""
    only_marks: bool = False
    """True if all tokens since the last text are marks and headers. None of their text is shown later."""
    echoed: bool = False
    """True for the prompt, which a client asked to repeat."""


@dataclass
class Choice:
    """All pieces of one choice."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    end: str | None = None
    calls: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""
    accepted: int = 0
    rejected: int = 0
    echoed: int = 0
    """Number of the tokens that are the prompt's."""

    @property
    def generated(self) -> int:
        """Number of tokens that the model generated."""
        return len(self.tokens) - self.echoed

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.tokens += piece.tokens
        self.calls += piece.calls
        self.accepted += piece.accepted
        self.rejected += piece.rejected
        self.echoed += len(piece.tokens) if piece.echoed else 0
        self.end = piece.end or self.end


Pieces = AsyncGenerator[Piece, None]
"""The pieces of all choices of an answer."""
