"""A directory of vectors: `embed` writes it, `retrieve` searches it.

    meta.json                 embedder, fingerprint of the weights, width, evidence, rows of a shard
    embeddings.NNNNN.npy      float16 [rows, width], the vectors of shard N
    ids.NNNNN.npy             int64 [rows], their passages
    ids.npy                   int64 [all rows]; it appears last, when all shards are there

Each file appears by one rename, so that an ended run goes on with the next missing shard.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from formats.ceilings import SIDECAR_BYTES
from formats.errors import CorruptCheckpoint
from formats.regular_files import read_small
from megaconv.errors import UsageError

META = "meta.json"
IDS = "ids.npy"
MOST_ROWS = 100_000
MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Meta:
    """The origin of the vectors. A run continues only with the same values."""

    embedder: str
    fingerprint: str
    width: int
    seq_length: int
    evidence: str
    """A hash of the passages."""
    shard_rows: int
    source: dict[str, str]
    """The flags that name the passages. They may have moved."""


def shard_rows(width: int) -> int:
    """Return the rows of a shard: at most 1 GiB."""
    return max(1, min(MOST_ROWS, MOST_BYTES // (2 * width)))


class Shards(Protocol):
    """Vectors with their passages."""

    def shards(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float16]]]:
        """Yield the ids and vectors of each shard."""
        ...


@dataclass(frozen=True)
class VectorFiles:
    """A directory of vectors."""

    directory: Path

    def begin(self, meta: Meta) -> None:
        """Write meta.json, or compare it with that of an ended run. Raises UsageError."""
        path = self.directory / META
        has_shards = any(self.directory.glob("ids.*.npy"))
        if path.is_file():
            before = asdict(self.meta())
            # A run that failed at its first passages, which were corrected since, left nothing of them.
            free = ("source",) if has_shards else ("source", "evidence", "shard_rows")
            for name, value in asdict(meta).items():
                if before[name] != value and name not in free:
                    raise UsageError(
                        f"{path}: was begun with {name} {before[name]!r}, not {value!r}; give the same flags, or another directory"
                    )
            if has_shards:
                return
        self.directory.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{META}.{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def meta(self) -> Meta:
        """Read meta.json. Raises CorruptCheckpoint."""
        path = self.directory / META
        if not path.is_file():
            raise CorruptCheckpoint(f"{path}: no such file; `megatron-lite embed` writes it")
        try:
            found: Any = json.loads(read_small(path, SIDECAR_BYTES))
            return Meta(**found)
        except (ValueError, TypeError) as error:
            raise CorruptCheckpoint(f"{path}: is not what `embed` writes: {error}") from error

    def has(self, number: int) -> bool:
        """Return whether a shard is there. Its ids appear after its vectors."""
        return self._ids(number).is_file()

    def write(self, number: int, ids: NDArray[np.int64], vectors: NDArray[np.float16]) -> None:
        """Write a shard."""
        _save(self._vectors(number), vectors)
        _save(self._ids(number), ids)

    def finish(self) -> int:
        """Write the ids of all shards, and return their number."""
        found: list[NDArray[np.int64]] = []
        while self.has(len(found)):
            found.append(_load(self._ids(len(found))))
        ids = np.concatenate([np.empty(0, np.int64), *found])
        _save(self.directory / IDS, ids)
        return len(ids)

    def shards(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float16]]]:
        """Yield the ids and vectors of each shard, mapped. Raises CorruptCheckpoint if the run has not finished."""
        if not (self.directory / IDS).is_file():
            raise CorruptCheckpoint(
                f"{self.directory / IDS}: no such file; finish `megatron-lite embed`"
            )
        all_ids, first, number = _load(self.directory / IDS), 0, 0
        while first < len(all_ids):
            vectors = _load(self._vectors(number))
            ids = all_ids[first : first + len(vectors)]
            if vectors.ndim != 2 or len(ids) != len(vectors) or not len(vectors):
                raise CorruptCheckpoint(f"{self._vectors(number)}: has not the rows of {IDS}")
            yield ids, vectors
            first, number = first + len(vectors), number + 1

    def _vectors(self, number: int) -> Path:
        return self.directory / f"embeddings.{number:05d}.npy"

    def _ids(self, number: int) -> Path:
        return self.directory / f"ids.{number:05d}.npy"


def _save(path: Path, array: NDArray[Any]) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        np.save(file, array)
    unfinished.replace(path)


def _load(path: Path) -> NDArray[Any]:
    try:
        found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CorruptCheckpoint(f"{path}: is not a readable array: {error}") from error
    return found.view(np.ndarray)
