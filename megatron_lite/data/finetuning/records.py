"""Reads files of finetuning data record by record: JSON lines, a JSON array, parquet, plain text; compressed or not."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.input_files import find_inputs, is_plain_text, read_text
from megatron_lite.data.text_files import STDIN, read_batches, read_start, read_whole


class Record(NamedTuple):
    """One record of a file."""

    where: str
    """`answers.jsonl:17`: file, and line, item or row, from 1."""
    content: bytes | Mapping[str, Any] | str
    """A line of JSON, a parsed record, or the whole text of a plain file."""


def find_files(words: Sequence[str], flag: str) -> list[str]:
    """Return the files. Raises UsageError for a missing file, and for standard input, which several processes can't share."""
    if STDIN in words:
        raise UsageError(f"{flag} -: every process reads the examples; put them into a file")
    return find_inputs(words, flag)


def read_records(name: str) -> Iterator[Record]:
    """Yield the records of a file. Raises CorruptCheckpoint with the file's name if it can't be read to its end.

    Raises UsageError for a pipe: the start of a file is read twice, and a pipe would lose it.
    """
    if Path(name).exists() and not Path(name).is_file():
        raise UsageError(f"{name}: can be read once only; put its content into a file")
    if is_plain_text(name):
        yield Record(name, read_text(name))
    elif read_start(name).lstrip().startswith(b"["):
        yield from _array(name)
    else:
        for batch in read_batches([name], None):
            for number, content in enumerate(batch.records, batch.first):
                if content.strip() if isinstance(content, bytes) else True:
                    yield Record(f"{name}:{number}", content)


def _array(name: str) -> Iterator[Record]:
    try:
        items = json.loads(read_whole(name))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{name}: begins like a JSON array but is not one: {error}; write one array, or one object a line"
        ) from error
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise CorruptCheckpoint(
                f"{name}:{number}: item {number} of the array is not a JSON object"
            )
        yield Record(f"{name}:{number}", item)
