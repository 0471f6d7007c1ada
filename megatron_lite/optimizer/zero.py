"""The optimizer: fp32 masters and state, replicated on every data-parallel rank or sharded over these ranks (ZeRO 1 to 3).

Shards may begin and end inside a parameter. Muon's matrices are exceptions: each is assigned to one rank as a whole.

Bytes per parameter with d data-parallel ranks, for AdamW:

- 16-bit: 2 (parameter) + 4 (gradient; 2 if summed in bf16) + 12 (master, two moments); a distributed optimizer keeps 12/d of the last.
- fp32: 4 + 4 + 8; the parameter is its own master. The same holds for an fp32 parameter of a 16-bit model.
- Sharded gradients: 4/d. Sharded parameters: none, as the master is all that stays in memory (shards.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megaconv.model.training import MASTER
from megatron_lite.optimizer.algorithm import (
    Algorithm,
    Rates,
    TensorGroups,
    Update,
    state_bytes,
)
from megatron_lite.optimizer.algorithms import algorithm
from megatron_lite.optimizer.buckets import Bucket
from megatron_lite.optimizer.chunk_buckets import ChunkBuckets
from megatron_lite.optimizer.filling import ALIGNMENT, Member, aligned
from megatron_lite.optimizer.ranges import FlatRange, Share
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.settings.options import OptimizerOptions

FLOAT32 = 4
"""Bytes of an element of masters, gradients and state."""


class Optimizer:
    """The optimizer of one rank."""

    def __init__(
        self, chunks: Sequence[ChunkBuckets], options: OptimizerOptions, groups: TensorGroups
    ) -> None:
        """Make masters of the parameters in the buckets, and state that is zero."""
        self.options = options
        self.algorithm = algorithm(options)
        self.distributed = options.distributed
        self.steps = 0
        """Number of updates."""
        self._buckets = [bucket for chunk in chunks for bucket in chunk.buckets]
        self._masters = [bucket.master() for bucket in self._buckets]
        self._ranges = [
            item
            for bucket, master in zip(self._buckets, self._masters, strict=True)
            for item in _ranges(bucket, master, self.algorithm, options)
        ]
        self._updates = list(self._make_updates(groups))

    def _make_updates(self, groups: TensorGroups) -> Iterator[Update]:
        for each in self.algorithm.chain():
            own = [item for item in self._ranges if self.algorithm.of(item.info) is each]
            if own:  # a stage may have only matrices of layers, all of which Muon takes
                yield each.update_of(own, self.options, groups)

    def ranges(self) -> Iterator[FlatRange]:
        """Yield this rank's ranges. Without `distributed`, they are whole parameters, the same on every data-parallel rank."""
        yield from self._ranges

    def resting(self, info: ParameterInfo, tensor: Tensor) -> FlatRange:
        """Return a parameter that no update changes as one range, with the state that an update would have made: none.

        tensor: the parameter. The state is in main memory.
        """
        master = tensor.detach().flatten().cpu().float()
        state = {name: torch.zeros(len(master)) for name in self.algorithm.of(info).state}
        return FlatRange(info, 0, len(master), {MASTER: master, **state}, gradient=torch.empty(0))

    def shares(self) -> Iterator[tuple[ParameterInfo, list[Share]]]:
        """Yield the shares of every parameter in order and without gaps; the same on all ranks that hold the parameter."""
        for bucket in self._buckets:
            for member in bucket.members:
                yield member.info, list(_shares(bucket, member))

    def step(
        self,
        rates: Rates,
        factor: float = 1.0,
        row_factors: Mapping[tuple[int, str], Tensor] = MappingProxyType({}),
    ) -> None:
        """Update the masters with the gradients times factor, round them to the parameters, and start to gather these.

        row_factors: factors for rows of masters, by chunk and parameter, applied after the update.
        """
        for update in self._updates:
            update.step(rates, factor)
        for item in self._ranges:
            if (item.chunk, item.name) in row_factors:
                item.multiply_rows(row_factors[item.chunk, item.name])
        self.steps += 1
        self._publish()

    def _publish(self) -> None:
        for bucket, master in zip(self._buckets, self._masters, strict=True):
            bucket.publish(master)
            if not self.options.overlap_param_gather:
                bucket.wait()

    def wait(self) -> None:
        """Wait until all parameters are complete."""
        for bucket in self._buckets:
            bucket.wait()

    def state(self) -> dict[str, Any]:
        """Return the state that is not per parameter."""
        return {"steps": self.steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that state() returned."""
        self.steps = int(state["steps"])
        for update in self._updates:
            update.continue_after(self.steps)

    def masters_from_weights(self) -> None:
        """Set the masters after a change of parameters."""
        for bucket, master in zip(self._buckets, self._masters, strict=True):
            bucket.take_masters(master)

    def weights_from_masters(self) -> None:
        """Round the masters to the parameters of all data-parallel ranks, after a change of masters. Collective."""
        self._publish()
        self.wait()

    def bytes_per_parameter(self) -> float:
        """Return the bytes per parameter by formula: parameters, gradients, masters and state.

        Fewer ranks share the parameters of experts than other parameters. A stage without adapters trains none: 0 bytes.
        """
        elements = sum(bucket.elements for bucket in self._buckets)
        if not elements:
            return 0.0
        in_buckets = sum(bucket.kept_bytes for bucket in self._buckets)
        own = sum(len(master) for master in self._masters)
        kept = self._state_bytes(own)
        for bucket, master in zip(self._buckets, self._masters, strict=True):
            if not bucket.master_is_parameter:
                kept += FLOAT32 * len(master)
        return (in_buckets + kept) / elements

    def _state_bytes(self, own: int) -> int:
        """Return the bytes of state. own: this rank's elements; padding counts like the parameters that any algorithm takes."""
        found = 0
        padding = own
        for item in self._ranges:
            found += item.elements * state_bytes(self.algorithm.of(item.info), self.options)
            padding -= item.elements
        last = self.algorithm.chain()[-1]
        return found + padding * state_bytes(last, self.options)


def _shares(bucket: Bucket, member: Member) -> Iterator[Share]:
    for rank, (first, last) in enumerate(pairwise(bucket.parts.bounds)):
        place = member.between(first, last)
        if place:
            yield Share(rank, place.start - member.start, place.stop - member.start)


def _ranges(
    bucket: Bucket, master: Tensor, chosen: Algorithm, options: OptimizerOptions
) -> Iterator[FlatRange]:
    """Yield this rank's part of a bucket, one range per parameter."""
    first, last = bucket.parts.own.start, bucket.parts.own.stop
    members = [member for member in bucket.members if member.between(first, last)]
    state = _zero_state(members, first, last, chosen, options, master.device)
    for member, of_range in zip(members, state, strict=True):
        place = member.between(first, last)
        own_master = master[place.start - first : place.stop - first]
        yield FlatRange(
            info=member.info,
            start=place.start - member.start,
            end=place.stop - member.start,
            tensors={MASTER: own_master, **of_range},
            gradient=bucket.own_gradients[place.start - first : place.stop - first],
        )


def _zero_state(
    members: Sequence[Member],
    first: int,
    last: int,
    chosen: Algorithm,
    options: OptimizerOptions,
    device: torch.device,
) -> list[dict[str, Tensor]]:
    """Return the state of each member by name, for its elements among first..last of the bucket."""
    found: list[dict[str, Tensor]] = [{} for _ in members]
    for each in chosen.chain():
        numbers = [
            number for number, member in enumerate(members) if chosen.of(member.info) is each
        ]
        lengths = [len(members[number].between(first, last)) for number in numbers]
        for name in each.state:
            dtype = getattr(torch, options.state_dtype(name))
            for number, tensor in zip(numbers, _zeros(lengths, dtype, device), strict=True):
                found[number][name] = tensor
    return found


def _zeros(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return zeros of these lengths, aligned and in one piece of memory."""
    spaces = [aligned(length, ALIGNMENT) for length in lengths]
    memory = torch.zeros(sum(spaces), dtype=dtype, device=device)
    parts = torch.split(memory, spaces)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]
