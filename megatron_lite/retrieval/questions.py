"""Files of questions and answers.

nq-dev.qa.csv      question TAB ['answer', 'answer']      Python lists, or JSON lists
questions.jsonl    {"question": ..., "answers": [...]}     also one JSON array; `answer` for a single answer
"""

import ast
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from formats.ceilings import SIDECAR_BYTES
from formats.errors import CorruptCheckpoint
from formats.regular_files import check_size
from formats.wording import counted
from megatron_lite.retrieval.tables import rows_of


class Question(NamedTuple):
    """A question and the answers that are right."""

    text: str
    answers: tuple[str, ...]


def read_questions(path: Path) -> list[Question]:
    """Read a file of questions. Raises CorruptCheckpoint with the line."""
    if not path.is_file():
        raise CorruptCheckpoint(f"{path}: no such file; --qa-data names questions and answers")
    check_size(path, SIDECAR_BYTES)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{path}: is not text in UTF-8: {error}") from error
    is_json = text.lstrip()[:1] in ("{", "[")
    found = list(_from_json(path, text) if is_json else _from_csv(path, text))
    if not found:
        raise CorruptCheckpoint(f"{path}: has no questions")
    return found


def _from_csv(path: Path, text: str) -> Iterator[Question]:
    # A text may have other line ends within, such as U+2028.
    for where, row in rows_of(path, io.StringIO(text)):
        if len(row) != 2:
            raise CorruptCheckpoint(
                f"{where}: has {counted(len(row), 'column')}; a question, a tab and a list of answers were expected"
            )
        yield _question(where, row[0], _list(where, row[1]))


def _list(where: str, text: str) -> Any:
    """Return a Python or JSON list. Nothing is evaluated but literals."""
    for read in (ast.literal_eval, json.loads):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    raise CorruptCheckpoint(f"{where}: the answers are not a list: {text[:60]!r}")


def _from_json(path: Path, text: str) -> Iterator[Question]:
    try:
        is_array = text.lstrip().startswith("[")
        lines = [line for line in text.split("\n") if line.strip()]
        rows = json.loads(text) if is_array else [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: is not JSON: {error}") from error
    for number, row in enumerate(rows, 1):
        where = f"{path}: row {number}"
        if not isinstance(row, dict):
            raise CorruptCheckpoint(f"{where}: is not an object with a question and answers")
        answers = row.get("answers", row.get("answer"))
        yield _question(where, row.get("question"), answers)


def _question(where: str, text: Any, answers: Any) -> Question:
    listed = [answers] if isinstance(answers, str) else answers
    are_texts = isinstance(listed, list | tuple) and all(isinstance(one, str) for one in listed)
    if not isinstance(text, str) or not are_texts:
        raise CorruptCheckpoint(
            f"{where}: a question and a list of answers, all texts, were expected"
        )
    return Question(text, tuple(listed))
