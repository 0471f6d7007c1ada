"""Searches vectors by inner product. `Flat` is exact and takes one shard at a time; other indexes are built in memory."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megatron_lite.retrieval.embedder import Vectors
from megatron_lite.retrieval.faiss_index import (
    explained,
    faiss_module,
    make_index,
    search,
    set_effort,
    train,
)
from megatron_lite.retrieval.vector_files import Shards

FLAT = "Flat"
MOST_TRAINING = 1_000_000
"""Vectors that train an index, at most."""
Found = tuple[Vectors, NDArray[np.int64]]
"""Scores and ids, each [questions, k]; -1 behind the last one found."""


def find(
    stored: Shards, queries: Vectors, count: int, text: str, nprobe: int, ef_search: int
) -> Found:
    """Return the passages with the largest inner products. text: faiss' index string. Raises UsageError, CorruptCheckpoint."""
    if text == FLAT:
        return _find_in_each(stored, queries, count)
    index = build(stored, queries.shape[1], text)
    set_effort(index, nprobe, ef_search)
    scores, ids = search(index, queries, count)
    return scores, ids


def build(stored: Shards, width: int, text: str) -> Any:
    """Return an index with all vectors and their ids."""
    inner = make_index(text, width, inner_product=True)
    if not inner.is_trained:
        train(inner, f"--faiss-index {text}", _training_vectors(stored, width))
    index = faiss_module().IndexIDMap(inner)
    for ids, vectors in stored.shards():
        _require_width(vectors, width)
        with explained(f"--faiss-index {text}"):
            index.add_with_ids(vectors.astype(np.float32), np.ascontiguousarray(ids))
    return index


def _find_in_each(stored: Shards, queries: Vectors, count: int) -> Found:
    """Search the shards one after the other, and keep the best. The first stored one of equal scores comes first."""
    width = queries.shape[1]
    scores = np.full((len(queries), count), -np.inf, np.float32)
    ids = np.full((len(queries), count), -1, np.int64)
    for numbers, vectors in stored.shards():
        _require_width(vectors, width)
        inner = make_index(FLAT, width, inner_product=True)
        index = faiss_module().IndexIDMap(inner)
        index.add_with_ids(vectors.astype(np.float32), np.ascontiguousarray(numbers))
        of_shard = search(index, queries, count)
        scores, ids = _best((scores, ids), of_shard, count)
    return scores, ids


def _best(earlier: Found, later: Found, count: int) -> Found:
    """Return the best of both. Equal scores keep their order."""
    later_scores, later_ids = later
    missing = later_ids < 0
    later_scores = np.where(missing, -np.inf, later_scores)
    scores = np.concatenate([earlier[0], later_scores], axis=1)
    ids = np.concatenate([earlier[1], later_ids], axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")
    best = order[:, :count]
    return np.take_along_axis(scores, best, axis=1), np.take_along_axis(ids, best, axis=1)


def _training_vectors(stored: Shards, width: int) -> Vectors:
    """Return evenly spaced vectors of all shards, at most a million."""
    rows = sum(len(ids) for ids, _ in stored.shards())
    step = max(1, -(-rows // MOST_TRAINING))
    found: list[Vectors] = [np.empty((0, width), np.float32)]
    for _, vectors in stored.shards():
        _require_width(vectors, width)
        found.append(vectors[::step].astype(np.float32))
    return np.concatenate(found)


def _require_width(vectors: NDArray[Any], width: int) -> None:
    if vectors.shape[1] != width:
        raise CorruptCheckpoint(
            f"the stored vectors have {vectors.shape[1]} numbers, those of the questions have {width}; take the embedder of the index"
        )
