"""The task query-neighbors: the nearest chunks of each chunk of each sample, without those of the sample's documents."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.corpora import SPLITS
from megatron_lite.retrieval.array_files import Array, Planned
from megatron_lite.retrieval.faiss_index import read_index, search, set_effort
from megatron_lite.retrieval.retro.block_tasks import BlockTask
from megatron_lite.retrieval.retro.blocks import Block, blocks_of
from megatron_lite.retrieval.retro.database import ChunkDatabase
from megatron_lite.retrieval.retro.neighbors import ARRAY
from megatron_lite.retrieval.retro.plan import BATCH, BuildPlan
from megatron_lite.retrieval.retro.windows import Window, Windows

Ids = NDArray[np.int64]


def query_tasks(plan: BuildPlan) -> Iterator[BlockTask]:
    """Yield the task of each split. The index is opened once."""
    index = read_index(plan.added_index)
    set_effort(index, plan.index.nprobe, plan.index.ef_search)
    database = plan.project.database(plan.eod)
    for split in SPLITS:
        directory = plan.project.query_directory(split)
        windows = plan.project.windows(split)
        if directory is None or windows is None:
            continue
        chunks = len(windows) * plan.project.settings.chunks_per_sample
        yield BlockTask(
            f"neighbours of {split}",
            directory,
            blocks_of(chunks, plan.project.settings.block_size),
            (ARRAY,),
            _Query(plan, index, database, windows),
        )


class _Query:
    """Computes the neighbours of a block of chunks."""

    def __init__(
        self, plan: BuildPlan, index: Any, database: ChunkDatabase, windows: Windows
    ) -> None:
        self._plan, self._index = plan, index
        self._database, self._windows = database, windows

    def __call__(self, block: Block) -> Mapping[str, Planned]:
        shape = (block.end - block.start, self._plan.index.save)
        return {ARRAY: Planned(shape, "<i8", self._found(block))}

    def _found(self, block: Block) -> Iterator[Array]:
        for start in range(block.start, block.end, BATCH):
            chunks = range(start, min(block.end, start + BATCH))
            yield self._neighbors(chunks)

    def _neighbors(self, chunks: range) -> Ids:
        """Return int64 [chunks, save]."""
        per_sample = self._plan.project.settings.chunks_per_sample
        samples = range(chunks[0] // per_sample, chunks[-1] // per_sample + 1)
        windows = {sample: self._windows[sample] for sample in samples}
        texts = []
        for chunk in chunks:
            sample, place = divmod(chunk, per_sample)
            texts.append(self._text(windows[sample], place))
        vectors = self._plan.embedder.embed(texts)
        _, found = search(self._index, vectors, self._plan.index.query)
        kept = np.full((len(chunks), self._plan.index.save), -1, np.int64)
        for row, chunk in enumerate(chunks):
            window = windows[chunk // per_sample]
            left = without_documents(found[row], self._database, window.dataset, window.documents)
            saved = left[: self._plan.index.save]
            kept[row, : len(saved)] = saved
        return kept

    def _text(self, window: Window, place: int) -> str:
        """Return the text of a chunk of a sample."""
        size = self._plan.project.settings.chunk_length
        start = place * size
        tokens = window.tokens[start : start + size]
        return self._plan.text_of(tokens.tolist())


def without_documents(
    found: Ids, database: ChunkDatabase, dataset: int, documents: NDArray[np.int64]
) -> Ids:
    """Return the rows that are not of these documents of the dataset, in order, without -1."""
    rows = found[found >= 0]
    of = database.documents(rows)
    is_own = (of[:, 0] == dataset) & np.isin(of[:, 1], documents)
    left: Ids = rows[~is_own]
    return left
