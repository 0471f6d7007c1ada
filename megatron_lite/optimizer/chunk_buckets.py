"""All buckets of one chunk: the chunk's parameters become views of them, and gradients flow into them."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.optimizer.buckets import Bucket, divide
from megatron_lite.optimizer.dealing import Dealer
from megatron_lite.optimizer.filling import Filling, Member, fill
from megatron_lite.optimizer.schedule import Schedule
from megatron_lite.optimizer.shards import GradientShards, OnDemand, ParameterShards
from megatron_lite.parallel import comm
from megatron_lite.parallel.parameters import ParameterInfo, replace_parameter
from megatron_lite.products.accumulating import GradientSum, gradient_sum_of, set_gradient_sum
from megatron_lite.products.compiled import offer_to_compiled_code
from megatron_lite.settings.options import OptimizerOptions


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """The options of all buckets of a model."""

    dtype: torch.dtype
    """The model's dtype; parameters that declare it are float32."""
    device: torch.device
    groups: Callable[[str], ProcessGroup | None]
    """The process group for each value of ParameterInfo.reduced_over."""
    bucket_elements: int
    distributed: bool
    overlap: bool
    """Start to reduce gradients during the backward pass."""
    optimizer: OptimizerOptions
    """Decides the dtypes of gradients."""
    dealer: Dealer
    """Assigns to ranks the parameters that it deals as a whole. All other parameters are divided."""
    shards_gradients: bool = False
    """Keep only this rank's part of the gradients. Ranks sum them in each backward pass."""
    shards_parameters: bool = False
    """Keep only this rank's part of the parameters, and of the gradients."""
    fetches_ahead: bool = True
    """Fetch the sharded parameters of the next unit while a unit computes."""
    fuses_accumulation: bool = False
    """Add the products of matrices' gradients directly to the buckets."""
    sums_last: bool = False
    """True if no layer is recomputed as a whole: backward passes then see the parameters themselves."""

    def group(self, filling: Filling) -> comm.Group:
        return self.groups(filling.axis)

    def gradients_in(self, filling: Filling) -> torch.dtype:
        """Return the dtype in which a bucket's gradients are summed."""
        name = self.optimizer.gradient_dtype(in_float32=filling.in_float32)
        found: torch.dtype = getattr(torch, name)
        return found

    def sent_as(self, filling: Filling) -> torch.dtype:
        """Return the dtype in which ranks send a bucket's gradients."""
        name = self.optimizer.sent_dtype(in_float32=filling.in_float32)
        found: torch.dtype = getattr(torch, name)
        return found

    def dtype_of(self, filling: Filling) -> torch.dtype:
        return torch.float32 if filling.in_float32 else self.dtype


class ChunkBuckets:
    """All buckets of one chunk."""

    def __init__(
        self,
        chunk: nn.Module,
        infos: Sequence[ParameterInfo],
        options: BucketOptions,
        frozen: Sequence[ParameterInfo] = (),
    ) -> None:
        """Create the buckets and replace the chunk's parameters by views of them.

        chunk: on the meta device; it has trained parameters of these names and shapes, in the order of a forward pass.
        frozen: parameters without gradients, which are sharded too. Only for shards_parameters.
        """
        self.options, self.is_last_pass = options, False
        self.buckets: list[Bucket] = []
        """In the order of a forward pass."""
        self._chunk = chunk
        self._of: dict[int, Bucket] = {}
        self._memory: dict[int, OnDemand] = {}
        """id of a sharded parameter -> its memory."""
        self._schedule: Schedule | None = None
        for filling in fill(infos, options.bucket_elements, options.dealer.deals):
            bucket = _make(filling, options)
            self.buckets.append(bucket)
            for member in bucket.members:
                parameter = self._take_over(member, bucket.data, requires_grad=True)
                self._of[id(parameter)] = bucket
                self._add_when_made(parameter, bucket, member)
                if isinstance(bucket, ParameterShards):
                    self._memory[id(parameter)] = bucket.on_demand
            if isinstance(bucket, ParameterShards):
                bucket.on_demand.release()
        for filling in fill(frozen, options.bucket_elements, lambda _: False):
            self._shard_frozen(filling)

    def _shard_frozen(self, filling: Filling) -> None:
        """Shard parameters that keep their values."""
        options = self.options
        dtype = options.dtype_of(filling)
        parts = divide(filling, options.group(filling), options.dealer, distributed=True)
        on_demand = OnDemand.zeros(parts, dtype, dtype, options.device)
        for member in parts.members:
            parameter = self._take_over(member, on_demand.whole, requires_grad=False)
            self._memory[id(parameter)] = on_demand
        on_demand.release()

    def _take_over(self, member: Member, data: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Replace the chunk's parameter by a view of a bucket's data."""
        view = data[member.start : member.end]
        parameter = nn.Parameter(view.view(member.info.native.shape), requires_grad=requires_grad)
        replace_parameter(self._chunk, member.info.name, parameter)
        return parameter

    def _add_when_made(self, parameter: nn.Parameter, bucket: Bucket, member: Member) -> None:
        gradient_sum = self._gradient_sum(bucket, member)
        if gradient_sum is not None:
            set_gradient_sum(parameter, gradient_sum)
            if self.options.sums_last and not self.options.shards_parameters and parameter.numel():
                offer_to_compiled_code(parameter, gradient_sum)
        # Python can't collect a cycle through a hook of a gradient, so the hook refers to the buckets weakly.
        # Otherwise an engine would never be freed, nor would its groups and their threads.
        own, its_bucket = weakref.ref(self), weakref.ref(bucket)

        def add(made: Tensor) -> None:
            buckets, bucket = own(), its_bucket()
            assert buckets is not None, "the engine was freed"
            assert bucket is not None, "the engine was freed"
            buckets._add(bucket, member, made)

        parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    def _add(self, bucket: Bucket, member: Member, made: Tensor) -> None:
        """Move a parameter's gradient to its bucket, and launch the buckets that are complete."""
        assert made.grad is not None
        gradient_sum = gradient_sum_of(made)
        if gradient_sum is None or not gradient_sum.take_added(made):
            bucket.add(member, made.grad)
        made.grad = None
        if self._reduces:
            bucket.missing -= 1
            if not bucket.missing and self.options.overlap:
                self._launch_complete()

    def _gradient_sum(self, bucket: Bucket, member: Member) -> GradientSum | None:
        """Return the sum to which the product of a weight's gradient is added; None if autograd brings the gradient."""
        module, _, name = member.info.name.rpartition(".")
        is_matrix = name == "weight" and hasattr(self._chunk.get_submodule(module), "product")
        if not is_matrix or not self.options.fuses_accumulation:
            return None
        lasting = self.options.sums_last and not self.options.shards_gradients
        return GradientSum(partial(bucket.place, member), lasting=lasting)

    @property
    def _reduces(self) -> bool:
        """True if this backward pass completes the gradients that ranks sum."""
        return self.is_last_pass or self.options.shards_gradients

    def _launch_complete(self) -> None:
        """Launch buckets from the last to the first, until one still lacks a gradient."""
        for bucket in reversed(self.buckets):
            if bucket.missing:
                return
            if not bucket.launched:
                self._finish_launched()
                bucket.launch()

    def _finish_launched(self) -> None:
        """Free the scratch memory of the buckets that were launched before, so that at most two exist."""
        for bucket in self.buckets:
            if isinstance(bucket, GradientShards) and bucket.launched:
                bucket.finish_pass()

    def wait_before(self, units: Sequence[nn.Module], shared: Sequence[nn.Module] = ()) -> None:
        """Register hooks on the units, which wait for their parameters before their forward pass.

        shared: modules whose parameters other units use too.
        """
        if self.options.shards_parameters:
            ahead = self.options.fetches_ahead
            self._schedule = Schedule(self._chunk, units, shared, self._memory, ahead=ahead)
            return
        for module in units:
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

    @contextmanager
    def computing(self, *, backward: bool, backward_follows: bool = False) -> Iterator[None]:
        """Run one pass of the chunk in this region, in which its sharded tensors exist.

        backward_follows: whether the next pass of the chunk is the backward pass of this one.
        """
        sharded = [bucket for bucket in self.buckets if isinstance(bucket, GradientShards)]
        if self._schedule is not None:
            self._schedule.begin(backward=backward)
        if backward:
            for bucket in sharded:
                bucket.begin_pass()
        yield
        if backward:
            for bucket in reversed(sharded):
                bucket.finish_pass()
        if self._schedule is not None:
            self._schedule.end(backward_follows=backward_follows)

    def finish(self) -> None:
        """Wait until all gradients are sums over the data-parallel ranks."""
        for bucket in reversed(self.buckets):
            bucket.finish()

    def portions(self, infos: Sequence[ParameterInfo]) -> Iterator[list[ParameterInfo]]:
        """Yield all parameters, in portions whose memory exists, to fill them.

        Sharded parameters: the ranks keep their parts of what they find in each portion afterwards.
        """
        present = [info for info in infos if self._memory_of(info) is None]
        if present:
            yield present
        for memory in self._memories():
            memory.allocate()
            memory.whole.zero_()
            yield [info for info in infos if self._memory_of(info) is memory]
            memory.keep_own()
            memory.release()

    def one_by_one(self, infos: Sequence[ParameterInfo]) -> Iterator[ParameterInfo]:
        """Yield each parameter while its memory exists. Collective if parameters are sharded."""
        memories = [self._memory_of(info) for info in infos]
        for number, (info, memory) in enumerate(zip(infos, memories, strict=True)):
            if memory is None:
                yield info
                continue
            memory.ready()
            yield info
            if not any(each is memory for each in memories[number + 1 :]):
                memory.release()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Keep all parameters in memory in this region. Collective if parameters are sharded."""
        # Inside another such region, the outer one releases them.
        memories = [each for each in self._memories() if not each.held]
        for memory in memories:
            memory.ready()
            memory.held = True
        try:
            yield
        finally:
            for memory in memories:
                memory.held = False
                memory.release()

    def _memories(self) -> list[OnDemand]:
        """Return the memory of all sharded parameters."""
        return list({id(each): each for each in self._memory.values()}.values())

    def _memory_of(self, info: ParameterInfo) -> OnDemand | None:
        return self._memory.get(id(self._chunk.get_parameter(info.name)))


def _make(filling: Filling, options: BucketOptions) -> Bucket:
    """Return a bucket of zeros."""
    parts = divide(filling, options.group(filling), options.dealer, distributed=options.distributed)
    device, dtype = options.device, options.dtype_of(filling)
    in_part = options.shards_gradients or options.shards_parameters
    elements = parts.own_size if in_part else parts.size
    gradients = torch.zeros(elements, dtype=options.gradients_in(filling), device=device)
    sent_as = options.sent_as(filling)
    if options.shards_parameters:
        on_demand = OnDemand.zeros(parts, dtype, torch.float32, device)
        return ParameterShards(parts, on_demand.whole, gradients, sent_as, on_demand=on_demand)
    data = torch.zeros(parts.size, dtype=dtype, device=device)
    kind = GradientShards if options.shards_gradients else Bucket
    return kind(parts, data, gradients, sent_as)
