"""Separates a model's thinking from its answer, as `<think> ... </think>` at its beginning marks it.

Qwen 3, DeepSeek R1 and many others write these marks. Some templates already end a prompt with the first one. GPT-OSS
marks its thinking by channels (inference/harmony.py).
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum, auto

from megatron_lite.inference.server.openai_answers import Piece

BEGIN, END = "<think>", "</think>"


class Part(Enum):
    """The part of an answer that its text has reached."""

    START = auto()
    THINKING = auto()
    ANSWER = auto()


@dataclass
class Thinking:
    """The state of one choice."""

    part: Part
    empty: bool = True
    """True if the present part has no text yet. Line breaks at the beginning of a part are left out."""
    held: str = ""
    """Text that may be the beginning of a mark."""

    def add(self, text: str, *, last: bool) -> tuple[str, str]:
        """Return (thinking, answer) that the new text adds. last: True if no text follows."""
        text, self.held = self.held + text, ""
        thought = ""
        if self.part is Part.START:
            text = self._begin(text, last=last)
        if self.part is Part.THINKING:
            thought, text = self._think(text, last=last)
        return thought, self._shown(text) if self.part is Part.ANSWER else ""

    def _begin(self, text: str, *, last: bool) -> str:
        """Return the text behind the first mark; all of it if it has none."""
        start = text.lstrip()
        if start.startswith(BEGIN):
            self.part = Part.THINKING
            return start.removeprefix(BEGIN)
        if BEGIN.startswith(start) and not last:
            self.held = text
            return ""
        # An answer without thinking keeps its line breaks.
        self.part, self.empty = Part.ANSWER, False
        return text

    def _think(self, text: str, *, last: bool) -> tuple[str, str]:
        """Return (thinking, text behind the second mark)."""
        thought, mark, rest = text.partition(END)
        if not mark and not last:
            kept = len(thought) - _start_of_mark(thought)
            thought, self.held = thought[:kept], thought[kept:]
        thought = self._shown(thought)
        if mark:
            self.part, self.empty = Part.ANSWER, True
        return thought, rest

    def _shown(self, text: str) -> str:
        shown = text.lstrip("\n") if self.empty else text
        self.empty = self.empty and not shown
        return shown


def _start_of_mark(text: str) -> int:
    """Return the number of characters at the end of a text that may begin the second mark."""
    return next((count for count in range(len(END) - 1, 0, -1) if text.endswith(END[:count])), 0)


async def with_reasoning(
    pieces: AsyncGenerator[Piece, None], *, begun: bool
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces with thinking and answer apart. begun: True if the prompt ends with the first mark."""
    first = Part.THINKING if begun else Part.START
    choices: dict[int, Thinking] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            choice = choices.setdefault(piece.choice, Thinking(first))
            thought, text = choice.add(piece.text, last=piece.end is not None)
            yield replace(piece, text=text, reasoning=thought)


async def without_reasoning(
    pieces: AsyncGenerator[Piece, None],
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces without the thinking, for clients that didn't ask for it."""
    async with aclosing(pieces):
        async for piece in pieces:
            yield replace(piece, reasoning="")
