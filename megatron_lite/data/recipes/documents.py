"""Documents of a corpus: records of files, each with a text."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from formats.errors import CorruptCheckpoint
from megatron_lite.data.encoding import BadRecord, read_fields
from megatron_lite.data.finetuning.records import Record, read_records


@dataclass(frozen=True)
class Document:
    """One record of a corpus."""

    where: str
    """`corpus.jsonl:17`: file, and line or row."""
    fields: Mapping[str, Any]
    text: str
    size: int
    """Bytes of the text in UTF-8."""


@dataclass(frozen=True)
class Reader:
    """Reads documents. key: the field with the text. warn: receives a message for each skipped record."""

    key: str = "text"
    skip_bad_lines: bool = False
    warn: Callable[[str], None] = lambda message: None
    key_flag: str = "--text-key"
    """The flag that names the field, for messages."""

    def documents(self, file: str) -> Iterator[Document]:
        """Yield the documents of a file, in order. Raises CorruptCheckpoint with file and line for a bad record."""
        for record in read_records(file):
            try:
                yield self._document(record)
            except BadRecord as error:
                message = f"{record.where}: {error}"
                if not self.skip_bad_lines:
                    raise CorruptCheckpoint(
                        f"{message}; --skip-bad-lines leaves such lines out"
                    ) from error
                self.warn(message)

    def _document(self, record: Record) -> Document:
        content = record.content
        if isinstance(content, str):
            fields: Mapping[str, Any] = {self.key: content}
        else:
            fields = read_fields(content)
        text = fields.get(self.key)
        if not isinstance(text, str):
            known = ", ".join(map(repr, fields)) or "nothing"
            raise BadRecord(
                f"has no text in {self.key!r}, only {known}; name the field: {self.key_flag}"
            )
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise BadRecord(f"its {self.key!r} has half a surrogate pair") from error
        return Document(record.where, fields, text, size)


def texts_of(reader: Reader, files: Sequence[str]) -> Iterator[str]:
    """Yield the texts of all files, in order."""
    for file in files:
        for document in reader.documents(file):
            yield document.text


def json_line(fields: Mapping[str, Any], where: str) -> bytes:
    """Return a record as a line of JSON. Raises CorruptCheckpoint for a value of a table that JSON can't represent."""
    try:
        line = json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        line = json.dumps(fields).encode()  # half a surrogate pair stays, as an escape
    except TypeError as error:
        raise CorruptCheckpoint(f"{where}: can't be written as JSON: {error}") from error
    return line + b"\n"
