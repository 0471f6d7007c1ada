"""Parameters and their fp32 gradients in flat buckets, reduced over the data-parallel ranks while the backward pass goes on.

Buckets are filled in the order in which a forward pass uses parameters, layer by layer; parameters of experts, which other ranks
share, have buckets of their own. A gradient is added to its bucket as soon as autograd has it, and forgotten. In a chunk's last
backward pass of a step a bucket is reduced when it has all of them and every bucket behind it has been: strictly from the last
to the first on every rank, whether or not a gradient came, since ranks have to start the same collectives in the same order.
With a distributed optimizer each rank gets the sum of its own part of every bucket only, and updated parameters are gathered
from the first bucket on, since that is what the next forward pass begins with. Matrices that have to stay whole are in buckets of
their own, in the order of the ranks that update them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from megatron_lite.parallel import comm
from megatron_lite.parallel.dealing import Dealer
from megatron_lite.parallel.muon import takes
from megatron_lite.parallel.parameters import ParameterInfo, replace_parameter

ALIGNMENT = 16
"""Elements: parameters, and the parts of the ranks, begin at multiples of this."""


@dataclass(frozen=True)
class Member:
    """One parameter's place in a bucket."""

    info: ParameterInfo
    start: int
    end: int


@dataclass(eq=False)
class Bucket:
    """data: parameters in the model's dtype; gradients: float32; both [size], and padded."""

    members: list[Member]
    data: Tensor
    gradients: Tensor
    bounds: Sequence[int]
    """Where the ranks' parts begin, and the end of the last; without `distributed` there is one, which all of them update."""
    own: slice
    """What this rank updates."""
    group: ProcessGroup | None
    distributed: bool
    dealt: bool
    """Whether the parts are of different lengths."""
    sent_as: torch.dtype
    """In which gradients go from rank to rank, and are summed there."""
    missing: int = 0
    """Gradients that the last backward pass has not brought yet."""
    launched: bool = False
    reducing: Work | comm.Works | None = None
    sent: Tensor | None = None
    """The gradients on their way, where not themselves are."""
    gathering: Work | comm.Works | None = None
    written: set[str] = field(default_factory=set)
    """Parameters whose gradients are of this step; what the others hold is of an older one."""

    def add(self, member: Member, gradient: Tensor) -> None:
        main = self.gradients[member.start : member.end].view_as(gradient)
        if member.info.name in self.written:
            main.add_(gradient)
        else:
            main.copy_(gradient)
            self.written.add(member.info.name)

    def launch(self) -> None:
        """Start to sum the gradients over the data-parallel ranks."""
        for member in self.members:
            if member.info.name not in self.written:
                self.gradients[member.start : member.end].zero_()
        self.launched = True
        if self.group is not None and self.sent_as != self.gradients.dtype:
            self.sent = self.gradients.to(self.sent_as)
        whole = self.gradients if self.sent is None else self.sent
        if self.distributed and self.dealt:
            self.reducing = comm.reduce_to_owners(whole, self.bounds, self.group)
        elif self.distributed:
            self.reducing = comm.reduce_scatter(whole[self.own], whole, self.group, later=True)
        else:
            self.reducing = comm.all_reduce(whole, self.group, later=True)

    def finish(self) -> None:
        """Afterwards `gradients[own]` is the sum."""
        if not self.launched:
            self.launch()
        comm.wait(self.reducing)
        self.reducing = None  # gloo keeps a copy of the bucket as long as this lives
        if self.sent is not None:
            self.gradients[self.own] = self.sent[self.own]
            self.sent = None

    def gather(self) -> None:
        """Start to fetch the other ranks' parts of the parameters."""
        if self.distributed and self.dealt:
            self.gathering = comm.gather_from_owners(self.data, self.bounds, self.group)
        elif self.distributed:
            self.gathering = comm.all_gather(self.data, self.data[self.own], self.group, later=True)

    def wait(self) -> None:
        """For the parameters."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def begin(self) -> None:
        """A new step."""
        self.missing, self.launched = len(self.members), False
        self.written.clear()


class ChunkBuckets:
    """All buckets of one chunk, whose parameters become views of them."""

    def __init__(
        self,
        chunk: nn.Module,
        infos: Sequence[ParameterInfo],
        dtype: torch.dtype,
        device: torch.device,
        groups: Callable[[str], ProcessGroup | None],
        *,
        bucket_elements: int,
        distributed: bool,
        overlap: bool,
        sent_as: torch.dtype = torch.float32,
        dealer: Dealer | None = None,
    ) -> None:
        """chunk: on the meta device, with trained parameters of these names and shapes, in the order of a forward pass.

        groups: by what a parameter is reduced over. dealer: shares out Muon's matrices; None: they are cut like all others.
        """
        self.overlap, self.is_last_pass = overlap, False
        self.buckets: list[Bucket] = []
        """In the order of a forward pass."""
        self._of: dict[int, Bucket] = {}
        for members, used in fill(list(infos), bucket_elements, deals=dealer is not None):
            axis = members[0].info.reduced_over
            dealt = dealer is not None and takes(members[0].info)
            bucket = _make(
                members, used, dtype, device, groups(axis), distributed=distributed, sent_as=sent_as,
                dealer=dealer if dealt else None,
            )  # fmt: skip
            self.buckets.append(bucket)
            for member in bucket.members:
                view = bucket.data[member.start : member.end].view(member.info.native.shape)
                parameter = nn.Parameter(view)
                replace_parameter(chunk, member.info.name, parameter)
                self._of[id(parameter)] = bucket
                self._add_when_made(parameter, bucket, member)

    def _add_when_made(self, parameter: nn.Parameter, bucket: Bucket, member: Member) -> None:
        def add(made: Tensor) -> None:
            assert made.grad is not None
            bucket.add(member, made.grad)
            made.grad = None
            if self.is_last_pass:
                bucket.missing -= 1
                if not bucket.missing and self.overlap:
                    self._launch_complete()

        parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    def _launch_complete(self) -> None:
        """From the last bucket on, up to the first that still lacks a gradient."""
        for bucket in reversed(self.buckets):
            if bucket.missing:
                return
            if not bucket.launched:
                bucket.launch()

    def wait_before(self, modules: Iterator[nn.Module]) -> None:
        """Have each of these modules, when it is called, wait for the parameters it uses."""
        for module in modules:
            found = [self._of[id(parameter)] for parameter in module.parameters() if id(parameter) in self._of]
            used = list({id(bucket): bucket for bucket in found}.values())

            def wait(*_: object, used: list[Bucket] = used) -> None:
                for bucket in used:
                    bucket.wait()

            module.register_forward_pre_hook(wait)

    def begin(self) -> None:
        """A new step: gradients are those of the passes that follow."""
        self.is_last_pass = False
        for bucket in self.buckets:
            bucket.begin()

    def finish(self) -> None:
        """Wait until all gradients are sums over the data-parallel ranks."""
        for bucket in reversed(self.buckets):
            bucket.finish()


def _make(
    members: list[Member],
    used: int,
    dtype: torch.dtype,
    device: torch.device,
    group: comm.Group,
    *,
    distributed: bool,
    sent_as: torch.dtype,
    dealer: Dealer | None,
) -> Bucket:
    ranks = comm.size(group)
    if dealer is not None:
        members, bounds = _dealt(members, dealer, ranks)
    else:
        size = padded(used, ranks)
        bounds = list(range(0, size + 1, size // ranks if distributed else size))
    index = group.rank() if distributed and group is not None else 0
    data = torch.zeros(bounds[-1], dtype=dtype, device=device)
    gradients = torch.zeros(bounds[-1], dtype=torch.float32, device=device)
    return Bucket(
        members, data, gradients, bounds, slice(*bounds[index : index + 2]), group, distributed and group is not None,
        dealer is not None, sent_as,
    )  # fmt: skip


def _dealt(members: list[Member], dealer: Dealer, ranks: int) -> tuple[list[Member], list[int]]:
    """(members, moved so that those of each rank are neighbours, where the ranks' parts begin and end)"""
    owners = dealer.owners([member.end - member.start for member in members], members[0].info.reduced_over, ranks)
    lengths, moved = [0] * ranks, []
    for rank in range(ranks):
        begin = sum(lengths)
        for member in (member for member, owner in zip(members, owners, strict=True) if owner == rank):
            count, start = member.end - member.start, begin + lengths[rank]
            moved.append(replace(member, start=start, end=start + count))
            lengths[rank] += _up(count, ALIGNMENT)
    return moved, [0, *accumulate(lengths)]


def fill(infos: Sequence[ParameterInfo], most: int, *, deals: bool = False) -> Iterator[tuple[list[Member], int]]:
    """(members, elements) of each bucket, in the order of their first members. deals: Muon's matrices are apart from all else.

    A bucket takes whole units (a layer, the embedding, the head) until it has `most` elements. A tied embedding has one of its own,
    sharded alike on both its ranks.
    """
    filling: dict[str, tuple[list[Member], int]] = {}
    done: list[tuple[list[Member], int]] = []
    for _, together in groupby(infos, key=_unit):
        for info in together:
            kind = f"tied {info.name}" if info.tied else info.reduced_over
            kind += " whole" if deals and takes(info) else ""
            members, used = filling.get(kind, ([], 0))
            count = torch.Size(info.native.shape).numel()
            members.append(Member(info, used, used + count))
            filling[kind] = members, _up(used + count, ALIGNMENT)
        full = [kind for kind, (_, used) in filling.items() if used >= most]
        done += [filling.pop(kind) for kind in full]
    done += filling.values()
    order = {info.name: place for place, info in enumerate(infos)}
    yield from sorted(done, key=lambda bucket: order[bucket[0][0].info.name])


def _unit(info: ParameterInfo) -> str:
    """What a forward pass waits for as one: a layer, or what stands outside of them."""
    parts = info.name.split(".")
    return ".".join(parts[:3]) if parts[1:2] == ["layers"] else ".".join(parts[:2])


def padded(used: int, ranks: int) -> int:
    """Elements of a bucket, so that every rank has a part that is aligned."""
    return _up(used, ranks * ALIGNMENT)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
