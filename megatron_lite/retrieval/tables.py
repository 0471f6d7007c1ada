"""Tables separated by tabs, with csv's quotation marks: DPR's passages and questions."""

import csv
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from formats.errors import CorruptCheckpoint

_FIELD = 1 << 24
"""The most characters of a field."""


def rows_of(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (`FILE: line N`, the columns) of each row. path: for messages.

    Raises CorruptCheckpoint for a field that is too long, as behind a quotation mark without its end.
    """
    csv.field_size_limit(min(_FIELD, sys.maxsize))
    reader = csv.reader(lines, delimiter="\t")
    try:
        for row in reader:
            yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        raise CorruptCheckpoint(
            f"{path}:{reader.line_num}: {error}; look for a quotation mark without its end"
        ) from error
