"""The ranks' grid and its process groups; the only file that creates groups.

Ranks count as Megatron's do, tensor ranks fastest, then data-parallel ranks, then stages:
rank = tp_rank + tp * (dp_rank + dp * pp_rank).
"""

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from megaconv.config import ModelConfig
from megaconv.layout import Chunk, Layout
from megatron_lite.options import ModelOptions


@dataclass(frozen=True)
class Grid:
    """One rank's place, and the groups it is in; a group of one rank is None."""

    layout: Layout
    """tp, pp, vpp and the layers of each stage."""
    dp: int
    rank: int
    device: torch.device
    world_group: ProcessGroup | None = None
    tp_group: ProcessGroup | None = None
    dp_group: ProcessGroup | None = None
    pp_group: ProcessGroup | None = None
    tied_group: ProcessGroup | None = None
    """First and last stage of this rank's column, on those two stages alone."""

    @property
    def world(self) -> int:
        return self.layout.tp * self.dp * self.layout.pp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.layout.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.layout.tp % self.dp

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.layout.tp * self.dp)

    def chunks(self) -> list[Chunk]:
        """This rank's virtual stages."""
        return [chunk for chunk in self.layout.chunks() if chunk.pp_rank == self.pp_rank]


def check_sizes(
    config: ModelConfig, layout: Layout, world: int, options: ModelOptions, sequence: int, microbatches: int
) -> int:
    """The data-parallel size. Raises LayoutError, with the arithmetic, for what can't be run; makes no group.

    sequence: tokens of one sequence. microbatches: per data-parallel rank and step.
    """
    raise NotImplementedError


def make_grid(layout: Layout, dp: int, device: torch.device) -> Grid:
    """Collective over the default process group, which exists unless the world is one process."""
    raise NotImplementedError
