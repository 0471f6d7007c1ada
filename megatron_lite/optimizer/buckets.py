"""Parameters and their fp32 gradients in flat buckets, which data-parallel ranks reduce during the backward pass.

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
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.optimizer.dealing import Dealer
from megatron_lite.optimizer.filling import ALIGNMENT, Filling, Member, aligned, fill, padded
from megatron_lite.parallel import comm
from megatron_lite.parallel.parameters import ParameterInfo, replace_parameter


@dataclass(eq=False)
class Bucket:
    """One bucket. data: parameters of one dtype; gradients: float32; both [size], including padding."""

    members: list[Member]
    data: Tensor
    gradients: Tensor
    bounds: Sequence[int]
    """The start of each rank's part, and the end of the last part. Without `distributed`, there is one part for all ranks."""
    own: slice
    """The part that this rank updates."""
    group: ProcessGroup | None
    distributed: bool
    dealt: bool
    """True if the parts have different lengths, because whole matrices are assigned to ranks."""
    sent_as: torch.dtype
    """The dtype in which ranks send and sum gradients."""
    missing: int = 0
    """Number of gradients that the last backward pass has not produced yet."""
    launched: bool = False
    reducing: comm.Call | comm.Works | None = None
    sent: Tensor | None = None
    """The gradients in the dtype in which they are sent; None if that dtype is float32."""
    gathering: comm.Call | comm.Works | None = None
    written: set[str] = field(default_factory=set)
    """Parameters whose gradients belong to this step. The bucket's other gradients are from an older step."""

    def add(self, member: Member, gradient: Tensor) -> None:
        """Add a gradient to this step's sum. The first one replaces the sum of an older step."""
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
                # No gradient came in this step; the bucket still holds an older one.
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
        """Wait for the sum. Then `gradients[own]` holds it."""
        if not self.launched:
            self.launch()
        comm.wait(self.reducing)
        self.reducing = None  # gloo keeps a copy of the bucket until this object is freed
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
        """Wait until all parameters have arrived."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def begin(self) -> None:
        """Start a new step."""
        self.missing, self.launched = len(self.members), False
        self.written.clear()


class ChunkBuckets:
    """All buckets of one chunk. The chunk's parameters become views of the buckets."""

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
        dealer: Dealer,
    ) -> None:
        """Create the buckets and replace the chunk's parameters by views of them.

        dtype: of the model; parameters that declare it are float32.
        chunk: on the meta device; it has trained parameters of these names and shapes, in the order of a forward pass.
        groups: the process group for each value of ParameterInfo.reduced_over.
        dealer: assigns to ranks the parameters that it deals as a whole. All other parameters are divided.
        """
        self.overlap, self.is_last_pass = overlap, False
        self.buckets: list[Bucket] = []
        """In the order of a forward pass."""
        self._of: dict[int, Bucket] = {}
        for filling in fill(infos, bucket_elements, dealer.deals):
            group = groups(filling.axis)
            of_bucket = torch.float32 if filling.in_float32 else dtype
            bucket = _make(
                filling,
                of_bucket,
                device,
                group,
                distributed=distributed,
                sent_as=sent_as,
                dealer=dealer,
            )
            self.buckets.append(bucket)
            for member in bucket.members:
                self._take_over(chunk, bucket, member)

    def _take_over(self, chunk: nn.Module, bucket: Bucket, member: Member) -> None:
        """Replace the chunk's parameter by a view of the bucket."""
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
        """Launch buckets from the last to the first, until one still lacks a gradient."""
        for bucket in reversed(self.buckets):
            if bucket.missing:
                return
            if not bucket.launched:
                bucket.launch()

    def wait_before(self, modules: Iterator[nn.Module]) -> None:
        """Register a hook on each module that waits for the module's parameters before its forward pass."""
        for module in modules:
            found = [
                self._of[id(parameter)]
                for parameter in module.parameters()
                if id(parameter) in self._of
            ]
            used = list({id(bucket): bucket for bucket in found}.values())

            def wait(*_: object, used: list[Bucket] = used) -> None:
                for bucket in used:
                    bucket.wait()

            module.register_forward_pre_hook(wait)

    def begin(self) -> None:
        """Start a new step. Older gradients are discarded."""
        self.is_last_pass = False
        for bucket in self.buckets:
            bucket.begin()

    def finish(self) -> None:
        """Wait until all gradients are sums over the data-parallel ranks."""
        for bucket in reversed(self.buckets):
            bucket.finish()


def _make(
    filling: Filling,
    dtype: torch.dtype,
    device: torch.device,
    group: comm.Group,
    *,
    distributed: bool,
    sent_as: torch.dtype,
    dealer: Dealer,
) -> Bucket:
    """Return a bucket of zeros. Its members are in the order of the ranks that update them."""
    ranks = comm.size(group)
    distributed = distributed and group is not None
    if filling.whole:
        members, bounds = _dealt(filling, dealer, ranks)
    else:
        members, bounds = (
            filling.members,
            _even_bounds(padded(filling.elements, ranks), ranks if distributed else 1),
        )
    index = group.rank() if distributed and group is not None else 0
    return Bucket(
        members=members,
        data=torch.zeros(bounds[-1], dtype=dtype, device=device),
        gradients=torch.zeros(bounds[-1], dtype=torch.float32, device=device),
        bounds=bounds,
        own=slice(bounds[index], bounds[index + 1]),
        group=group,
        distributed=distributed,
        dealt=filling.whole,
        sent_as=sent_as,
    )


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
