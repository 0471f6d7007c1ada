"""The grid of ranks and its process groups. This is the only file that creates groups; mesh.py computes their ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from formats.wording import are, counted
from megaconv.errors import LayoutError
from megaconv.model.layout import Chunk, Layout
from megatron_lite.parallel import comm
from megatron_lite.parallel.mesh import REPLICAS, Mesh, dense_mesh, expert_mesh

NCCL, NCCL_OF_PAIRS = "nccl", "nccl-lazy"
"""Backends of groups on GPUs."""


class Channel(NamedTuple):
    """One kind of message between stages."""

    backward: bool
    """True: a gradient, sent backward. False: an activation, sent forward."""
    wraps: bool
    """True between the last rank and the first, which exist with interleaved virtual stages."""


class Meeting(NamedTuple):
    """Two neighbouring pipeline ranks that create a communicator."""

    channel: Channel
    ranks: tuple[int, int]
    """Pipeline ranks: (the rank that sends in the forward direction, the rank that receives)."""


def meetings(pp: int, vpp: int) -> list[Meeting]:
    """Return all communicators between stages, in the order in which every rank creates its own.

    NCCL creates a communicator when the first message passes between two ranks. Each of the two blocks until the other
    comes. A rank that requests a message early, as the pipeline does, could then wait for a rank that waits for it.
    Every other pair comes first, so that pairs connect in parallel. Any order is correct if it is the same on all
    ranks.
    """
    pairs = sorted(
        ((rank, rank + 1) for rank in range(pp - 1)), key=lambda pair: (pair[0] % 2, pair[0])
    )
    found = [
        Meeting(Channel(backward, False), pair) for backward in (False, True) for pair in pairs
    ]
    if pp > 1 and vpp > 1:
        found += [Meeting(Channel(backward, True), (pp - 1, 0)) for backward in (False, True)]
    return found


@dataclass(frozen=True)
class Grid:
    """One rank's place in the grid, and its groups. A group of one rank is None."""

    layout: Layout
    """The sizes tp, pp, vpp, ep and etp, and the layers of each stage."""
    dp: int
    rank: int
    device: torch.device
    groups: Mapping[str, ProcessGroup | None] = field(default_factory=dict)
    """This rank's groups by axis. A group of one rank is missing.

    - `tp`, `cp`; `replicas`: cp and dp combined
    - `etp`, `ep`, `edp`: for experts
    - `ends`: the first and the last stage, and the stage where a decoder begins
    - `stacks`: the first stages of an encoder and of its decoder
    - `world`
    """
    channels: Mapping[Channel, ProcessGroup | None] = field(default_factory=dict)
    """The group of each kind of message between stages. On gloo all kinds share one group."""
    cp: int = 1

    def group(self, axis: str) -> ProcessGroup | None:
        """Return this rank's group along an axis; None for a group of one rank."""
        return self.groups.get(axis)

    @property
    def mesh(self) -> Mesh:
        """The mesh of dense parameters."""
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
        """The stages that this rank's microbatches pass through; None if there is one stage."""
        return next(iter(self.channels.values()), None)

    def rank_along(self, axis: str) -> int:
        """Return this rank's index in its group along the axis."""
        if axis == "replicas":
            return self.cp_rank + self.cp * self.dp_rank
        mesh = self.mesh
        if axis not in dict(mesh.axes):
            mesh = expert_mesh(self.layout, self.dp, self.cp)
        return mesh.place(self.rank)[axis]

    def experts_place(self) -> tuple[int, int]:
        """Return (ep rank, etp rank): the experts of this rank, and its part of each expert."""
        place = expert_mesh(self.layout, self.dp, self.cp).place(self.rank)
        return place["ep"], place["etp"]

    def is_turn(self, axis: str, number: int) -> bool:
        """Return whether this rank does job `number`. The jobs are distributed round-robin over the ranks along the axis."""
        return number % comm.size(self.group(axis)) == self.rank_along(axis)

    def chunks(self) -> list[Chunk]:
        """Return this rank's virtual stages."""
        return [chunk for chunk in self.layout.chunks() if chunk.pp_rank == self.pp_rank]

    def rank_of_stage(self, pp_rank: int) -> int:
        """Return the global rank that has this rank's place in another stage."""
        mesh = self.mesh
        return mesh.rank(mesh.place(self.rank) | {"pp": pp_rank})

    def close(self) -> None:
        """Destroy all groups except the world's."""
        made = [group for axis, group in self.groups.items() if axis != "world"]
        for group in dict.fromkeys([*made, *self.channels.values()]):
            if group is not None:
                dist.destroy_process_group(group)


def make_grid(
    layout: Layout,
    dp: int,
    device: torch.device,
    *,
    cp: int = 1,
    near: int = 1,
    experts: bool = False,
    timeout: timedelta | None = None,
) -> Grid:
    """Create the grid and its groups. Collective over the default process group.

    That group exists unless there is only one process.
    near: number of neighbouring context ranks that form a group, for a2a+p2p. experts: True if the model has experts.
    timeout: how long a call of each group waits for the other ranks; None: torch's default.
    Raises LayoutError if tp x cp x dp x pp is not the number of processes.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    _check_world(layout, dp, cp, world)
    dense = dense_mesh(layout, dp, cp)
    wanted = {"tp": dense.groups("tp"), "replicas": dense.groups(*REPLICAS)}
    if experts:
        of_experts = expert_mesh(layout, dp, cp)
        wanted |= {axis: of_experts.groups(axis) for axis in ("etp", "ep", "edp")}
    if world == 1:
        return Grid(layout, dp, 0, device)
    columns = dense.groups("pp")
    contexts = dense.groups("cp")
    wanted |= _holders_of_tables(columns, layout)
    rank = dist.get_rank()
    made = _Groups(rank, device, timeout)
    groups = {axis: made.own(ranks) for axis, ranks in wanted.items()}
    # A separate group, so that keys don't queue behind gradients.
    groups["cp"] = _Groups(rank, device, timeout).own(contexts)
    if near > 1:
        groups["cp_near"] = made.own(_near(contexts, near))
        groups["cp_far"] = made.own(_far(contexts, near))
    everyone = {"world": dist.group.WORLD}
    channels = _make_channels(columns, layout, rank, device, timeout)
    grid = Grid(
        layout,
        dp,
        rank,
        device,
        groups=everyone | groups,
        channels=channels,
        cp=cp,
    )
    _warm_up(grid)
    return grid


def _check_world(layout: Layout, dp: int, cp: int, world: int) -> None:
    """Raise LayoutError if the sizes don't need exactly `world` processes."""
    needed = dense_mesh(layout, dp, cp).size
    if needed == world:
        return
    context = {"cp": cp} if cp > 1 else {}
    sizes = {"tp": layout.tp, **context, "dp": dp, "pp": layout.pp}
    names = " x ".join(sizes)
    product = " x ".join(map(str, sizes.values()))
    raise LayoutError(
        f"{names} = {product} = {needed}, but there {are(world)} {counted(world, 'process', 'processes')}"
    )


def _holders_of_tables(columns: list[list[int]], layout: Layout) -> dict[str, list[list[int]]]:
    """Return the ranks by axis that may hold copies of one table. columns: the ranks of all stages, in order."""
    if layout.pp == 1:
        return {}
    split = layout.split_rank  # the stage where a decoder begins has another embedding
    found = {"ends": [sorted({column[0], column[split], column[-1]}) for column in columns]}
    if split:
        found["stacks"] = [[column[0], column[split]] for column in columns]
    return found


def _near(rows: list[list[int]], near: int) -> list[list[int]]:
    """Return groups of `near` neighbours in each row."""
    return [row[start : start + near] for row in rows for start in range(0, len(row), near)]


def _far(rows: list[list[int]], near: int) -> list[list[int]]:
    """Return groups of the ranks with the same place among their neighbours in each row."""
    return [row[place::near] for row in rows for place in range(near)]


def _make_channels(
    columns: list[list[int]],
    layout: Layout,
    rank: int,
    device: torch.device,
    timeout: timedelta | None,
) -> dict[Channel, ProcessGroup | None]:
    """Create the groups for messages. gloo distinguishes messages by tags, so all kinds share one group.

    NCCL has no tags and delivers the messages between two ranks in order, so each kind of message needs its own group.
    """
    used = list(dict.fromkeys(meeting.channel for meeting in meetings(layout.pp, layout.vpp)))
    if device.type == "cuda":
        backend = _backend_of_messages()
        return {channel: _Groups(rank, device, timeout, backend).own(columns) for channel in used}
    return dict.fromkeys(used, _Groups(rank, device, timeout).own(columns)) if used else {}


def _backend_of_messages() -> str:
    """Return the backend with which each pair of ranks has a communicator of its own.

    Before torch 2.15, NCCL's groups have one for each pair. Since then they have a single one for all messages of a group,
    and a message to one rank waits for earlier messages to other ranks. That torch has another backend with the pairs.
    """
    has_other = NCCL_OF_PAIRS in dist.Backend.backend_list
    return NCCL_OF_PAIRS if has_other else NCCL


def _warm_up(grid: Grid) -> None:
    """Create every communicator now, in the same order on all ranks, and not at its first use."""
    number = torch.zeros(1, device=grid.device)
    for group in dict.fromkeys(grid.groups.values()):
        comm.all_reduce(number, group)
    for tag, (channel, (sender, receiver)) in enumerate(meetings(grid.layout.pp, grid.layout.vpp)):
        if grid.pp_rank == sender:
            comm.send(number, grid.rank_of_stage(receiver), grid.channels[channel], tag).wait()
        elif grid.pp_rank == receiver:
            comm.receive(number, grid.rank_of_stage(sender), grid.channels[channel], tag).wait()


class _Groups:
    """Creates groups, each only once: axes with the same ranks share a group."""

    def __init__(
        self, rank: int, device: torch.device, timeout: timedelta | None, on_gpus: str = NCCL
    ) -> None:
        """on_gpus: the backend on GPUs."""
        self._rank, self._timeout = rank, timeout
        # On GPUs name NCCL: the world's backend would also open a mesh of gloo sockets for every group.
        self._backend = on_gpus if device.type == "cuda" else None
        self._made: dict[tuple[int, ...], ProcessGroup] = {}

    def own(self, groups: list[list[int]]) -> ProcessGroup | None:
        """Create the groups and return the one that contains this rank, or None.

        All ranks pass all groups in the same order; only members have work to do. Members alone could pass their own
        group. But torch would give the group the name of an earlier closed group of the same ranks, and would find the
        closed group's addresses in the store.
        """
        own = None
        for ranks in groups:
            if len(ranks) > 1:
                if tuple(ranks) not in self._made:
                    self._made[tuple(ranks)] = dist.new_group(
                        ranks, timeout=self._timeout, backend=self._backend
                    )
                own = self._made[tuple(ranks)] if self._rank in ranks else own
        return own
