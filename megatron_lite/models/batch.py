"""What a model is trained on in one pass."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lengths:
    """Of the sequences of a microbatch, as far as a rank has them."""

    rows: int
    tokens: int
    source: int = 0


@dataclass(frozen=True)
class Microbatch:
    """Sequences that go through the model together. Every rank of a model (tp and pp) has the same ones."""

    tokens: Tensor
    """int64 [batch, sequence]"""
    labels: Tensor
    """int64 [batch, sequence]: for each token the one that follows it."""
    loss_mask: Tensor | None = None
    """Weight of each label in the loss, bool or float [batch, sequence]; None: all 1."""
    positions: Tensor | None = None
    """int64 [batch or 1, sequence]; None: 0, 1, 2 ..."""
    documents: tuple[tuple[int, ...], ...] | None = None
    """Per sequence the lengths of its documents, which don't see each other; None: one document."""
    source: Tensor | None = None
    """int64 [batch, its own length]: what an encoder reads, in a model that has one; tokens are the decoder's then."""
    source_visible: Tensor | None = None
    """Bool, like source: which of these others see; None: all."""
    reference: Tensor | None = None
    """float64 [batch]: the reference model's log-probability of each row's labels that count. Then rows are pairs of a chosen and a
    rejected answer, one behind the other, to be compared; None: each label counts for itself."""
    types: Tensor | None = None
    """Of a BERT, int64 [batch, sequence]: which of two parts a token belongs to."""
    visible: Tensor | None = None
    """Bool [batch, sequence]: which tokens others see; with it all tokens see each other, before and behind. None: a decoder's."""
    swapped: Tensor | None = None
    """Of a BERT, int64 [batch]: 1 where the two parts have changed places."""
    answers: Tensor | None = None
    """Of a task, int64 [examples]: the class, or the number of the right one of an example's rows; labels don't matter then."""
    counting: Tensor | None = None
    """float32, like answers: how much each example counts."""
    index: int = 0
    """Its number among all microbatches of the step, over all data-parallel ranks: seeds its dropout."""

    def numbered(self, index: int) -> "Microbatch":
        return replace(self, index=index)

    def to(self, device: torch.device) -> "Microbatch":
        """With its tensors there."""
        tensors: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})
