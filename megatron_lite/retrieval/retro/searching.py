"""Finds neighbours of any text in a built project, as generation needs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaconv.errors import UsageError
from megatron_lite.retrieval.embedder import TextEmbedder
from megatron_lite.retrieval.embedders import EmbedderOptions, open_embedder
from megatron_lite.retrieval.faiss_index import read_index, search, set_effort
from megatron_lite.retrieval.retro.plan import MOST_TOKENS, BuildPlan, IndexPlan
from megatron_lite.retrieval.retro.project import Project

BATCH = 32


@dataclass(frozen=True)
class Searcher:
    """The index of a project and its embedder. The index stays on disk where faiss can map it."""

    plan: BuildPlan
    index: Any

    @property
    def embedder(self) -> TextEmbedder:
        return self.plan.embedder

    def of_chunks(self, chunks: Sequence[Sequence[int]], count: int) -> NDArray[np.int64]:
        """Return `neighbors` of the texts of these chunks of tokens, which are made as in the build."""
        return self.neighbors([self.plan.text_of(list(tokens)) for tokens in chunks], count)

    def neighbors(self, texts: Sequence[str], count: int) -> NDArray[np.int64]:
        """Return int64 [texts, count]: rows of the chunk database, nearest first; -1 behind the last one."""
        _, found = search(self.index, self.embedder.embed(texts), count)
        return found


def open_searcher(project: Project, embedder: TextEmbedder | None = None) -> Searcher:
    """Open the index. embedder: None for the one that made the project. Raises UsageError, CorruptCheckpoint."""
    own = project.settings.own
    if not own.get("embedder") or not own.get("index"):
        raise UsageError(
            f"{project.path}: records no embedder; only projects of `megatron-lite retro build` can be searched"
        )
    most = own.get("embedded_tokens", MOST_TOKENS)
    options = EmbedderOptions(BATCH, most, project.path / "embedder")
    used = embedder or open_embedder(own["embedder"], options)
    if used.fingerprint != own["embedder_fingerprint"]:
        raise UsageError(
            f"{project.path}: was built with {own['embedder']}, whose weights differ from those of {used.name}"
        )
    plan = IndexPlan(own["index"], None, own["index_train_fraction"], own["index_add_fraction"])
    built = BuildPlan(project, used, plan, own["document_block"], project.eod())
    index = read_index(built.added_index, mapped=True)
    set_effort(index, own["nprobe"], own["ef_search"])
    return Searcher(built, index)
