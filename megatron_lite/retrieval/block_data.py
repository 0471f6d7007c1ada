"""Megatron's BlockData: a pickle of {'embed_data': {id: float16 [width]}, 'meta_data': ...}. Nothing in it is executed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from formats.pickle_guard import load
from formats.pickle_records import NumpyArray

_ROWS = 65_536


@dataclass(frozen=True)
class BlockData:
    """The vectors of a file. The file is read as a whole, so that its size is needed in memory."""

    path: Path

    def shards(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float16]]]:
        """Yield ids and vectors in blocks. Raises CorruptCheckpoint, UnsafeContent."""
        table = self._table()
        items = list(table.items())
        for first in range(0, len(items), _ROWS):
            rows = items[first : first + _ROWS]
            ids = np.array([number for number, _ in rows], np.int64)
            vectors = [self._vector(vector) for _, vector in rows]
            if len({len(vector) for vector in vectors}) > 1:
                raise CorruptCheckpoint(
                    f"{self.path}: the vectors of `embed_data` have different numbers of floats"
                )
            yield ids, np.stack(vectors)

    def _table(self) -> dict[int, object]:
        if not self.path.is_file():
            raise CorruptCheckpoint(
                f"{self.path}: no such file; --block-data names Megatron's embeddings"
            )
        found = load(self.path.read_bytes(), source=str(self.path))
        table = found.get("embed_data") if isinstance(found, dict) else None
        are_numbers = isinstance(table, dict) and all(isinstance(key, int) for key in table)
        if not isinstance(table, dict) or not are_numbers or not table:
            raise CorruptCheckpoint(
                f"{self.path}: has no `embed_data` of vectors by number; Megatron's BlockData was expected"
            )
        return table

    def _vector(self, found: object) -> NDArray[np.float16]:
        is_vector = isinstance(found, NumpyArray) and found.dtype in ("<f2", "<f4")
        if not isinstance(found, NumpyArray) or not is_vector:
            raise CorruptCheckpoint(
                f"{self.path}: an entry of `embed_data` is not a vector of floats"
            )
        return np.frombuffer(found.data, found.dtype).astype(np.float16)
