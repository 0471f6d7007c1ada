"""MNLI and QQP: tab-separated files of sentence pairs with GLUE's columns.

    MNLI   0 the number, 8 and 9 the sentences, the last one the label; ten columns are a test set, without labels
    QQP    0 the number, 3 and 4 the questions, 5 the label; or, in a test set, 0 the number, 1 and 2 the questions

As in Megatron, all examples of a test set get the same label. The first line names the columns.
"""

from collections.abc import Iterator
from typing import NamedTuple

from formats.errors import CorruptCheckpoint
from megatron_lite.data.tasks.examples import Example, Read, Task, clean, read_lines

MNLI_LABELS = ("contradiction", "entailment", "neutral")
QQP_LABELS = ("not_duplicate", "duplicate")
_MNLI_TEXTS, _MNLI_TEST = (8, 9), 10
_QQP_TEXTS, _QQP_COLUMNS, _QQP_LABEL = (3, 4), 6, 5
_QQP_TEST_TEXTS, _QQP_TEST = (1, 2), 3


class _Row(NamedTuple):
    where: str
    columns: list[str]


def _rows(name: str, task: str) -> Iterator[_Row]:
    """Yield the rows. The first row has the columns' names. Raises CorruptCheckpoint."""
    empty = True
    for where, line in read_lines(name):
        empty = False
        yield _Row(where, [column.strip() for column in line.strip().split("\t")])
    if empty:
        raise CorruptCheckpoint(
            f"{name}: is empty; the first line of {task}'s files names the columns"
        )


def read_mnli(name: str) -> Read:
    """Read a file of MNLI. Raises CorruptCheckpoint with file and line."""
    found = Read()
    rows = _rows(name, "MNLI")
    header = next(rows)
    columns = len(header.columns)
    if columns < _MNLI_TEST:
        raise CorruptCheckpoint(
            f"{header.where}: the first line names {columns} columns, separated by tabs; MNLI has 10 or more"
        )
    is_test = columns == _MNLI_TEST
    for row in rows:
        columns = len(row.columns)
        if columns < _MNLI_TEST:
            raise CorruptCheckpoint(f"{row.where}: has {columns} columns, MNLI has 10 or more")
        _require_number(row)
        first, second = (_text(row, column) for column in _MNLI_TEXTS)
        label = MNLI_LABELS[0] if is_test else row.columns[-1]
        if label not in MNLI_LABELS:
            expected = ", ".join(MNLI_LABELS)
            raise CorruptCheckpoint(
                f"{row.where}: the label in the last column is {label!r:.60}; expected {expected}"
            )
        number = MNLI_LABELS.index(label)
        example = Example((first,), second, number)
        found.examples.append(example)
    return found


def read_qqp(name: str) -> Read:
    """Read a file of QQP. Raises CorruptCheckpoint with file and line."""
    found = Read()
    rows = _rows(name, "QQP")
    header = next(rows)
    if len(header.columns) not in (_QQP_TEST, _QQP_COLUMNS):
        raise CorruptCheckpoint(
            f"{header.where}: the first line names {len(header.columns)} columns, separated by tabs; QQP has 6, and 3 in a test set"
        )
    is_test = len(header.columns) == _QQP_TEST
    for row in rows:
        if is_test:
            found.examples.append(_qqp_test(row))
        elif reason := _left_out(row):
            found.left_out.append(f"{row.where}: {reason}")
        else:
            found.examples.append(_qqp(row))
    return found


def _qqp_test(row: _Row) -> Example:
    if len(row.columns) != _QQP_TEST:
        raise CorruptCheckpoint(
            f"{row.where}: has {len(row.columns)} columns, a test set of QQP has 3"
        )
    _require_number(row)
    first, second = (_text(row, column) for column in _QQP_TEST_TEXTS)
    return Example((first,), second, 0)


def _left_out(row: _Row) -> str | None:
    """Return the reason why Megatron leaves a line out, or None. QQP has some broken lines."""
    if len(row.columns) != _QQP_COLUMNS:
        return f"has {len(row.columns)} of {_QQP_COLUMNS} columns"
    return None if all(clean(row.columns[column]) for column in _QQP_TEXTS) else "an empty question"


def _qqp(row: _Row) -> Example:
    _require_number(row)
    first, second = (_text(row, column) for column in _QQP_TEXTS)
    label = row.columns[_QQP_LABEL]
    if label not in ("0", "1"):
        raise CorruptCheckpoint(
            f"{row.where}: the label in column 6 is {label!r:.60}; expected 0 or 1"
        )
    return Example((first,), second, int(label))


def _require_number(row: _Row) -> None:
    if not row.columns[0].isdecimal():
        raise CorruptCheckpoint(
            f"{row.where}: the first column should number the line, found {row.columns[0]!r:.60}"
        )


def _text(row: _Row, column: int) -> str:
    text = clean(row.columns[column])
    if not text:
        raise CorruptCheckpoint(f"{row.where}: the text in column {column + 1} is empty")
    return text


MNLI = Task("MNLI", read_mnli, {"head.classes": len(MNLI_LABELS)}, MNLI_LABELS)
QQP = Task("QQP", read_qqp, {"head.classes": len(QQP_LABELS)}, QQP_LABELS)
