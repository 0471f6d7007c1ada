"""Records the inputs of matrices, and keys and values, while a model computes.

A matrix computes with its `product` (products/product.py). A Recorder takes the product's place, looks at the input, and
lets the product compute. Keys and values come by the cache of a pass, which here keeps nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_lite.engine import Engine
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.products.product import PLAIN, Product


@dataclass
class Columns:
    """Statistics of the columns of an input, float64 or float32 on the model's device."""

    amax: Tensor
    total: Tensor
    """The sum of |x| over all rows."""
    squares: Tensor
    """The sum of x^2 over all rows."""
    rows: int = 0

    @classmethod
    def of(cls, x: Tensor) -> "Columns":
        zeros = torch.zeros(x.shape[-1], device=x.device)
        return cls(zeros, zeros.double(), zeros.double())

    def add(self, x: Tensor) -> None:
        """x [..., in]."""
        magnitude = x.detach().reshape(-1, x.shape[-1]).abs()
        self.amax = torch.maximum(self.amax, magnitude.amax(0).float())
        self.total += magnitude.sum(0, dtype=torch.float32)
        self.squares += magnitude.float().square().sum(0)
        self.rows += len(magnitude)


class Watcher(ABC):
    """Sees the inputs of all matrices. A subclass decides what it keeps."""

    @abstractmethod
    def see(self, name: str, x: Tensor, weight: Tensor) -> None:
        """name: of the matrix. x [..., in] with at least one row, weight [out, in]: as this rank has them."""


class Recorder(Product):
    """Products in the dtype of the tensors, whose inputs are seen."""

    def __init__(self, name: str, watcher: Watcher) -> None:
        self._name, self._watcher = name, watcher

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self._see(x, weight)
        return super().linear(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self._see(x, weight)
        return super().forward(x, weight, bias)

    def _see(self, x: Tensor, weight: Tensor) -> None:
        if x.numel():
            self._watcher.see(self._name, x, weight)


@dataclass
class Inputs(Watcher):
    """The statistics of all inputs that this rank has seen."""

    found: dict[str, Columns] = field(default_factory=dict)
    """By the name of the matrix."""

    def see(self, name: str, x: Tensor, weight: Tensor) -> None:
        if name not in self.found:
            self.found[name] = Columns.of(x)
        self.found[name].add(x)


@dataclass
class CachedAmax:
    """A cache that keeps nothing of its tokens but the largest key and value of each layer."""

    found: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Layer -> float32 [] of each tensor that the layer caches."""

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        largest = tuple(each.detach().abs().max().float() for each in new)
        before = self.found.get(layer, largest)
        pairs = zip(before, largest, strict=True)
        self.found[layer] = tuple(torch.maximum(*pair) for pair in pairs)
        return new

    def states(self, layer: int) -> tuple[Tensor, ...]:
        raise AssertionError("models with states are refused")

    def keep(self, layer: int, *states: Tensor) -> None:
        raise AssertionError("models with states are refused")


@dataclass(frozen=True)
class Matrix:
    """A matrix of this rank."""

    name: str
    """Its canonical tensors, joined; equal on all ranks that share it."""
    module: nn.Module
    info: ParameterInfo


def matrices(engine: Engine) -> Iterator[Matrix]:
    """Yield all matrices whose inputs can be seen: those of layers, but not the router."""
    for chunk, infos in zip(engine.chunks, engine.infos, strict=True):
        for info in infos:
            path, _, last = info.name.rpartition(".")
            module = chunk.get_submodule(path)
            if last == "weight" and getattr(module, "product", None) is PLAIN:
                yield Matrix("+".join(info.native.parts), module, info)


def watch(found: list[Matrix], watcher: Watcher) -> None:
    """Let the watcher see the inputs of matrices."""
    for matrix in found:
        setattr(matrix.module, "product", Recorder(matrix.name, watcher))  # noqa: B010
