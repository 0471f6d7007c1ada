"""Examples of a task, as its files hold them; texts are cleaned as Megatron-LM's tasks clean them."""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from formats.errors import CorruptCheckpoint
from megatron_lite.data.text_files import read_whole

_SPACE = re.compile(r"\s+")
_ROUNDS = 3
"""Megatron's: `. . . . .` keeps some of its spaces."""


class Example(NamedTuple):
    firsts: tuple[str, ...]
    """Of a task of classes one text, of a multiple choice one for each choice."""
    second: str
    """That each of them is shown with."""
    label: int
    """The class, or the number of the right choice."""


@dataclass
class Read:
    """What was found in a task's files."""

    examples: list[Example] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Lines that Megatron leaves out too, and why: `train.tsv:7: 5 columns`."""


@dataclass(frozen=True)
class Task:
    """What distinguishes one task from another."""

    name: str
    read: Callable[[str], Read]
    """Of one file or directory. Raises CorruptCheckpoint naming file and line, UsageError."""
    head: Mapping[str, Any]
    """Fields of the model that is trained."""
    labels: Sequence[str]
    """Names of classes by their number; empty for a multiple choice."""
    rows: int = 1
    """Sequences of an example."""
    longest_first: int | None = None
    """Tokens of a first text at most; None: any number."""


def clean(text: str) -> str:
    """In one line, with single spaces, and a sentence's dot at its last word."""
    text = _SPACE.sub(" ", text)
    for _ in range(_ROUNDS):
        text = text.replace(" . ", ". ")
    return text


def read_lines(name: str) -> Iterator[tuple[str, str]]:
    """(`file:number`, line with its end) of a file of text, which may be compressed. Raises CorruptCheckpoint."""
    lines = io.TextIOWrapper(io.BytesIO(read_whole(name)), encoding="utf-8")
    number = 0
    try:
        for number, line in enumerate(lines, 1):  # the error below is about the line after it
            yield f"{name}:{number}", line
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{name}: is not text in UTF-8, from about line {number + 1} on") from error
