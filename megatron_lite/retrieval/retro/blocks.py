"""Ranges of rows that are worked on and stored together, in files named START-END with Megatron's zero padding."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.retrieval.array_files import ArrayFiles


@dataclass(frozen=True, order=True)
class Block:
    """Rows [start, end)."""

    start: int
    end: int
    digits: int

    @property
    def name(self) -> str:
        return f"{self.start:0{self.digits}d}-{self.end:0{self.digits}d}"

    def stem(self, directory: Path) -> Path:
        """Return the path of its files without the ending."""
        return directory / self.name


def blocks_of(rows: int, size: int) -> list[Block]:
    """Return the blocks of a number of rows; none for no rows."""
    if not rows:
        return []
    digits = math.ceil(math.log(rows) / math.log(10)) + 1
    starts = range(0, rows, size)
    return [Block(start, min(rows, start + size), digits) for start in starts]


def found_blocks(directory: Path, files: ArrayFiles, array: str) -> list[Block]:
    """Return the blocks whose files are in a directory, in order."""
    ending = files.suffix if files.suffix == ".hdf5" else f".{array}{files.suffix}"
    pattern = re.compile(rf"(\d+)-(\d+){re.escape(ending)}")
    names = [] if not directory.is_dir() else [path.name for path in directory.iterdir()]
    matches = [match for match in map(pattern.fullmatch, names) if match]
    return sorted(Block(int(one[1]), int(one[2]), len(one[1])) for one in matches)
