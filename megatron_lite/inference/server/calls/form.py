"""A form in which models write calls of tools, as data and one function. Each file of this directory describes one or more."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by name."""


class Named(NamedTuple):
    """A call, as a reader finds it."""

    name: str
    arguments: dict[str, Any]
    identity: str = ""
    """The id that the model gave the call; empty without one."""


def random_id() -> str:
    """Return a new id of a call, for models that read any id."""
    return f"call_{uuid.uuid4().hex}"


@dataclass(frozen=True)
class CallForm:
    """The way in which a model writes calls."""

    name: str
    """The value of --tool-calls."""
    read: Callable[[str, Schemas], list[Named]]
    """Returns the calls between two marks. Raises ValueError, or returns [], for another text."""
    marks: tuple[tuple[str, str], ...] = ()
    """(begin, end) of a part with calls. An empty end: the part lasts to the next begin, or to the end of the answer."""
    signs: tuple[str, ...] = ()
    """Texts that a chat template of this form has, all of them."""
    inner: tuple[str, ...] = ()
    """Further marks that `read` needs. Tokenizers may have them as special tokens, which text doesn't show otherwise."""
    alone: bool = False
    """True if an answer without marks can be a call: if it is one from its first to its last character."""
    quoted: bool = False
    """True if the part has JSON strings, in which a mark does not count."""
    must_end: bool = False
    """True if a call without its end mark is none, because the beginning of a call is a call too."""
    new_id: Callable[[], str] = random_id
    """Returns an id for a call that has none."""

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All marks."""
        outer = [mark for pair in self.marks for mark in pair if mark]
        return (*outer, *self.inner)
