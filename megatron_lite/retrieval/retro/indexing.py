"""The tasks index-train and index-add: vectors of the `sampled` chunks train the index, those of `train` fill it.

All processes embed; one trains and adds. An index with inverted lists takes codes, which the processes compute; other
indexes take the vectors themselves.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megaconv.errors import UsageError
from megatron_lite.retrieval.array_files import Array, Planned
from megatron_lite.retrieval.embedder import Vectors
from megatron_lite.retrieval.faiss_index import (
    explained,
    inverted_lists,
    make_index,
    read_index,
    train,
    write_index,
)
from megatron_lite.retrieval.retro.block_tasks import BlockTask
from megatron_lite.retrieval.retro.blocks import Block, blocks_of
from megatron_lite.retrieval.retro.database import ChunkDatabase
from megatron_lite.retrieval.retro.plan import BATCH, BuildPlan
from megatron_lite.retrieval.team import Team

DATA = "data"
Encode = Callable[[Vectors], Array]


def train_index(plan: BuildPlan, team: Team) -> None:
    """Write the trained index. Collective."""
    if not plan.empty_index.is_file():
        index = make_index(plan.index.text, plan.embedder.width)
        directory = plan.index_directory / "training_embeddings"
        task = _embedding_task(plan, "sampled", directory, lambda vectors: vectors)
        if not index.is_trained:
            task.run(plan.project.files, team)
        if team.rank == 0:
            train(index, f"--retro-index-str {plan.index.text}", _training_vectors(plan, task))
            write_index(index, plan.empty_index)
            shutil.rmtree(directory, ignore_errors=True)
    team.wait()


def add_to_index(plan: BuildPlan, team: Team) -> None:
    """Write the complete index. Collective."""
    if not plan.added_index.is_file():
        index = read_index(plan.empty_index)
        lists = inverted_lists(index)
        directory = plan.index_directory / "add_codes"
        encode: Encode = (lambda vectors: vectors) if lists is None else index.sa_encode
        task = _embedding_task(plan, "train", directory, encode)
        task.run(plan.project.files, team)
        if team.rank == 0:
            _add(plan, index, lists, task)
            write_index(index, plan.added_index)
            shutil.rmtree(directory, ignore_errors=True)
    team.wait()


def _embedding_task(plan: BuildPlan, part: str, directory: Path, encode: Encode) -> BlockTask:
    database = plan.project.database(plan.eod, part)
    if not len(database):
        raise UsageError(
            f"{database.name}: has no chunks; the datasets are too small, or no text has tokens of the embedder"
        )
    return BlockTask(
        f"vectors of {part}",
        directory,
        blocks_of(len(database), plan.project.settings.block_size),
        (DATA,),
        _Embed(plan, database, encode),
    )


class _Embed:
    """Computes the vectors or codes of a block of chunks."""

    def __init__(self, plan: BuildPlan, database: ChunkDatabase, encode: Encode) -> None:
        self._plan, self._database, self._encode = plan, database, encode

    def __call__(self, block: Block) -> Mapping[str, Planned]:
        # The first vectors show the shape and dtype of codes.
        sample = self._encode(np.zeros((1, self._plan.embedder.width), np.float32))
        shape = (block.end - block.start, *sample.shape[1:])
        return {DATA: Planned(shape, sample.dtype.str, self._encoded(block))}

    def _encoded(self, block: Block) -> Iterator[Array]:
        for start in range(block.start, block.end, BATCH):
            rows = range(start, min(block.end, start + BATCH))
            texts = [self._plan.text_of(self._database.tokens(row).tolist()) for row in rows]
            yield self._encode(self._plan.embedder.embed(texts))


def _training_vectors(plan: BuildPlan, task: BlockTask) -> Vectors:
    """Return the first fraction of each block's vectors. An index that needs no training has none."""
    found: list[Array] = [np.empty((0, plan.embedder.width), np.float32)]
    for block in task.blocks:
        stem = block.stem(task.directory)
        if plan.project.files.has(stem, DATA):
            vectors = plan.project.files.read(stem, DATA)
            found.append(vectors[: int(plan.index.train_fraction * len(vectors))])
    return np.concatenate(found)


def _add(plan: BuildPlan, index: Any, lists: Any | None, task: BlockTask) -> None:
    """Add the first fraction of each block. The id of a vector is its row in the database."""
    for block in task.blocks:
        data = plan.project.files.read(block.stem(task.directory), DATA)
        kept = np.ascontiguousarray(data[: int(plan.index.add_fraction * len(data))])
        with explained(plan.index.text):
            if lists is None:
                _add_in_order(plan, index, kept, block)
            else:
                ids = np.arange(block.start, block.start + len(kept))
                lists.add_sa_codes(kept, ids)
    if lists is not None:
        index.ntotal = lists.ntotal


def _add_in_order(plan: BuildPlan, index: Any, vectors: Array, block: Block) -> None:
    """Add vectors to an index that numbers them in order."""
    if index.ntotal != block.start:
        raise UsageError(
            f"--retro-index-add-load-fraction {plan.index.add_fraction}: the index {plan.index.text} has no inverted lists, "
            "so that it takes whole blocks; leave the flag out"
        )
    index.add(vectors)
