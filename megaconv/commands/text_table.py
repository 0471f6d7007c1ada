"""Tables of text for a terminal, with columns of fixed width."""

from collections.abc import Sequence
from typing import NamedTuple


class Column(NamedTuple):
    """A column of a table."""

    heading: str
    width: int
    is_left: bool = False
    """True if texts begin at the left edge of the column. Numbers end at the right edge."""
    gap: int = 1
    """Spaces before the column. The first column has none."""


def heading_line(columns: Sequence[Column]) -> str:
    """Return the headings of a table in one line."""
    return table_line(columns, [column.heading for column in columns])


def table_line(columns: Sequence[Column], texts: Sequence[str]) -> str:
    """Return one line of a table. texts: one for each column."""
    line = ""
    for column, text in zip(columns, texts, strict=True):
        if line:
            line += " " * column.gap
        line += text.ljust(column.width) if column.is_left else text.rjust(column.width)
    return line
