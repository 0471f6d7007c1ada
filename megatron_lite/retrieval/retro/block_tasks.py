"""Work in blocks, shared among processes. A block whose files are there is done, so that an ended build continues."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from formats.errors import CheckpointError
from megatron_lite.retrieval.array_files import Array, ArrayFiles, Planned
from megatron_lite.retrieval.retro.blocks import Block
from megatron_lite.retrieval.team import Team

Compute = Callable[[Block], Mapping[str, Planned]]


class NotReproduced(CheckpointError):
    """A block comes out differently than it was stored."""

    exit_status = 4
    code = "models-differ"


@dataclass(frozen=True)
class BlockTask:
    """Blocks of one kind in one directory."""

    title: str
    directory: Path
    blocks: Sequence[Block]
    names: tuple[str, ...]
    """The arrays of a block."""
    compute: Compute

    def run(self, files: ArrayFiles, team: Team) -> None:
        """Compute the missing blocks. Collective."""
        missing = [
            block for block in self.blocks if not files.has(block.stem(self.directory), *self.names)
        ]
        team.wait()  # all processes have seen the same files
        done = len(self.blocks) - len(missing)
        team.say(f"{self.title}: {done} of {len(self.blocks)} blocks done before")
        for block in team.share(missing):
            files.write(block.stem(self.directory), self.compute(block))
        team.wait()

    def validate(self, files: ArrayFiles, team: Team, fraction: float) -> None:
        """Compute a part of the blocks again and compare. Collective. Raises NotReproduced."""
        count = max(1, round(fraction * len(self.blocks)))
        chosen = np.random.default_rng(0).permutation(len(self.blocks))[:count]
        for number in team.share(sorted(chosen.tolist())):
            block = self.blocks[number]
            stem = block.stem(self.directory)
            for name, planned in self.compute(block).items():
                made = np.concatenate(list(planned.blocks)) if planned.shape[0] else None
                if not _same(files.read(stem, name), made):
                    raise NotReproduced(
                        f"{stem}: {name} differs from what this build makes; remove the file to build it again"
                    )
        team.wait()
        team.say(f"{self.title}: {count} of {len(self.blocks)} blocks are the same")


def _same(stored: Array, made: Array | None) -> bool:
    if made is None:
        return len(stored) == 0
    return bool(np.array_equal(stored, made))
