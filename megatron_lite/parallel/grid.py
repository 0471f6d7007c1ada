"""The ranks' grid and its process groups; the only file that creates groups.

Ranks count as Megatron's do, tensor ranks fastest, then data-parallel ranks, then stages:
rank = tp_rank + tp * (dp_rank + dp * pp_rank).
"""

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megaconv.errors import LayoutError
from megaconv.model.layout import Chunk, Layout


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
    """Forward from a stage to the next one. On gloo everything between stages."""
    backward_group: ProcessGroup | None = None
    wrap_group: ProcessGroup | None = None
    """Forward from the last rank to the first, where virtual stages are interleaved."""
    wrap_backward_group: ProcessGroup | None = None
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

    def rank_of_stage(self, pp_rank: int) -> int:
        """The global rank at this place of another stage."""
        return self.tp_rank + self.layout.tp * (self.dp_rank + self.dp * pp_rank)

    def close(self) -> None:
        """Destroy all groups but the world's."""
        for group in {getattr(self, item.name) for item in fields(self) if item.name.endswith("_group")}:
            if group is not None and group is not self.world_group:
                dist.destroy_process_group(group)


def make_grid(layout: Layout, dp: int, device: torch.device) -> Grid:
    """Collective over the default process group, which exists unless the world is one process.

    Raises LayoutError where tp x dp x pp isn't the number of processes.
    """
    tp, pp = layout.tp, layout.pp
    world = dist.get_world_size() if dist.is_initialized() else 1
    if tp * dp * pp != world:
        raise LayoutError(f"tp x dp x pp = {tp} x {dp} x {pp} = {tp * dp * pp}, but there are {world} processes")
    if world == 1:
        return Grid(layout, dp, 0, device)
    rank = dist.get_rank()
    at = [[[t + tp * (d + dp * p) for t in range(tp)] for d in range(dp)] for p in range(pp)]
    columns = [[at[p][d][t] for p in range(pp)] for d in range(dp) for t in range(tp)]
    pipeline = _own_group(columns, rank)
    # Messages on gloo have tags. NCCL keeps the order of sends between two ranks instead, whatever they are for.
    separate = pp > 1 and dist.get_backend() == "nccl"
    return Grid(
        layout, dp, rank, device,
        world_group=dist.group.WORLD,
        tp_group=_own_group([at[p][d] for p in range(pp) for d in range(dp)], rank),
        dp_group=_own_group([[at[p][d][t] for d in range(dp)] for p in range(pp) for t in range(tp)], rank),
        pp_group=pipeline,
        backward_group=_own_group(columns, rank) if separate else pipeline,
        wrap_group=_own_group(columns, rank) if separate and layout.vpp > 1 else pipeline,
        wrap_backward_group=_own_group(columns, rank) if separate and layout.vpp > 1 else pipeline,
        tied_group=_own_group([[column[0], column[-1]] for column in columns] if pp > 1 else [], rank),
    )  # fmt: skip


def _own_group(groups: list[list[int]], rank: int) -> ProcessGroup | None:
    """Make these groups, of which this rank is in one at most; all ranks make all of them, one after the other.

    Members alone could make theirs, but torch would call a group as it called one of the same ranks that was closed before,
    and find that one's addresses in the store.
    """
    own = None
    for ranks in groups:
        if len(ranks) > 1:
            made = dist.new_group(ranks)
            own = made if rank in ranks else own
    return own
