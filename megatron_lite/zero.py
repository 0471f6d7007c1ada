"""The optimizer: masters in fp32 and their state, whole on every data-parallel rank or shared among them (ZeRO 1)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class FlatRange:
    """A run of elements of one parameter's local tensor, flattened, and the optimizer's tensors for it."""

    chunk: int
    name: str
    """As in Engine.parameters()."""
    shape: tuple[int, ...]
    """Of the parameter's local tensor."""
    start: int
    end: int
    tensors: Mapping[str, Tensor]
    """float32 [end - start], live: `master`, `exp_avg`, `exp_avg_sq` (sgd: `master`, `momentum_buffer`). Copy into them to load."""


class Optimizer:
    """Of one rank."""

    distributed: bool

    def ranges(self) -> Iterator[FlatRange]:
        """What this rank updates. Without `distributed` whole parameters, the same on every data-parallel rank."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What isn't per parameter: `step` (updates done), loss scale and its counters; plain numbers, equal on all ranks."""
        raise NotImplementedError

    def load_state(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def masters_from_weights(self) -> None:
        """After parameters were changed."""
        raise NotImplementedError

    def weights_from_masters(self) -> None:
        """After masters were changed: rounds them to the parameters of all data-parallel ranks. Collective."""
        raise NotImplementedError

    def bytes_per_parameter(self) -> float:
        """By formula: parameters, gradients, masters and state."""
        raise NotImplementedError
