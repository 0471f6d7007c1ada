"""Parameters and their gradients in flat buckets, which data-parallel ranks reduce during the backward pass.

A bucket holds parameters in the order in which a forward pass uses them, layer by layer. Parameters of experts have
separate buckets, because other ranks share them. Matrices that have to stay whole (Muon's) also have separate buckets,
in the order of the ranks that update them. Parameters that are float32 in a model of any dtype have separate buckets,
because a bucket is one tensor.

Autograd's gradient is added to the bucket as soon as it exists and then freed. In a chunk's last backward pass of a
step, a bucket is reduced when all its gradients exist and all later buckets are reduced. The order is always from the
last bucket to the first, whether or not a gradient arrived. All ranks have to start the same collectives in the same
order.

With a distributed optimizer, each rank receives only the sum of its own part of a bucket. The updated parameters are
gathered from the first bucket on, because the next forward pass begins with it.

shards.py has the buckets of which a rank keeps only its part of the gradients, or of the parameters too.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.optimizer.dealing import Dealer
from megatron_lite.optimizer.filling import ALIGNMENT, Filling, Member, aligned, padded
from megatron_lite.parallel import comm


class Parts(NamedTuple):
    """The division of a bucket among the data-parallel ranks."""

    members: list[Member]
    """In the order of the ranks that update them."""
    bounds: list[int]
    """The start of each rank's part, and the end of the last part. Without `distributed`, there is one part for all ranks."""
    own: slice
    """The part that this rank updates."""
    group: ProcessGroup | None
    distributed: bool
    dealt: bool
    """True if the parts have different lengths, because whole matrices are assigned to ranks."""

    @property
    def size(self) -> int:
        """Elements of the bucket, including padding."""
        return self.bounds[-1]

    @property
    def own_size(self) -> int:
        size: int = self.own.stop - self.own.start
        return size


@dataclass(eq=False)
class Bucket:
    """One bucket. data: parameters of one dtype; gradients: float32 or bf16; both [size], including padding."""

    parts: Parts
    data: Tensor
    gradients: Tensor
    sent_as: torch.dtype
    """The dtype in which ranks send and sum gradients."""
    missing: int = 0
    """Number of gradients that the last backward pass has not produced yet."""
    launched: bool = False
    reducing: comm.Call | comm.Works | None = None
    sent: Tensor | None = None
    """The gradients in the dtype in which they are sent; None if they have that dtype already."""
    gathering: comm.Call | comm.Works | None = None
    written: set[str] = field(default_factory=set)
    """Parameters whose gradients belong to this step. The bucket's other gradients are from an older step."""

    @property
    def members(self) -> list[Member]:
        return self.parts.members

    @property
    def elements(self) -> int:
        """Elements, including padding."""
        return self.parts.size

    @property
    def own_gradients(self) -> Tensor:
        """The gradients of the part that this rank updates."""
        return self.gradients[self.parts.own]

    @property
    def master_is_parameter(self) -> bool:
        """True if the parameters need no separate float32 master."""
        return self.data.dtype == torch.float32

    @property
    def kept_bytes(self) -> int:
        """Bytes of parameters and gradients between two steps."""
        return self.data.nbytes + self.gradients.nbytes

    def master(self) -> Tensor:
        """Return this rank's part in float32: the parameters themselves if they are float32."""
        return self.data[self.parts.own].detach().float()

    def publish(self, master: Tensor) -> None:
        """Round the masters to this rank's part of the parameters, and start to fetch the other parts."""
        part = self.data[self.parts.own]
        # In fp32, the master is the parameter itself.
        if master.data_ptr() != part.data_ptr():
            part.copy_(master)
        self.gather()

    def take_masters(self, master: Tensor) -> None:
        """Set the masters after a change of parameters."""
        self.wait()
        master.copy_(self.data[self.parts.own])

    def add(self, member: Member, gradient: Tensor) -> None:
        """Add a gradient to the sum. The first one replaces an older sum."""
        total, holds = self.place(member)
        if holds:
            total.add_(gradient)
        else:
            total.copy_(gradient)

    def place(self, member: Member) -> tuple[Tensor, bool]:
        """Return (the sum of a parameter's gradients in its shape, whether it holds gradients that count).

        From the call on, the gradients in it count.
        """
        name = member.info.name
        holds = name in self.written
        self.written.add(name)
        total = self._sums()[member.start : member.end]
        return total.view(member.info.native.shape), holds

    def _sums(self) -> Tensor:
        """Return the memory to which backward passes add gradients: [size], in the dtype of the gradients."""
        return self.gradients

    def launch(self) -> None:
        """Start to sum the gradients over the data-parallel ranks."""
        self.launched = True
        self._clear_unwritten(self.gradients)
        self.reducing = self._reduce(self.gradients)

    def _clear_unwritten(self, gradients: Tensor) -> None:
        """Set the gradients to 0 that did not come. Their memory still holds older ones."""
        for member in self.members:
            if member.info.name not in self.written:
                gradients[member.start : member.end].zero_()

    def _reduce(self, gradients: Tensor) -> comm.Call | comm.Works | None:
        """Start to sum gradients of the whole bucket. The sum arrives in place, or in `sent`."""
        parts = self.parts
        if parts.group is not None and self.sent_as != gradients.dtype:
            self.sent = gradients.to(self.sent_as)
        whole = gradients if self.sent is None else self.sent
        if parts.distributed and parts.dealt:
            return comm.reduce_to_owners(whole, parts.bounds, parts.group)
        if parts.distributed:
            return comm.reduce_scatter(whole[parts.own], whole, parts.group, later=True)
        return comm.all_reduce(whole, parts.group, later=True)

    def finish(self) -> None:
        """Wait for the sum. Then `own_gradients` holds it."""
        if not self.launched:
            self.launch()
        comm.wait(self.reducing)
        self.reducing = None  # gloo keeps a copy of the bucket until this object is freed
        if self.sent is not None:
            self.own_gradients.copy_(self.sent[self.parts.own])
            self.sent = None

    def gather(self) -> None:
        """Start to fetch the other ranks' parts of the parameters."""
        self.gathering = gather_parts(self.data, self.parts)

    def wait(self) -> None:
        """Wait until all parameters have arrived."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def begin(self) -> None:
        """Start a new step."""
        self.missing, self.launched = len(self.members), False
        self.written.clear()


def gather_parts(data: Tensor, parts: Parts) -> comm.Call | comm.Works | None:
    """Start to fetch the other ranks' parts of a bucket's parameters."""
    if parts.distributed and parts.dealt:
        return comm.gather_from_owners(data, parts.bounds, parts.group)
    if parts.distributed:
        return comm.all_gather(data, data[parts.own], parts.group, later=True)
    return None


def divide(filling: Filling, group: comm.Group, dealer: Dealer, *, distributed: bool) -> Parts:
    """Return the parts of a bucket."""
    ranks = comm.size(group)
    distributed = distributed and group is not None
    if filling.whole:
        members, bounds = _dealt(filling, dealer, ranks)
    else:
        size = padded(filling.elements, ranks)
        members, bounds = filling.members, _even_bounds(size, ranks if distributed else 1)
    index = group.rank() if distributed and group is not None else 0
    own = slice(bounds[index], bounds[index + 1])
    return Parts(members, bounds, own, group, distributed, filling.whole)


def _even_bounds(size: int, parts: int) -> list[int]:
    """Return the start of each part, and the end of the last part."""
    return list(range(0, size + 1, size // parts))


def _dealt(filling: Filling, dealer: Dealer, ranks: int) -> tuple[list[Member], list[int]]:
    """Return (members, bounds of the ranks' parts). The members are moved so that each rank's members are contiguous."""
    elements = [member.end - member.start for member in filling.members]
    owners = dealer.owners(elements, filling.axis, ranks)
    moved: list[Member] = []
    bounds = [0]
    for rank in range(ranks):
        start = bounds[-1]
        for member, count, owner in zip(filling.members, elements, owners, strict=True):
            if owner == rank:
                moved.append(replace(member, start=start, end=start + count))
                start += aligned(count, ALIGNMENT)
        bounds.append(start)
    return moved, bounds
