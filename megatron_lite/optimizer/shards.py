"""Buckets of which each rank keeps only its part of the gradients (ZeRO 2), or of the parameters too (ZeRO 3).

The parts are those of the distributed optimizer. So checkpoints are the same, and each rank updates the same elements.

Gradients: each backward pass adds up the whole bucket in scratch memory, which exists only until ranks have
summed it. Each rank adds its part of the sum to its own gradients.

Parameters: the whole bucket has memory only around its use (fetching.py). All parameters are views of one storage, which
loses its memory and gets it back, so modules and autograd keep their tensors. This rank's part is the float32 master.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_lite.optimizer.buckets import Bucket, Parts, gather_parts
from megatron_lite.parallel import comm


@dataclass(eq=False)
class GradientShards(Bucket):
    """A bucket with the gradients of this rank's part only: [own size]."""

    scratch: Tensor | None = None
    """The gradients of the current backward pass, [size] in their dtype; None between passes."""
    summed: bool = False
    """True if `gradients` holds sums of this step."""

    @property
    def own_gradients(self) -> Tensor:
        return self.gradients

    def begin(self) -> None:
        super().begin()
        self.summed = False

    def begin_pass(self) -> None:
        """Start a backward pass."""
        super().begin()

    def _sums(self) -> Tensor:
        """Return this pass's gradients: [size] in their dtype."""
        if self.scratch is None:
            self.scratch = self.gradients.new_empty(self.elements)
        return self.scratch

    def launch(self) -> None:
        """Start to sum this pass's gradients over the data-parallel ranks."""
        scratch = self._sums()
        self.launched = True
        self._clear_unwritten(scratch)
        self.reducing = self._reduce(scratch)

    def finish_pass(self) -> None:
        """Wait for the sum of this pass, and add this rank's part to the step's gradients."""
        if not self.launched:
            self.launch()
        if self.scratch is None:  # finished before
            return
        comm.wait(self.reducing)
        self.reducing = None
        whole = self.scratch if self.sent is None else self.sent
        arrived = whole[self.parts.own]
        if self.summed:
            self.gradients.add_(arrived)
        else:
            self.gradients.copy_(arrived)
        self.summed = True
        self.scratch = self.sent = None

    def finish(self) -> None:
        """Make `own_gradients` valid also in a step without a backward pass."""
        if not self.summed:
            self.gradients.zero_()


@dataclass(eq=False)
class OnDemand:
    """Parameters of a bucket. This rank keeps its part; the whole exists from ready() to release()."""

    parts: Parts
    whole: Tensor
    """[size]: without memory between release() and start()."""
    shard: Tensor
    """This rank's part, [own size], in the dtype of the whole or in float32."""
    gathering: comm.Call | comm.Works | None = None
    present: bool = False
    """True if the whole has memory."""
    held: bool = False
    """True in a region that keeps the whole: release() does nothing."""
    _version: _unsafe_preserve_version_counter | None = None
    _arriving: bool = False
    """True from start() until the whole has been waited for."""

    @classmethod
    def zeros(
        cls, parts: Parts, dtype: torch.dtype, kept_as: torch.dtype, device: torch.device
    ) -> "OnDemand":
        """The whole has memory until release(). dtype: of the whole. kept_as: of this rank's part."""
        whole = torch.zeros(parts.size, dtype=dtype, device=device)
        shard = torch.zeros(parts.own_size, dtype=kept_as, device=device)
        return cls(parts, whole, shard, present=True)

    def allocate(self) -> None:
        """Give the whole its memory back, with undefined content."""
        if not self.present:
            self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.itemsize)
            self.present = True

    def start(self) -> None:
        """Start to fetch the whole, unless it is there or on its way."""
        if self.present:
            return
        self.allocate()
        # Autograd keeps views of the whole and refuses them after a change. But they get the same values again.
        self._version = _unsafe_preserve_version_counter(self.whole)
        with torch.no_grad():
            self.whole[self.parts.own].copy_(self.shard)
            self.gathering = gather_parts(self.whole, self.parts)
        self._arriving = True

    def ready(self) -> None:
        """Fetch the whole and wait for it."""
        self.start()
        self._arrive()

    def _arrive(self) -> None:
        if not self._arriving:
            return
        comm.wait(self.gathering)
        self.gathering = None
        self._arriving = False
        assert self._version is not None
        self._version.__exit__()

    def keep_own(self) -> None:
        """Take this rank's part from the whole, after a change of the whole."""
        self.shard.copy_(self.whole[self.parts.own])

    def release(self) -> None:
        """Free the memory of the whole, unless it is held."""
        if self.held:
            return
        self._arrive()  # it may be fetched in advance and not used
        self.whole.untyped_storage().resize_(0)
        self.present = False


@dataclass(eq=False, kw_only=True)
class ParameterShards(GradientShards):
    """A bucket with the gradients and the float32 masters of this rank's part only. `data` is the whole."""

    on_demand: OnDemand = field()

    @property
    def master_is_parameter(self) -> bool:
        """The only parameters that stay in memory are the masters."""
        return True

    @property
    def kept_bytes(self) -> int:
        return self.on_demand.shard.nbytes + self.gradients.nbytes

    def master(self) -> Tensor:
        return self.on_demand.shard

    def publish(self, master: Tensor) -> None:
        """Do nothing: the next use of the parameters fetches them."""

    def take_masters(self, master: Tensor) -> None:
        """Do nothing: OnDemand.keep_own has taken them."""
