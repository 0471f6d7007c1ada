"""The input of one training pass."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_lite.models.moving import moved
from megatron_lite.models.pictures import Pictures
from megatron_lite.models.teaching import Teaching


@dataclass(frozen=True)
class Lengths:
    """The lengths of a microbatch's sequences, for the part that a rank holds."""

    rows: int
    tokens: int
    source: int = 0
    source_rows: int = 0


@dataclass(frozen=True)
class Microbatch:
    """Sequences that go through the model together. Every rank of a model (tp and pp) has the same sequences."""

    tokens: Tensor
    """int64 [batch, sequence]."""
    labels: Tensor
    """int64 [batch, sequence]: the next token of each token."""
    loss_mask: Tensor | None = None
    """Weight of each label in the loss, bool or float [batch, sequence]; None: all 1."""
    positions: Tensor | None = None
    """int64 [batch or 1, sequence]; None: 0, 1, 2 ..."""
    pair_positions: Tensor | None = None
    """int64 [batch, sequence, rotated / 2]: the position by which each pair of elements rotates; None: `positions`."""
    pictures: Pictures | None = None
    """The images in a decoder's sequences; None: there are none."""
    joint: Tensor | None = None
    """int64 [batch, sequence]: tokens with the same number attend to each other in both directions (Gemma 3's images).

    -1: causal attention alone. None: causal attention of all tokens.
    """
    joint_in_windows: bool = False
    """True if tokens are joint only in layers with a sliding window (Gemma 4)."""
    documents: tuple[tuple[int, ...], ...] | None = None
    """Lengths of the documents in each row, which don't attend to each other; None: one document per row."""
    source: Tensor | None = None
    """int64 [batch, source length]: the encoder's input if the model has an encoder; `tokens` is then the decoder's input.

    In a biencoder, these are the contexts, [any, source length], and `tokens` are the queries.
    Retro: int64 [batch * chunks * neighbors, tokens of a neighbor], the neighbors of each chunk.
    """
    source_visible: Tensor | None = None
    """Bool, shape of `source`: the tokens that can be attended to; None: all."""
    types: Tensor | None = None
    """BERT: int64 [batch, sequence], the part of the sequence (first or second) of each token."""
    visible: Tensor | None = None
    """Bool [batch, sequence]: the tokens that can be attended to, from earlier and later tokens. None: causal attention."""
    teaching: Teaching | None = None
    """The predictions of a teacher, of this rank's tokens; on the last stage alone. None: there is no teacher."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Further tensors that the loss reads, by name. Context-parallel ranks have them whole."""
    index: int = 0
    """Index among all microbatches of the step, over all data-parallel ranks; part of the seed of dropout."""

    def numbered(self, index: int) -> "Microbatch":
        return replace(self, index=index)

    def to(self, device: torch.device) -> "Microbatch":
        """Return the microbatch with its tensors on the device."""
        fields = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        tensors: dict[str, Any] = {name: moved(value, device) for name, value in fields.items()}
        extras = {name: moved(value, device) for name, value in self.extras.items()}
        pictures = None if self.pictures is None else self.pictures.to(device)
        return replace(self, extras=extras, pictures=pictures, **tensors)
