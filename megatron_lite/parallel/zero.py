"""The optimizer: masters in fp32 and their state, whole on every data-parallel rank or shared among them (ZeRO 1).

Bytes per parameter with d data-parallel ranks, for AdamW: in 16 bits 2 (parameter) + 4 (gradient) + 12 (master, two moments),
of which a distributed optimizer keeps 12/d; in fp32 the parameter is its own master: 4 + 4 + 8.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.parallel.buckets import Bucket, ChunkBuckets
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.settings.options import OptimizerOptions

STATE = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""What each kind keeps for every element."""


@dataclass(frozen=True)
class FlatRange:
    """A run of elements of one parameter's local tensor, flattened, and the optimizer's tensors for it."""

    info: ParameterInfo
    start: int
    end: int
    tensors: Mapping[str, Tensor]
    """float32 [end - start], live: `master`, `exp_avg`, `exp_avg_sq` (sgd: `master`, `momentum_buffer`). Copy into them to load."""
    gradient: Tensor
    """float32 [end - start], live."""

    @property
    def chunk(self) -> int:
        """As in Engine.parameters()."""
        return self.info.chunk

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter's local tensor."""
        return self.info.native.shape


class Optimizer:
    """Of one rank."""

    def __init__(self, chunks: Sequence[ChunkBuckets], options: OptimizerOptions) -> None:
        self.options = options
        self.distributed = options.distributed
        self.steps = 0
        """Updates done."""
        self._buckets = [bucket for chunk in chunks for bucket in chunk.buckets]
        self._masters = [_master(bucket) for bucket in self._buckets]
        self._ranges = [
            item
            for bucket, master in zip(self._buckets, self._masters, strict=True)
            for item in _cut(bucket, master, STATE[options.kind])
        ]
        self._torch = self._make()

    def ranges(self) -> Iterator[FlatRange]:
        """What this rank updates. Without `distributed` whole parameters, the same on every data-parallel rank."""
        yield from self._ranges

    def _make(self) -> torch.optim.Optimizer:
        """PyTorch's own arithmetic over our ranges; its state are our tensors."""
        groups = [
            {
                "params": [item.tensors["master"] for item in self._ranges if item.info.decays == decays],
                "decays": decays,
            }
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        made: torch.optim.Optimizer
        if self.options.kind == "adamw":
            made = torch.optim.AdamW(groups, betas=self.options.betas, eps=self.options.eps, fused=True)
        else:
            made = torch.optim.SGD(groups, momentum=self.options.momentum, fused=True)
        for item in self._ranges:
            master = item.tensors["master"]
            master.grad = item.gradient
            made.state[master] = {name: item.tensors[name] for name in STATE[self.options.kind]}
            if self.options.kind == "adamw":
                made.state[master]["step"] = torch.zeros((), device=master.device)
        return made

    def scale_gradients(self, factor: float) -> None:
        """Of this rank's parts."""
        if factor != 1.0:
            for bucket in self._buckets:
                bucket.gradients[bucket.own].mul_(factor)

    def step(self, lr: float, weight_decay: float) -> None:
        """Update masters by their gradients, round them to the parameters and start to gather those."""
        for group in self._torch.param_groups:
            group["lr"], group["weight_decay"] = lr, weight_decay if group["decays"] else 0.0
        self._torch.step()
        self.steps += 1
        self._publish()

    def _publish(self) -> None:
        for bucket, master in zip(self._buckets, self._masters, strict=True):
            part = bucket.data[bucket.own]
            if master.data_ptr() != part.data_ptr():
                part.copy_(master)
            bucket.gather()
            if not self.options.overlap_param_gather:
                bucket.wait()

    def wait(self) -> None:
        """Until all parameters are there."""
        for bucket in self._buckets:
            bucket.wait()

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        for values in self._torch.state.values():
            if "step" in values:
                values["step"].fill_(self.steps)

    def masters_from_weights(self) -> None:
        """After parameters were changed."""
        for bucket, master in zip(self._buckets, self._masters, strict=True):
            bucket.wait()
            master.copy_(bucket.data[bucket.own])

    def weights_from_masters(self) -> None:
        """After masters were changed: rounds them to the parameters of all data-parallel ranks. Collective."""
        self._publish()
        self.wait()

    def bytes_per_parameter(self) -> float:
        """By formula: parameters, gradients, masters and state. Experts' are shared by fewer ranks than others."""
        itemsize = self._buckets[0].data.itemsize
        kept = 4 * len(STATE[self.options.kind]) + (4 if itemsize < 4 else 0)
        elements = sum(len(bucket.data) for bucket in self._buckets)
        own = sum(len(master) for master in self._masters)
        return itemsize + 4 + kept * own / elements


def _master(bucket: Bucket) -> Tensor:
    """This rank's part in float32: the parameters themselves where they are float32."""
    return bucket.data[bucket.own].detach().float()


def _cut(bucket: Bucket, master: Tensor, names: Sequence[str]) -> Iterator[FlatRange]:
    """This rank's part of a bucket, parameter by parameter."""
    first, last = bucket.own.start, bucket.own.stop
    flat = {"master": master} | {name: torch.zeros_like(master) for name in names}
    for member in bucket.members:
        start, end = max(member.start, first), min(member.end, last)
        if start < end:
            part = slice(start - first, end - first)
            tensors = {name: tensor[part] for name, tensor in flat.items()}
            gradient = bucket.gradients[start:end]
            yield FlatRange(member.info, start - member.start, end - member.start, tensors, gradient)
