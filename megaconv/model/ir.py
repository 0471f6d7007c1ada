"""The intermediate representation: what a loader says about a model before, and what it hands over while, it streams.

Canonical tensors are a model's parameters in their smallest meaningful pieces (q, k and v separate, gate and up separate),
whole, unpadded, [out, in]. A slot says what a tensor is of its parameter: the weight itself, or optimizer state.
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
    """Names one tensor of a model: `layers.3.attn.q.weight`, slot `weight`."""

    name: str
    slot: str = WEIGHT

    def __str__(self) -> str:
        return self.name if self.slot == WEIGHT else f"{self.name} ({self.slot})"


def is_trained(name: str, manifest: Container[Key]) -> bool:
    """Whether there is an optimizer's state of this tensor."""
    return any(Key(name, kind[0]) in manifest for kind in (ADAM, SGD))


class TensorInfo(NamedTuple):
    """One line of the manifest."""

    shape: Shape
    dtype: str

    @property
    def nbytes(self) -> int:
        """What it takes when it is stored."""
        return byte_count(self.shape, self.dtype)


@dataclass(frozen=True)
class Header:
    """Sent before the first tensor, so that a saver can lay out all its files."""

    config: ModelConfig
    manifest: Mapping[Key, TensorInfo]
    """Every tensor that will follow, in model order."""
    layout: Layout | None = None
    """How the source is sharded; None where it isn't."""
    training: TrainingState = field(default_factory=TrainingState)
    files: Mapping[str, Path] = field(default_factory=dict)
    """Small files that travel along unread: tokenizer, generation configuration. By file name."""
    named_tokenizer: str = ""
    """The path or Hub name that Megatron's arguments have for the tokenizer, where nothing else of the original is known."""
    vocab_divisor: int | None = None
    """What the source pads its vocabulary to a multiple of (times tensor-parallel size); None where it doesn't."""
    source: str = ""
    """Format and naming, for people: `core (torch, transformer_engine)`."""
    padded_vocab: int | None = None
    """Rows of the source's embedding as stored, where they are more than the vocabulary."""
    has_optimizer: bool = False
    """Whether optimizer state lies beside the weights."""
    shifts: Mapping[Key, int] = field(default_factory=dict)
    """What the source has added to the values of a tensor; nothing to those that aren't listed. See engine/shifted.py."""
    has_weights: bool = True
    """Whether the tensors of the manifest are there; else it is what a configuration alone describes."""
    beside: Mapping[str, int] = field(default_factory=dict)
    """What lies beside the language model and was left out (`vision_tower`) -> how many tensors."""
    adapter: AdapterInfo | None = None
    """Set where the tensors are those of an adapter, and not the model's own: `config` is that of the model it is for."""
    revision: str | None = None
    """Of a source that isn't files: changes whenever its content does. None: nobody knows, and a run of it can't be resumed."""

    @property
    def carries_optimizer(self) -> bool:
        """Whether the optimizer's tensors are in the manifest too."""
        return any(key.slot != WEIGHT for key in self.manifest)

    @property
    def nbytes(self) -> int:
        """Of all tensors together."""
        return sum(count * info.nbytes for info, count in Counter(self.manifest.values()).items())

    @property
    def parameters(self) -> int:
        """How many numbers the weights are, without optimizer state."""
        return sum(count * prod(info.shape) for info, count in self.weight_kinds.items())

    @cached_property
    def weight_kinds(self) -> Counter[TensorInfo]:
        """`weight_kinds` of the manifest, counted once."""
        return weight_kinds(self.manifest)


def describe(tensors: Mapping[Key, LazyTensor]) -> dict[Key, TensorInfo]:
    """The manifest of these tensors."""
    return {key: TensorInfo(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}


def shift_of(tensor: LazyTensor) -> int:
    """What its source has added to the canonical values: of a lazy tensor that says so, in `shift`."""
    return int(getattr(tensor, "shift", 0))


def main_dtype(manifest: Mapping[Key, TensorInfo]) -> str:
    """The dtype that most of the bytes of the weights have."""
    totals: Counter[str] = Counter()
    for info, count in weight_kinds(manifest).items():
        totals[info.dtype] += count * info.nbytes
    return totals.most_common(1)[0][0]


def weight_kinds(manifest: Mapping[Key, TensorInfo]) -> Counter[TensorInfo]:
    """How many weights there are of each shape and dtype: few, however many tensors a model has."""
    return Counter(info for key, info in manifest.items() if key.slot == WEIGHT)


@dataclass(frozen=True)
class OpenedSource:
    """A header and its lazy tensors: all that our own loaders need to return."""

    header: Header
    by_key: Mapping[Key, LazyTensor]
    """In the order of the manifest."""

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        yield from self.by_key.items()


class Source(Protocol):
    """An opened checkpoint: its metadata has been read and checked, none of its tensors."""

    @property
    def header(self) -> Header:
        """What is known before the first tensor is read."""
        ...

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        """Every tensor of the manifest, once, in its order."""
        ...
