"""RACE: directories of *.txt. Each line is a JSON object: an article, questions, four options each, and answers A to D.

    {"article": "...", "questions": ["...", ...], "options": [["...", "...", "...", "..."], ...], "answers": ["B", ...]}

A choice is the question with the option in place of its `_`, or after the question.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.tasks.examples import Example, Read, Task, clean, read_lines

CHOICES = 4
LONGEST_CHOICE = 128
"""Tokens of a question with an option."""
_BLANK = "_"
LETTERS = ("A", "B", "C", "D")
_LISTS = ("questions", "options", "answers")


def read_race(directory: str) -> Read:
    """Read the files, sorted by name; Megatron uses the order of the file system."""
    found, names = Read(), sorted(map(str, Path(directory).glob("*.txt")))
    if not names:
        raise UsageError(
            f"{directory}: holds no *.txt; RACE comes as directories of them: RACE/train/middle RACE/train/high"
        )
    for name in names:
        for where, line in read_lines(name):
            found.examples += _examples(where, line)
    return found


def _examples(where: str, line: str) -> list[Example]:
    document = _document(where, line)
    article = clean(document["article"])
    lists = [document[name] for name in _LISTS]
    found = []
    for number, (question, options, answer) in enumerate(zip(*lists, strict=True), 1):
        here = f"{where}: question {number}"
        is_letter = answer in LETTERS
        _require(here, isinstance(question, str), "should be a text", question)
        _require(here, _are_options(options), f"should have {CHOICES} options", options)
        _require(here, is_letter, "should have an answer from A to D", answer)
        choices = tuple(_choice(question, option) for option in options)
        label = LETTERS.index(answer)
        found.append(Example(choices, article, label))
    return found


def _are_options(options: object) -> bool:
    return (
        isinstance(options, list)
        and len(options) == CHOICES
        and all(isinstance(option, str) for option in options)
    )


def _document(where: str, line: str) -> Mapping[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where}: is not JSON: {error}") from error
    _require(where, isinstance(document, dict), "should be a JSON object", document)
    _require(
        where,
        isinstance(document.get("article"), str),
        "should have a text `article`",
        document.get("article"),
    )
    for name in _LISTS:
        _require(
            where,
            isinstance(document.get(name), list),
            f"should have a list of {name}",
            document.get(name),
        )
    counts = {name: len(document[name]) for name in _LISTS}
    _require(
        where,
        len(set(counts.values())) == 1,
        "should have as many questions as options and answers",
        counts,
    )
    return document  # type: ignore[no-any-return]


def _require(where: str, holds: bool, expected: str, found: object) -> None:
    if not holds:
        raise CorruptCheckpoint(f"{where}: {expected}, found {found!r:.60}")


def _choice(question: str, option: str) -> str:
    return clean(question.replace(_BLANK, option) if _BLANK in question else f"{question} {option}")


RACE = Task(
    "RACE", read_race, {"head.choices": True}, (), rows=CHOICES, longest_first=LONGEST_CHOICE
)
