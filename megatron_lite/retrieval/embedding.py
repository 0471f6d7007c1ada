"""Embeds all passages of an evidence, shard by shard, shared among processes."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megatron_lite.retrieval.embedder import Embedder, Passage
from megatron_lite.retrieval.evidence import Evidence
from megatron_lite.retrieval.team import Team
from megatron_lite.retrieval.vector_files import Meta, VectorFiles

BATCH = 4096
"""Passages in memory at once."""


def embed_all(
    evidence: Evidence, embedder: Embedder, files: VectorFiles, meta: Meta, team: Team
) -> int:
    """Write the missing shards, and return the number of passages. Collective.

    Each process reads all passages and embeds every size-th shard. Raises UsageError, CorruptCheckpoint.
    """
    if team.rank == 0:
        files.begin(meta)
    team.wait()
    rows = evidence.rows()
    number = 0
    while True:
        is_own = number % team.size == team.rank and not files.has(number)
        if is_own:
            found = _embed_shard(rows, embedder, meta.shard_rows)
            if len(found[0]):
                files.write(number, *found)
            passed = len(found[0])
        else:
            passed = sum(1 for _ in islice(rows, meta.shard_rows))
        number += 1
        if passed < meta.shard_rows:
            break
    team.wait()
    total = files.finish() if team.rank == 0 else 0
    team.wait()
    if team.rank == 0 and not total:
        raise CorruptCheckpoint("the evidence has no passages; check --evidence-data-path")
    return total


def _embed_shard(
    rows: Iterator[Passage], embedder: Embedder, count: int
) -> tuple[NDArray[np.int64], NDArray[np.float16]]:
    """Return the ids and vectors of the next passages, at most `count`."""
    ids: list[int] = []
    vectors = [np.empty((0, embedder.width), np.float16)]
    while len(ids) < count:
        batch = list(islice(rows, min(BATCH, count - len(ids))))
        if not batch:
            break
        ids += [row.id for row in batch]
        vectors.append(embedder.passages(batch).astype(np.float16))
    return np.array(ids, np.int64), np.concatenate(vectors)
