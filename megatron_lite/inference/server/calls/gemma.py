"""Calls of tools as FunctionGemma and Gemma 4 write them: an object without quotes, whose texts stand between marks.

<start_function_call>call:weather{city:<escape>Köln<escape>,days:3}<end_function_call>
<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_lite.inference.server.calls.form import CallForm, Named, Schemas
from megatron_lite.inference.server.calls.json_values import value_of

T = TypeVar("T")
_CALL = re.compile(r"\s*call:([^\s{}]+)\s*(?={)")
_SPACE = re.compile(r"\s*")
_BARE = re.compile(r"[^,:{}\[\]]*")
_DEEPEST = 100


class _Reader:
    """Reads a value from its first character on. Its methods raise ValueError for another text."""

    def __init__(self, text: str, place: int, mark: str) -> None:
        self.text, self.place, self.mark = text, place, mark

    def value(self, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise ValueError("the arguments are nested too deeply")
        if self._take("{"):
            return dict(self._several("}", lambda: self._pair(depth + 1)))
        if self._take("["):
            return self._several("]", lambda: self.value(depth + 1))
        text, is_marked = self._word()
        return text if is_marked else value_of(text)

    def take_space(self) -> None:
        found = _SPACE.match(self.text, self.place)
        assert found is not None, "the pattern fits the empty text"
        self.place = found.end()

    def _pair(self, depth: int) -> tuple[str, Any]:
        key, _ = self._word()
        self._require(":")
        return key, self.value(depth)

    def _word(self) -> tuple[str, bool]:
        """Return (a text, whether it stands between marks)."""
        if self._take(self.mark):
            begin, end = self.place, self.text.find(self.mark, self.place)
            if end < 0:
                raise ValueError("a text has no end")
            self.place = end + len(self.mark)
            return self.text[begin:end], True
        found = _BARE.match(self.text, self.place)
        assert found is not None, "the pattern fits the empty text"
        self.place = found.end()
        if not found[0].strip():
            raise ValueError("a value is empty")
        return found[0].strip(), False

    def _several(self, end: str, read: Callable[[], T]) -> list[T]:
        found: list[T] = []
        while not self._take(end):
            if found:
                self._require(",")
            found.append(read())
        return found

    def _take(self, mark: str) -> bool:
        """Pass a mark if it is next."""
        self.take_space()
        is_next = self.text.startswith(mark, self.place)
        self.place += len(mark) if is_next else 0
        return is_next

    def _require(self, mark: str) -> None:
        if not self._take(mark):
            raise ValueError(f"{mark} is missing")


def _form(name: str, marks: tuple[str, str], text_mark: str) -> CallForm:
    def read(text: str, schemas: Schemas) -> list[Named]:
        head = _CALL.match(text)
        if head is None:
            return []
        reader = _Reader(text, head.end(), text_mark)
        arguments = reader.value()
        reader.take_space()
        if reader.place < len(text):
            raise ValueError("text follows the arguments")
        return [Named(head[1], arguments)]

    return CallForm(name, read, (marks,), signs=marks[:1], inner=(text_mark,))


FUNCTION_GEMMA = _form(
    "function-gemma", ("<start_function_call>", "<end_function_call>"), "<escape>"
)
GEMMA_4 = _form("gemma-4", ("<|tool_call>", "<tool_call|>"), '<|"|>')
