"""The ranks' grid and its process groups; the only file that creates groups.

Which ranks they are is mesh.py's.
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
from megatron_lite.parallel.mesh import REPLICAS, Mesh, dense_mesh, expert_mesh
from megatron_lite.settings.wording import counted


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
    """Of tp, pp, vpp, ep and etp, and the layers of each stage."""
    dp: int
    rank: int
    device: torch.device
    groups: Mapping[str, ProcessGroup | None] = field(default_factory=dict)
    """Of this rank, by the axis along which it reaches: `tp`, `cp`; `replicas`: cp and dp as one; for experts `etp`, `ep`, `edp`;
    `ends`: first and last stage, and that with which a decoder begins; `stacks`: the first stages of an encoder and its decoder;
    `world`. Missing where it would be of one rank.
    """
    channels: Mapping[Channel, ProcessGroup | None] = field(default_factory=dict)
    """The group of each kind of message between stages. On gloo one for all of them."""
    cp: int = 1

    def group(self, axis: str) -> ProcessGroup | None:
        return self.groups.get(axis)

    @property
    def mesh(self) -> Mesh:
        """Of dense parameters."""
        return dense_mesh(self.layout, self.dp, self.cp)

    @property
    def world(self) -> int:
        return self.mesh.size

    @property
    def tp_rank(self) -> int:
        return self.mesh.place(self.rank)["tp"]

    @property
    def cp_rank(self) -> int:
        return self.mesh.place(self.rank)["cp"]

    @property
    def dp_rank(self) -> int:
        return self.mesh.place(self.rank)["dp"]

    @property
    def pp_rank(self) -> int:
        return self.mesh.place(self.rank)["pp"]

    @property
    def column(self) -> ProcessGroup | None:
        """The stages that this rank's microbatches pass through; None where there is one."""
        return next(iter(self.channels.values()), None)

    def rank_along(self, axis: str) -> int:
        """Of this rank among those of its group."""
        if axis == "replicas":
            return self.cp_rank + self.cp * self.dp_rank
        dense = self.mesh
        return (dense if axis in dict(dense.axes) else expert_mesh(self.layout, self.dp, self.cp)).place(self.rank)[
            axis
        ]

    def experts_place(self) -> tuple[int, int]:
        """(along ep, along etp): which experts this rank has, and which part of each."""
        place = expert_mesh(self.layout, self.dp, self.cp).place(self.rank)
        return place["ep"], place["etp"]

    def is_turn(self, axis: str, number: int) -> bool:
        """Whether of all ranks along an axis this one is to do the thing of this number, which one of them has to do."""
        return number % comm.size(self.group(axis)) == self.rank_along(axis)

    def chunks(self) -> list[Chunk]:
        """This rank's virtual stages."""
        return [chunk for chunk in self.layout.chunks() if chunk.pp_rank == self.pp_rank]

    def rank_of_stage(self, pp_rank: int) -> int:
        """The global rank at this place of another stage."""
        mesh = self.mesh
        return mesh.rank(mesh.place(self.rank) | {"pp": pp_rank})

    def close(self) -> None:
        """Destroy all groups but the world's."""
        made = [group for axis, group in self.groups.items() if axis != "world"]
        for group in dict.fromkeys([*made, *self.channels.values()]):
            if group is not None:
                dist.destroy_process_group(group)


def make_grid(
    layout: Layout, dp: int, device: torch.device, *, cp: int = 1, near: int = 1, experts: bool = False
) -> Grid:
    """Collective over the default process group, which exists unless the world is one process.

    near: of the context ranks, how many neighbours are a group of their own, for a2a+p2p. experts: whether the model has any.
    Raises LayoutError where tp x cp x dp x pp isn't the number of processes.
    """
    tp, pp = layout.tp, layout.pp
    world = dist.get_world_size() if dist.is_initialized() else 1
    dense = dense_mesh(layout, dp, cp)
    if dense.size != world:
        names, sizes = ("tp x cp x dp x pp", (tp, cp, dp, pp)) if cp > 1 else ("tp x dp x pp", (tp, dp, pp))
        product = " x ".join(map(str, sizes))
        raise LayoutError(
            f"{names} = {product} = {dense.size}, but there {'is' if world == 1 else 'are'} {counted(world, 'process', 'processes')}"
        )
    wanted = {"tp": dense.groups("tp"), "replicas": dense.groups(*REPLICAS)}
    if experts:
        wanted |= {axis: expert_mesh(layout, dp, cp).groups(axis) for axis in ("etp", "ep", "edp")}
    if world == 1:
        return Grid(layout, dp, 0, device)
    rank, columns = dist.get_rank(), dense.groups("pp")
    if pp > 1:
        split = layout.split_rank  # where a decoder begins it has an embedding again
        wanted["ends"] = [sorted({column[0], column[split], column[-1]}) for column in columns]
        if split:
            wanted["stacks"] = [[column[0], column[split]] for column in columns]
    made = _Groups(rank, device)
    groups = {axis: made.own(ranks) for axis, ranks in wanted.items()}
    rows = dense.groups("cp")
    groups["cp"] = _Groups(rank, device).own(rows)  # its own, so that keys don't queue behind gradients
    if near > 1:
        groups["cp_near"] = made.own([row[at : at + near] for row in rows for at in range(0, cp, near)])
        groups["cp_far"] = made.own([row[at::near] for row in rows for at in range(near)])
    grid = Grid(
        layout,
        dp,
        rank,
        device,
        {"world": dist.group.WORLD, **groups},
        _make_channels(columns, layout, rank, device),
        cp,
    )
    _warm_up(grid)
    return grid


def _make_channels(
    columns: list[list[int]], layout: Layout, rank: int, device: torch.device
) -> dict[Channel, ProcessGroup | None]:
    """Messages on gloo have tags. NCCL keeps the order of sends between two ranks instead, whatever they are for."""
    used = list(dict.fromkeys(meeting.channel for meeting in meetings(layout.pp, layout.vpp)))
    if device.type == "cuda":
        return {channel: _Groups(rank, device).own(columns) for channel in used}
    return dict.fromkeys(used, _Groups(rank, device).own(columns)) if used else {}


def _warm_up(grid: Grid) -> None:
    """Make every communicator now, in one order on all ranks, not when it is first needed."""
    number = torch.zeros(1, device=grid.device)
    for group in dict.fromkeys(grid.groups.values()):
        comm.all_reduce(number, group)
    for tag, (channel, (sender, receiver)) in enumerate(meetings(grid.layout.pp, grid.layout.vpp)):
        if grid.pp_rank == sender:
            comm.send(number, grid.rank_of_stage(receiver), grid.channels[channel], tag).wait()
        elif grid.pp_rank == receiver:
            comm.receive(number, grid.rank_of_stage(sender), grid.channels[channel], tag).wait()


class _Groups:
    """Makes groups, each once: axes along which the same ranks lie share one."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        # On GPUs not what the world has beside it: a mesh of sockets on gloo for every group.
        self._backend = "nccl" if device.type == "cuda" else None
        self._made: dict[tuple[int, ...], ProcessGroup] = {}

    def own(self, groups: list[list[int]]) -> ProcessGroup | None:
        """Of these groups the one that this rank is in. All ranks name all of them, in one order; only members have anything to do.

        Members alone could name theirs, but torch would call a group as it called one of the same ranks that was closed before,
        and find that one's addresses in the store.
        """
        own = None
        for ranks in groups:
            if len(ranks) > 1:
                if tuple(ranks) not in self._made:
                    self._made[tuple(ranks)] = dist.new_group(ranks, backend=self._backend)
                own = self._made[tuple(ranks)] if self._rank in ranks else own
        return own
