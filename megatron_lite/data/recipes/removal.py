"""A corpus that passes a recipe: each document is kept, split or removed, and the report adds up."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from formats.errors import CheckpointError, CorruptCheckpoint
from megatron_lite.data.recipes.documents import Document, json_line
from megatron_lite.data.recipes.flags import RecipePlaces
from megatron_lite.data.recipes.outputs import opened_for_writing, output_names, staged_directory

REASON = "removed_because"
"""The field that a removed document gets."""


@dataclass
class Share:
    """A number of documents, and the bytes of their texts in UTF-8."""

    documents: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """Count one more document of `size` bytes."""
        self.documents += 1
        self.bytes += size


@dataclass
class Report:
    """The fate of a corpus's documents: read = kept + split + removed."""

    read: Share = field(default_factory=Share)
    kept: Share = field(default_factory=Share)
    split: Share = field(default_factory=Share)
    """Documents that were cut, with their whole texts."""
    pieces: Share = field(default_factory=Share)
    """The pieces that are left of them."""
    removed: dict[str, Share] = field(default_factory=dict)
    """Removed documents by reason."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        removed = {reason: share.documents for reason, share in self.removed.items()}
        removed_bytes = {reason: share.bytes for reason, share in self.removed.items()}
        return {
            "documents": self.read.documents,
            "kept": self.kept.documents,
            "split": self.split.documents,
            "pieces": self.pieces.documents,
            "removed": removed,
            "bytes": {
                "documents": self.read.bytes,
                "kept": self.kept.bytes,
                "split": self.split.bytes,
                "pieces": self.pieces.bytes,
                "removed": removed_bytes,
            },
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report's table."""
        rows = {"documents": self.read, "kept": self.kept, "split": self.split}
        rows |= {"pieces": self.pieces}
        rows |= {f"removed: {reason}": share for reason, share in self.removed.items()}
        for name, share in rows.items():
            yield f"{name:24} {share.documents:14,} {share.bytes:18,} bytes"

    def adds_up(self) -> bool:
        """Return whether each document that was read has one fate."""
        fates = [self.kept, self.split, *self.removed.values()]
        documents = sum(share.documents for share in fates)
        size = sum(share.bytes for share in fates)
        return (documents, size) == (self.read.documents, self.read.bytes)


class Corpus:
    """Reads the documents of a recipe and writes what is left of them. A context: the outputs appear at its end.

    An error leaves no output.
    """

    def __init__(self, places: RecipePlaces) -> None:
        self.report = Report()
        self.key = places.reader.key
        self._places = places
        self._names = output_names(places.files)
        self._stack = ExitStack()

    def __enter__(self) -> "Corpus":
        places = self._places
        with ExitStack() as stack:
            enter = stack.enter_context
            self._output = enter(
                staged_directory(places.output, places.files, overwrite=places.overwrite)
            )
            self._removed = enter(
                staged_directory(places.keep_removed, places.files, overwrite=places.overwrite)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def documents(self) -> Iterator[Document]:
        """Yield all documents, in order. Each must be kept, split or removed before the next."""
        for file, name in zip(self._places.files, self._names, strict=True):
            with (
                opened_for_writing(self._output / name) as self._kept_file,
                opened_for_writing(self._removed / name) as self._removed_file,
            ):
                for document in self._places.reader.documents(file):
                    self.report.read.add(document.size)
                    yield document

    def keep(self, document: Document, fields: Mapping[str, Any]) -> None:
        """Write a document whose text is unchanged."""
        self._kept_file.write(json_line(fields, document.where))
        self.report.kept.add(document.size)

    def split(self, document: Document, pieces: Sequence[Mapping[str, Any]]) -> None:
        """Write the pieces of a document."""
        for piece in pieces:
            self._kept_file.write(json_line(piece, document.where))
            self.report.pieces.add(len(piece[self.key].encode()))
        self.report.split.add(document.size)

    def remove(self, document: Document, reason: str) -> None:
        """Write a document to the removed ones, with the reason."""
        fields = {**document.fields, REASON: reason}
        self._removed_file.write(json_line(fields, document.where))
        self.report.removed.setdefault(reason, Share()).add(document.size)

    def finish(self) -> None:
        """Raise CorruptCheckpoint for a corpus without documents, and for a report that doesn't add up."""
        place = ", ".join(self._places.files)
        if not self.report.read.documents:
            raise CorruptCheckpoint(f"{place}: there are no documents")
        if not self.report.adds_up():
            raise CheckpointError(f"{place}: kept, split and removed documents don't add up")
