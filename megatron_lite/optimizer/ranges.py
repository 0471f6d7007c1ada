"""The elements that a rank updates: ranges of its parameters, with the optimizer's tensors for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megaconv.model.training import MASTER
from megatron_lite.parallel.parameters import ParameterInfo


@dataclass(frozen=True)
class FlatRange:
    """A range of elements of one parameter's flattened local tensor, and the optimizer's tensors for the range."""

    info: ParameterInfo
    start: int
    end: int
    tensors: Mapping[str, Tensor]
    """[end - start]: `master` in float32, and the state of the algorithm that updates the parameter.

    These are the live tensors: copy into them to load.
    """
    gradient: Tensor
    """[end - start] in float32 or bf16; the live gradient."""

    @property
    def master(self) -> Tensor:
        return self.tensors[MASTER]

    def in_float32(self, slot: str) -> Tensor:
        """Return a tensor in float32: the live one, or a copy in main memory if it is kept in fewer bits."""
        tensor = self.tensors[slot].detach()
        return tensor if tensor.dtype == torch.float32 else tensor.cpu().float()

    @property
    def elements(self) -> int:
        return self.end - self.start

    @property
    def chunk(self) -> int:
        """The chunk's index, as in Engine.parameters()."""
        return self.info.chunk

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter's local tensor."""
        return self.info.native.shape

    def multiply_rows(self, factors: Tensor) -> None:
        """Multiply the master's rows in this range. factors: one for each row of the parameter."""
        columns = torch.Size(self.shape).numel() // len(factors)
        self.master.mul_(factors.repeat_interleave(columns)[self.start : self.end])


class Share(NamedTuple):
    """Elements start..end of a parameter's flattened local tensor, and the rank that updates them."""

    rank: int
    """Index among the ranks that the parameter is reduced over. Without `distributed` 0: each rank updates its own copy."""
    start: int
    end: int
