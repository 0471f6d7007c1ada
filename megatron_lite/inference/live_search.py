"""`generate --retro-project-dir`: the neighbors of each chunk are searched in a project when the chunk is complete."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaconv.errors import UsageError
from megaconv.model.retrieving import Retrieval
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.slots import require_known
from megatron_lite.retrieval.retro.database import ChunkDatabase
from megatron_lite.retrieval.retro.project import Project, open_project
from megatron_lite.retrieval.retro.searching import Searcher, open_searcher

MOST_KEPT = 1 << 14
"""Chunks whose neighbors stay in memory."""
Chunk = tuple[int, ...]


@dataclass
class LiveSearch:
    """The neighbors of chunks by a search of their texts. A chunk of the same tokens is searched once."""

    searcher: Searcher
    database: ChunkDatabase
    retrieval: Retrieval
    vocab: int
    """Tokens that the model knows."""
    megatron: bool = False
    """True for neighbors as in Megatron (database.py)."""
    _found: dict[Chunk, NDArray[np.int64]] = field(default_factory=dict)

    def __call__(self, row: Sequence[int]) -> Tensor:
        """See retrieving.FindNeighbors. Raises UsageError for tokens that the model doesn't know."""
        size = self.retrieval.chunk
        starts = range(0, len(row) - size + 1, size)
        chunks = [tuple(row[start : start + size]) for start in starts]
        if not chunks:
            return torch.empty(0, self.retrieval.retrieved, dtype=torch.int64)
        if len(self._found) > MOST_KEPT:
            self._found.clear()
        new = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self._found]
        if new:
            self._search(new)
        return torch.from_numpy(np.concatenate([self._found[chunk] for chunk in chunks]))

    def _search(self, chunks: Sequence[Chunk]) -> None:
        """Find the neighbors of these chunks, int64 [neighbors, tokens of a neighbor] each."""
        rows = self.searcher.of_chunks(chunks, self.retrieval.neighbors)
        found = self.database.retrieved(rows, self.retrieval.chunks, megatron=self.megatron)
        require_known((int(found.min()), int(found.max())), self.vocab)
        for chunk, tokens in zip(chunks, found, strict=True):
            self._found[chunk] = tokens


def open_live_search(opened: Opened, directory: str, *, megatron: bool) -> LiveSearch:
    """Open the project's index, and its database with the model's chunks. Raises UsageError, CorruptCheckpoint."""
    project = open_project(directory)
    project.check_data()
    require_chunks(project, opened)
    database = project.database(project.eod(opened.tokenizer))
    searcher = open_searcher(project)
    return LiveSearch(
        searcher, database, opened.config.retrieval, opened.config.vocab, megatron=megatron
    )


def require_chunks(project: Project, opened: Opened) -> None:
    """Raise UsageError if the project's chunks have another length than the model's."""
    asked, held = opened.config.retrieval.chunk, project.settings.chunk_length
    if asked != held:
        raise UsageError(
            f"{project.path}: has chunks of {held} tokens, {opened.path} has chunks of {asked}"
        )
