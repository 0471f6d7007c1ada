"""The task db-build, first half: documents to chunks, block by block.

A document, without an end token at its end, is divided into chunks of `chunk_length` tokens; the last one may be shorter.
A chunk is valid if its text has at least one token of the embedder.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.retrieval.array_files import Planned, whole
from megatron_lite.retrieval.retro.block_tasks import BlockTask
from megatron_lite.retrieval.retro.blocks import Block, blocks_of
from megatron_lite.retrieval.retro.plan import BuildPlan

ARRAYS = ("chunks_valid", "chunks_invalid", "doc_offsets")


def chunk_tasks(plan: BuildPlan) -> Iterator[BlockTask]:
    """Yield the task of each dataset."""
    project = plan.project
    for name, dataset in zip(project.names, project.datasets, strict=True):
        yield BlockTask(
            f"chunks of {name}",
            project.path / "db" / "individual" / name,
            blocks_of(len(dataset), plan.document_block),
            ARRAYS,
            _Chunks(plan, dataset),
        )


class _Chunks:
    """Computes the arrays of a block of documents."""

    def __init__(self, plan: BuildPlan, dataset: IndexedDataset) -> None:
        self._plan, self._dataset = plan, dataset

    def __call__(self, block: Block) -> Mapping[str, Planned]:
        valid: list[tuple[int, int, int, int]] = []
        invalid: list[tuple[int, int, int, int]] = []
        offsets: list[tuple[int, int]] = []
        for document in range(block.start, block.end):
            for start, end, count in self._counted(document):
                rows = valid if count else invalid
                rows.append((document, start, end, count))
            offsets.append((document, len(valid)))
        return {
            "chunks_valid": whole(_rows(valid)),
            "chunks_invalid": whole(_rows(invalid)),
            "doc_offsets": whole(np.array(offsets, np.uint64).reshape(-1, 2)),
        }

    def _counted(self, document: int) -> Iterator[tuple[int, int, int]]:
        """Yield start, end and the number of the embedder's tokens of each chunk of a document."""
        tokens = self._dataset.get(document)
        ends = len(tokens) > 0 and int(tokens[-1]) == self._plan.eod
        length = len(tokens) - ends
        size = self._plan.project.settings.chunk_length
        for start in range(0, length, size):
            end = min(length, start + size)
            text = self._plan.project.tokenizer.detokenize(tokens[start:end].tolist())
            yield start, end, self._plan.embedder.count(text)


def _rows(chunks: list[tuple[int, int, int, int]]) -> NDArray[np.uint32]:
    return np.array(chunks, np.uint32).reshape(-1, 4)
