"""Examples of a task as its files contain them. Texts are cleaned as in Megatron-LM's tasks."""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from formats.errors import CorruptCheckpoint
from megatron_lite.data.text_files import read_whole

_SPACE = re.compile(r"\s+")
_ROUNDS = 3
"""Megatron's number of rounds: `. . . . .` keeps some of its spaces."""


class Example(NamedTuple):
    """One example of a task."""

    firsts: tuple[str, ...]
    """One text for a classification task; one text for each choice of a multiple-choice task."""
    second: str
    """The text that follows each first text."""
    label: int
    """The class, or the number of the right choice."""


@dataclass
class Read:
    """The content of a task's files."""

    examples: list[Example] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Lines that Megatron leaves out too, with the reason: `train.tsv:7: 5 columns`."""


@dataclass(frozen=True)
class Task:
    """The properties of one task."""

    name: str
    read: Callable[[str], Read]
    """Reads one file or directory. Raises CorruptCheckpoint with file and line, UsageError."""
    head: Mapping[str, Any]
    """Fields of the trained model's config."""
    labels: Sequence[str]
    """Names of the classes by number; empty for multiple choice."""
    rows: int = 1
    """Sequences of an example."""
    longest_first: int | None = None
    """Largest number of tokens of a first text; None: unlimited."""


def clean(text: str) -> str:
    """Return the text on one line, with single spaces, and without a space before a sentence's dot."""
    text = _SPACE.sub(" ", text)
    for _ in range(_ROUNDS):
        text = text.replace(" . ", ". ")
    return text


def read_lines(name: str) -> Iterator[tuple[str, str]]:
    """Yield (`file:number`, line with its end) of a text file, which may be compressed. Raises CorruptCheckpoint."""
    lines = io.TextIOWrapper(io.BytesIO(read_whole(name)), encoding="utf-8")
    number = 0
    try:
        for number, line in enumerate(lines, 1):  # the error below concerns the line after this one
            yield f"{name}:{number}", line
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(
            f"{name}: is not text in UTF-8, from about line {number + 1} on"
        ) from error
