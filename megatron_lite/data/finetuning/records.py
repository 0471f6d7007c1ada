"""Files of finetuning data, record by record: JSON lines, a JSON array, parquet, plain text; compressed or not."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.text_files import STDIN, find_inputs, read_batches, read_start, read_whole

TEXT_SUFFIXES = (".txt", ".text", ".md")
COMPRESSED = (".gz", ".zst")


class Record(NamedTuple):
    where: str
    """`answers.jsonl:17`: file and line, item or row, from 1."""
    content: bytes | Mapping[str, Any] | str
    """A line of JSON; a record that was read already; the whole text of a plain file."""


def find_files(words: Sequence[str], flag: str) -> list[str]:
    """Raises UsageError for one that isn't there, and for standard input, which several processes can't share."""
    if STDIN in words:
        raise UsageError(f"{flag} -: every process reads the examples; put them into a file")
    return find_inputs(words, flag)


def read_records(name: str) -> Iterator[Record]:
    """Raises CorruptCheckpoint, naming the file, for one that can't be read to its end."""
    if is_plain_text(name):
        try:
            yield Record(name, read_whole(name).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint(f"{name}: is not text in UTF-8: byte {error.start} of it") from error
    elif read_start(name).lstrip().startswith(b"["):
        yield from _array(name)
    else:
        for batch in read_batches([name], None):
            for number, content in enumerate(batch.records, batch.first):
                if content.strip() if isinstance(content, bytes) else True:
                    yield Record(f"{name}:{number}", content)


def is_plain_text(name: str) -> bool:
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes]
    while suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in TEXT_SUFFIXES


def _array(name: str) -> Iterator[Record]:
    try:
        items = json.loads(read_whole(name))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{name}: begins as a JSON array and is none: {error}; write one array, or one object a line"
        ) from error
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise CorruptCheckpoint(f"{name}:{number}: item {number} of the array is not a JSON object")
        yield Record(f"{name}:{number}", item)
