"""The ranks' grid and its process groups; the only file that creates groups.

Ranks count as Megatron's do, tensor ranks fastest, then data-parallel ranks, then stages:
rank = tp_rank + tp * (dp_rank + dp * pp_rank).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megaconv.errors import LayoutError
from megaconv.model.layout import Chunk, Layout
from megatron_lite.parallel import comm


class Channel(NamedTuple):
    """One kind of message between stages."""

    backward: bool
    """A gradient on its way back; else an activation on its way forward."""
    wraps: bool
    """Between the last rank and the first, where virtual stages are interleaved."""


class Meeting(NamedTuple):
    """Two neighbouring pipeline ranks that make a communicator of theirs."""

    channel: Channel
    ranks: tuple[int, int]
    """In the pipeline: the one that sends forward, the one that receives."""


def meetings(pp: int, vpp: int) -> list[Meeting]:
    """All communicators between stages, in the one order in which every rank makes those that it has a part in.

    NCCL makes one for two ranks when the first message passes between them, and each of the two blocks until the other comes. A
    rank that asks early for a message, as the pipeline does, would then wait for one that waits for it. Every other pair
    comes first, so that pairs meet side by side; any order would do as long as it is the same everywhere.
    """
    pairs = sorted(((rank, rank + 1) for rank in range(pp - 1)), key=lambda pair: (pair[0] % 2, pair[0]))
    found = [Meeting(Channel(backward, False), pair) for backward in (False, True) for pair in pairs]
    if pp > 1 and vpp > 1:
        found += [Meeting(Channel(backward, True), (pp - 1, 0)) for backward in (False, True)]
    return found


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
    channels: Mapping[Channel, ProcessGroup | None] = field(default_factory=dict)
    """The group of each kind of message between stages. On gloo one for all of them."""
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

    def groups(self) -> list[ProcessGroup]:
        """All but the world's, each once, in the order in which they were made."""
        found = [self.tp_group, self.dp_group, *self.channels.values(), self.tied_group]
        return list(dict.fromkeys(group for group in found if group is not None))

    def close(self) -> None:
        """Destroy all groups but the world's."""
        for group in self.groups():
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
    tp_group = _own_group([at[p][d] for p in range(pp) for d in range(dp)], rank)
    dp_group = _own_group([[at[p][d][t] for d in range(dp)] for p in range(pp) for t in range(tp)], rank)
    grid = Grid(
        layout, dp, rank, device,
        world_group=dist.group.WORLD,
        tp_group=tp_group,
        dp_group=dp_group,
        channels=_make_channels(columns, layout, rank, device),
        tied_group=_own_group([[column[0], column[-1]] for column in columns] if pp > 1 else [], rank),
    )  # fmt: skip
    _warm_up(grid)
    return grid


def _make_channels(
    columns: list[list[int]], layout: Layout, rank: int, device: torch.device
) -> dict[Channel, ProcessGroup | None]:
    """Messages on gloo have tags. NCCL keeps the order of sends between two ranks instead, whatever they are for."""
    used = list(dict.fromkeys(meeting.channel for meeting in meetings(layout.pp, layout.vpp)))
    if device.type == "cuda":
        return {channel: _own_group(columns, rank) for channel in used}
    return dict.fromkeys(used, _own_group(columns, rank))


def _warm_up(grid: Grid) -> None:
    """Make every communicator now, in one order on all ranks, not when it is first needed."""
    number = torch.zeros(1, device=grid.device)
    for group in (grid.world_group, grid.tp_group, grid.dp_group, grid.tied_group):
        comm.all_reduce(number, group)
    for tag, (channel, (sender, receiver)) in enumerate(meetings(grid.layout.pp, grid.layout.vpp)):
        if grid.pp_rank == sender:
            comm.send(number, grid.rank_of_stage(receiver), grid.channels[channel], tag).wait()
        elif grid.pp_rank == receiver:
            comm.receive(number, grid.rank_of_stage(sender), grid.channels[channel], tag).wait()


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
