"""The neighbours of the chunks of samples: files of blocks, START-END, below query/NAME.

Each holds int64 [END - START, saved]: rows of the chunk database, -1 where there is none. Row i·l + j is chunk j of sample i.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.retrieval.array_files import ArrayFiles
from megatron_lite.retrieval.retro.blocks import Block, found_blocks

ARRAY = "neighbors"


@dataclass
class Neighbors:
    """The neighbours of one split."""

    directory: Path
    blocks: list[Block]
    files: ArrayFiles
    chunks_per_sample: int
    _open: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.chunks // self.chunks_per_sample

    @property
    def chunks(self) -> int:
        """The number of chunks that were queried."""
        return self.blocks[-1].end

    @property
    def saved(self) -> int:
        """The number of neighbours of each chunk in the files."""
        return int(self._block(0).shape[1])

    def of_sample(self, sample: int, count: int) -> NDArray[np.int64]:
        """Return int64 [chunks_per_sample, count]. sample: modulo the number of samples.

        Raises UsageError if fewer are saved, CorruptCheckpoint for a damaged file.
        """
        if count > self.saved:
            raise UsageError(
                f"{self.directory}: {self.saved} neighbours of each chunk are saved, {count} are needed; "
                "build with a larger --retro-query-num-neighbors-save"
            )
        first = (sample % len(self)) * self.chunks_per_sample
        rows = [self._row(first + place)[:count] for place in range(self.chunks_per_sample)]
        return np.stack(rows).astype(np.int64)

    def _row(self, chunk: int) -> NDArray[Any]:
        size = self.blocks[0].end
        number = chunk // size
        row: NDArray[Any] = self._block(number)[chunk - number * size]
        return row

    def _block(self, number: int) -> NDArray[np.int64]:
        if number not in self._open:
            block = self.blocks[number]
            found = self.files.read(block.stem(self.directory), ARRAY)
            if found.ndim != 2 or len(found) != block.end - block.start:
                raise CorruptCheckpoint(
                    f"{self.directory}: block {block.name} has shape {found.shape}; it should have {block.end - block.start} rows"
                )
            self._open[number] = found
        return self._open[number]


def open_neighbors(directory: Path, files: ArrayFiles, chunks_per_sample: int) -> Neighbors:
    """Open the neighbours of a split. Raises CorruptCheckpoint if blocks are missing."""
    blocks = found_blocks(directory, files, ARRAY)
    if not blocks:
        raise CorruptCheckpoint(
            f"{directory}: has no neighbours; finish `megatron-lite retro build`"
        )
    size, end = blocks[0].end, 0
    for block in blocks:
        is_last = block is blocks[-1]
        if block.start != end or (not is_last and block.end != end + size):
            raise CorruptCheckpoint(
                f"{directory}: block {block.name} follows chunk {end:,}; finish `megatron-lite retro build`"
            )
        end = block.end
    return Neighbors(directory, blocks, files, chunks_per_sample)
