"""What a model is trained on in one pass."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Lengths(NamedTuple):
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
    """int64 [batch, sequence]; None: 0, 1, 2 ..."""
    source: Tensor | None = None
    """int64 [batch, its own length]: what an encoder reads, in a model that has one; tokens are the decoder's then."""
    source_mask: Tensor | None = None
    """bool, like source: what is no padding; None: all of it."""
    documents: tuple[tuple[int, ...], ...] | None = None
    """Per sequence the lengths of its documents, which don't see each other; None: one document."""
    index: int = 0
    """Its number among all microbatches of the step, over all data-parallel ranks: seeds its dropout."""
