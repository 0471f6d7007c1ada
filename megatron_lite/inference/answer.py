"""Makes an answer of its tokens: text, and in some formats thinking and calls of tools (harmony.py)."""

from typing import NamedTuple, Protocol

from megatron_lite.inference.text import TextStream


class Said(NamedTuple):
    """The text and the thinking that a token adds to an answer."""

    text: str = ""
    thinking: str = ""
    only_marks: bool = False
    """True if all tokens since the last text are marks and headers. None of their text is shown later."""

    def __add__(self, other: object) -> "Said":
        """Return both texts and both thoughts, in this order."""
        assert isinstance(other, Said)
        only_marks = self.only_marks and not (other.text or other.thinking)
        return Said(self.text + other.text, self.thinking + other.thinking, only_marks)


class Call(NamedTuple):
    """A call of a tool. The arguments are the model's text, which should be JSON."""

    name: str
    arguments: str
    identity: str = ""
    """Its id; empty if it has none yet."""


class Answer(Protocol):
    """The state of one answer."""

    calls: list[Call]
    """The complete calls of tools."""

    @property
    def stop_word(self) -> str:
        """The stop word that ended the answer, behind which no text follows; "" without one."""
        ...

    def add(self, token: int) -> Said:
        """Add a token that does not end the answer, and return what has become final."""
        ...

    def finish(self, *, complete: bool) -> Said:
        """End the answer and return what was held back. complete: True if the model ended it."""
        ...


class PlainAnswer:
    """An answer whose tokens are all text."""

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self.calls: list[Call] = []

    @property
    def stop_word(self) -> str:
        return self._text.stop_word

    def add(self, token: int) -> Said:
        return Said(self._text.add(token))

    def finish(self, *, complete: bool) -> Said:
        return Said(self._text.finish())
