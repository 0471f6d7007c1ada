"""The intermediate representation: a header that describes a model, and a stream of canonical tensors.

Canonical tensors are a model's parameters in their smallest meaningful pieces: q, k and v are separate, and so are gate
and up. They are whole, unpadded and [out, in]. A slot says what a tensor is to its parameter: the weight itself, or
optimizer state.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

from formats.tensor import LazyTensor, Shape, byte_count
from megaconv.model.adapter import AdapterInfo
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.model.training import ADAM, SGD, TrainingState

WEIGHT = "weight"


class Key(NamedTuple):
    """The name of one tensor of a model, such as `layers.3.attn.q.weight`, and its slot, such as `weight`."""

    name: str
    slot: str = WEIGHT

    def __str__(self) -> str:
        return self.name if self.slot == WEIGHT else f"{self.name} ({self.slot})"


def is_trained(name: str, manifest: Container[Key]) -> bool:
    """True if the manifest holds optimizer state of this tensor."""
    return any(Key(name, kind[0]) in manifest for kind in (ADAM, SGD))


class TensorInfo(NamedTuple):
    """One line of the manifest: a tensor's shape and dtype."""

    shape: Shape
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size of the stored tensor in bytes."""
        return byte_count(self.shape, self.dtype)


@dataclass(frozen=True)
class Header:
    """Everything that is known before the first tensor. It is sent first, so that a saver can lay out all its files."""

    config: ModelConfig
    manifest: Mapping[Key, TensorInfo]
    """Every tensor that will follow, in model order."""
    layout: Layout | None = None
    """Sharding of the source; None if it is not sharded."""
    training: TrainingState = field(default_factory=TrainingState)
    files: Mapping[str, Path] = field(default_factory=dict)
    """File name -> path of small files that are copied unread, such as the tokenizer and the generation configuration.
    """
    made: Mapping[str, bytes] = field(default_factory=dict)
    """File name -> content of further such files, which the source holds in another form."""
    named_tokenizer: str = ""
    """The path or Hub name of the tokenizer in Megatron's arguments, if no other part of the original tokenizer is
    known."""
    vocab_divisor: int | None = None
    """The source pads its vocabulary to a multiple of this number times the tensor-parallel size; None if it doesn't
    pad."""
    source: str = ""
    """Format and naming scheme, for people: `core (torch, transformer_engine)`."""
    padded_vocab: int | None = None
    """Rows of the source's embedding as stored, if they are more than the vocabulary; else None."""
    has_optimizer: bool = False
    """True if the source has optimizer state."""
    shifts: Mapping[Key, int] = field(default_factory=dict)
    """The number that the source has added to a tensor's values. Tensors that are not listed have none. See
    values/shifted.py."""
    read_otherwise: frozenset[Key] = frozenset()
    """Tensors whose values an option changes, so that the source's own record has others."""
    has_weights: bool = True
    """True if the source holds the tensors of the manifest. False if the manifest follows from a configuration alone.
    """
    beside: Mapping[str, int] = field(default_factory=dict)
    """First word of the names of left-out multimodal tensors, such as `vision_tower` -> number of tensors."""
    adapter: AdapterInfo | None = None
    """Set if the tensors are those of an adapter. `config` then describes the adapter's base model."""
    revision: str | None = None
    """The version of a source that has no files; it changes whenever the content does. If it is None, a run can't be
    resumed."""

    @property
    def carries_optimizer(self) -> bool:
        """True if the manifest holds optimizer tensors."""
        return any(key.slot != WEIGHT for key in self.manifest)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(count * info.nbytes for info, count in Counter(self.manifest.values()).items())

    @property
    def parameters(self) -> int:
        """Number of elements of all weights, without optimizer state."""
        return sum(count * prod(info.shape) for info, count in self.weight_kinds.items())

    @cached_property
    def weight_kinds(self) -> Counter[TensorInfo]:
        """The result of `weight_kinds` for the manifest, computed once."""
        return weight_kinds(self.manifest)


def describe(tensors: Mapping[Key, LazyTensor]) -> dict[Key, TensorInfo]:
    """The manifest of these tensors."""
    return {key: TensorInfo(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}


def shift_of(tensor: LazyTensor) -> int:
    """The number that the source has added to the canonical values: the tensor's attribute `shift`, or 0."""
    return int(getattr(tensor, "shift", 0))


def main_dtype(manifest: Mapping[Key, TensorInfo]) -> str:
    """The dtype with the most bytes among the weights."""
    totals: Counter[str] = Counter()
    for info, count in weight_kinds(manifest).items():
        totals[info.dtype] += count * info.nbytes
    return totals.most_common(1)[0][0]


def weight_kinds(manifest: Mapping[Key, TensorInfo]) -> Counter[TensorInfo]:
    """Count the weights of each shape and dtype. A model has few such kinds, however many tensors it has."""
    return Counter(info for key, info in manifest.items() if key.slot == WEIGHT)


@dataclass(frozen=True)
class OpenedSource:
    """A header and its lazy tensors: the source that megaconv's own loaders return."""

    header: Header
    by_key: Mapping[Key, LazyTensor]
    """Lazy tensors in the order of the manifest."""

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        yield from self.by_key.items()


class Source(Protocol):
    """An opened checkpoint: its metadata has been read and checked, none of its tensors has been read."""

    @property
    def header(self) -> Header:
        """Everything that is known before the first tensor is read."""
        ...

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        """Yield every tensor of the manifest once, in its order."""
        ...
