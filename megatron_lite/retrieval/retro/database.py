"""The chunks that are retrieved: rows of (dataset, document, start, end, length in BERT's tokens).

Equal to megatron-core 0.15.3's DBDataset and RetroDataset.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megatron_lite.data.tokens import Documents

Rows = NDArray[np.int64]
Chunks = NDArray[np.uint32]


@dataclass(frozen=True)
class ChunkDatabase:
    """The chunks of one file of the merged database."""

    name: str
    """The file, for messages."""
    chunks: Chunks
    """uint32 [n, 5], a memory map."""
    datasets: Sequence[Documents]
    chunk_length: int
    eod: int
    """Pads short chunks."""

    def __len__(self) -> int:
        return len(self.chunks)

    def tokens(self, row: int) -> Rows:
        """Return int64 [chunk_length]: the tokens of a chunk, and EOD behind a short one. Raises CorruptCheckpoint."""
        tokens = self.own_tokens(row)
        padded = np.full(self.chunk_length, self.eod, np.int64)
        padded[: len(tokens)] = tokens
        return padded

    def own_tokens(self, row: int) -> NDArray[Any]:
        """Return the tokens of a chunk without padding. Raises CorruptCheckpoint."""
        dataset, document, start, end = self.chunks[row, :4].tolist()
        length = end - start
        if dataset >= len(self.datasets) or not 0 < length <= self.chunk_length:
            raise CorruptCheckpoint(
                f"{self.name}: chunk {row:,} is [{start}, {end}) of dataset {dataset}; there are {len(self.datasets)} datasets, "
                f"and a chunk has 1 to {self.chunk_length} tokens"
            )
        documents = self.datasets[dataset]
        if document >= len(documents.lengths) or end > documents.lengths[document]:
            raise CorruptCheckpoint(
                f"{self.name}: chunk {row:,} ends behind document {document:,} of dataset {dataset}; it is of other data"
            )
        tokens: NDArray[Any] = documents.get(document, start, length)
        return tokens

    def documents(self, rows: Rows) -> NDArray[np.uint32]:
        """Return uint32 [..., 2], the dataset and document of each row. rows: 0 or more."""
        self._require(rows)
        found: NDArray[np.uint32] = self.chunks[rows, :2]
        return found

    def retrieved(self, rows: Rows, chunks: int, *, megatron: bool = False) -> Rows:
        """Return int64 [..., k, chunks · chunk_length]: each neighbour and its continuation.

        rows: int64 [..., k]; -1 for no neighbour.
        megatron: continue with the next rows, past the document's end, and modulo the size of the database. There, -1 is the
        last chunk. Else a continuation ends with its document, and EOD follows. There, -1 is EOD alone.
        Raises CorruptCheckpoint for a row behind the database.
        """
        first = np.asarray(rows, np.int64)
        self._require(first)
        numbers = first[..., None] + np.arange(chunks)
        numbers = numbers % len(self) if megatron else self._within_document(first, numbers)
        tokens = np.full((numbers.size, self.chunk_length), self.eod, np.int64)
        for place, row in enumerate(numbers.reshape(-1).tolist()):
            if row >= 0:
                tokens[place] = self.tokens(row)
        return tokens.reshape(*first.shape, chunks * self.chunk_length)

    def _within_document(self, first: Rows, numbers: Rows) -> Rows:
        """Return the numbers; -1 where there is no neighbour, or its document has ended."""
        known = np.clip(numbers, 0, len(self) - 1)
        of = self.documents(known)
        same = np.all(of == of[..., :1, :], axis=-1)
        stays = same & (numbers < len(self)) & (first[..., None] >= 0)
        return np.where(stays, numbers, -1)

    def _require(self, rows: Rows) -> None:
        """Raise CorruptCheckpoint for a row that the database has not."""
        if rows.size and (int(rows.max()) >= len(self) or int(rows.min()) < -1):
            raise CorruptCheckpoint(
                f"{self.name}: has {len(self):,} chunks, and a neighbour is chunk {int(rows.max()):,}; "
                "the neighbours are of another database"
            )
