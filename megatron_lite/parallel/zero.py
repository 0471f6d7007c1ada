"""The optimizer: masters in fp32 and their state, whole on every data-parallel rank or shared among them (ZeRO 1), cut anywhere but for
Muon's matrices, which are shared out whole.

Bytes per parameter with d data-parallel ranks, for AdamW: in 16 bits 2 (parameter) + 4 (gradient) + 12 (master, two moments),
of which a distributed optimizer keeps 12/d; in fp32 the parameter is its own master: 4 + 4 + 8.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.buckets import Bucket, ChunkBuckets, Member
from megatron_lite.parallel.kinds import Kind
from megatron_lite.parallel.muon import Matrix, Muon, takes
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.settings.options import OptimizerOptions

STATE = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",), "muon": ("momentum_buffer",)}
"""What each kind keeps for every element that it updates; muon leaves what it doesn't take to adamw."""


@dataclass(frozen=True)
class FlatRange:
    """A run of elements of one parameter's local tensor, flattened, and the optimizer's tensors for it."""

    info: ParameterInfo
    start: int
    end: int
    tensors: Mapping[str, Tensor]
    """float32 [end - start], live: `master`, `exp_avg`, `exp_avg_sq` (sgd, muon: `master`, `momentum_buffer`). Copy into them to load."""
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

    def multiply_rows(self, factors: Tensor) -> None:
        """factors: of each row of the parameter, of which this range may have some."""
        columns = torch.Size(self.shape).numel() // len(factors)
        self.tensors["master"].mul_(factors.repeat_interleave(columns)[self.start : self.end])


class Share(NamedTuple):
    """Elements start..end of a parameter's local tensor, flattened, and who updates them."""

    rank: int
    """Among those that the parameter is reduced over; 0 without `distributed`, where each updates its own copy."""
    start: int
    end: int


class Optimizer:
    """Of one rank."""

    def __init__(
        self,
        chunks: Sequence[ChunkBuckets],
        options: OptimizerOptions,
        tensor_group: ProcessGroup | None = None,
        expert_tensor_group: ProcessGroup | None = None,
    ) -> None:
        """tensor_group: the ranks that share each dense matrix. expert_tensor_group: those that share each one of an expert."""
        self.options = options
        self.distributed = options.distributed
        self.steps = 0
        """Updates done."""
        self._buckets = [bucket for chunk in chunks for bucket in chunk.buckets]
        self._masters = [_master(bucket) for bucket in self._buckets]
        self._ranges = [
            item
            for bucket, master in zip(self._buckets, self._masters, strict=True)
            for item in _cut(bucket, master, options.kind)
        ]
        self._torch = self._make()
        self._muon = self._make_muon(tensor_group, expert_tensor_group)

    def ranges(self) -> Iterator[FlatRange]:
        """What this rank updates. Without `distributed` whole parameters, the same on every data-parallel rank."""
        yield from self._ranges

    def shares(self) -> Iterator[tuple[ParameterInfo, list[Share]]]:
        """Of every parameter who updates which elements, in order and without gaps; alike on all ranks that have it."""
        for bucket in self._buckets:
            for member in bucket.members:
                yield member.info, list(_shares(bucket, member))

    def _make(self) -> torch.optim.Optimizer | None:
        """PyTorch's own arithmetic over our ranges; its state are our tensors."""
        own = [item for item in self._ranges if kind_of(item.info, self.options.kind) != "muon"]
        sorted_masters: dict[tuple[bool, bool], list[Tensor]] = {}
        for item in own:
            sorted_masters.setdefault((item.info.decays, item.info.decoupled), []).append(item.tensors["master"])
        if not sorted_masters:  # a stage may have nothing but matrices of layers
            return None
        groups = [
            {"params": masters, "decays": decays, "decoupled": decoupled}
            for (decays, decoupled), masters in sorted_masters.items()
        ]
        made: torch.optim.Optimizer
        kind = "sgd" if self.options.kind == "sgd" else "adamw"
        if kind == "adamw":
            made = torch.optim.AdamW(groups, betas=self.options.betas, eps=self.options.eps, fused=True)
        else:
            made = torch.optim.SGD(groups, momentum=self.options.momentum, fused=True)
        for item in own:
            master = item.tensors["master"]
            master.grad = item.gradient
            made.state[master] = {name: item.tensors[name] for name in STATE[kind]}
            if kind == "adamw":
                made.state[master]["step"] = torch.zeros((), device=master.device)
        return made

    def _make_muon(self, dense: ProcessGroup | None, of_experts: ProcessGroup | None) -> Muon | None:
        options = self.options.muon
        gathers = options.tp_mode == "duplicated"
        matrices = [
            Matrix(
                item.info, item.tensors["master"], item.gradient, item.tensors["momentum_buffer"],
                (of_experts if item.info.kind is Kind.EXPERT else dense) if gathers else None,
            )
            for item in self._ranges
            if kind_of(item.info, self.options.kind) == "muon"
        ]  # fmt: skip
        return Muon(matrices, options) if matrices else None

    def step(
        self,
        lr: float,
        weight_decay: float,
        factor: float = 1.0,
        row_factors: Mapping[tuple[int, str], Tensor] = MappingProxyType({}),
        decoupled_lr: float | None = None,
    ) -> None:
        """Update masters by their gradients times factor, round them to the parameters and start to gather those.

        Gradients are multiplied in passing, in the one kernel that reads them anyway.
        row_factors: by chunk and parameter, what rows of masters are multiplied with when they are updated.
        decoupled_lr: of the embedding and the head; None: as all others.
        """
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = decoupled_lr if group["decoupled"] and decoupled_lr is not None else lr
                group["weight_decay"] = weight_decay if group["decays"] else 0.0
            divisor = None if factor == 1.0 else torch.full((), 1 / factor, device=self._masters[0].device)
            setattr(self._torch, "grad_scale", divisor)  # noqa: B010  # what torch.amp tells it
            self._torch.step()
        if self._muon is not None:
            self._muon.step(lr, weight_decay, factor)
        for item in self._ranges:
            if (item.chunk, item.name) in row_factors:
                item.multiply_rows(row_factors[item.chunk, item.name])
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
        for values in () if self._torch is None else self._torch.state.values():
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
        other = "adamw" if self.options.kind == "muon" else self.options.kind
        kept = 4 * len(STATE[other]) + (4 if itemsize < 4 else 0)
        elements = sum(len(bucket.data) for bucket in self._buckets)
        own = sum(len(master) for master in self._masters)
        matrices = 0 if self._muon is None else sum(len(matrix.master) for matrix in self._muon.matrices)
        return itemsize + 4 + (kept * own - 4 * matrices) / elements


def kind_of(info: ParameterInfo, kind: str) -> str:
    """What updates a parameter where the whole optimizer is of this kind."""
    return "adamw" if kind == "muon" and not takes(info) else kind


def _master(bucket: Bucket) -> Tensor:
    """This rank's part in float32: the parameters themselves where they are float32."""
    return bucket.data[bucket.own].detach().float()


def _shares(bucket: Bucket, member: Member) -> Iterator[Share]:
    for rank, (first, last) in enumerate(pairwise(bucket.bounds)):
        start, end = max(member.start, first), min(member.end, last)
        if start < end:
            yield Share(rank, start - member.start, end - member.start)


def _cut(bucket: Bucket, master: Tensor, kind: str) -> Iterator[FlatRange]:
    """This rank's part of a bucket, parameter by parameter."""
    first, last = bucket.own.start, bucket.own.stop
    flat = {"master": master} | ({} if kind == "muon" else {name: torch.zeros_like(master) for name in STATE[kind]})
    for member in bucket.members:
        start, end = max(member.start, first), min(member.end, last)
        if start < end:
            part = slice(start - first, end - first)
            tensors = {name: tensor[part] for name, tensor in flat.items()}
            if kind == "muon":
                own = STATE[kind_of(member.info, kind)]
                tensors |= {name: torch.zeros_like(tensors["master"]) for name in own}
            gradient = bucket.gradients[start:end]
            yield FlatRange(member.info, start - member.start, end - member.start, tensors, gradient)
