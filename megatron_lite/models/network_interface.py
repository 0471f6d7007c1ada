"""The interface between the engine and one virtual stage of a model of any kind."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megatron_lite.models.batch import Lengths
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.payload import Payload, Wire, Wires


class Counted(NamedTuple):
    """Losses of labels, pairs or examples, and their weights, of one shape, not differentiable."""

    losses: Tensor
    weights: Tensor


class Network(nn.Module, ABC):
    """One virtual stage. Its parameters have the names and shapes of native_tensors(..., "core", ...)."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__()
        self.plan, self.is_first, self.is_last = plan, chunk.is_first, chunk.is_last

    @classmethod
    @abstractmethod
    def loss_names(cls, config: ModelConfig) -> tuple[str, ...]:
        """Return the names of all losses that `loss` computes. The first one is the main loss."""

    @abstractmethod
    def units(self) -> Iterator[nn.Module]:
        """Yield the modules that wait for their parameters, in the order of a forward pass."""

    def shared(self) -> Iterator[nn.Module]:
        """Yield the modules whose parameters other units use too: an embedding that is tied to the head."""
        yield from ()

    def is_frozen(self, name: str) -> bool:
        """Return whether a parameter keeps its loaded value. name: its name in this chunk."""
        lora = self.plan.options.lora
        return lora is not None and lora.freezes(name)

    def takes(self, lengths: Lengths) -> Wires:
        """Return the shapes of the previous stage's output for a microbatch of these sizes.

        For a model with one stack, this is the shape of the activations.
        """
        return () if self.is_first else (self.activations(lengths.rows, lengths.tokens),)

    def gives(self, lengths: Lengths) -> Wires:
        """Return the shapes of the output for the next stage."""
        return () if self.is_last else (self.activations(lengths.rows, lengths.tokens),)

    def activations(self, rows: int, tokens: int) -> Wire:
        """Return the shape of activations with the given numbers of rows and tokens per row."""
        ranks = self.plan.ranks
        here = tokens // ranks.size if ranks.sequence else tokens
        return Wire((here, rows, self.plan.config.hidden), getattr(torch, self.plan.options.dtype))

    @abstractmethod
    def forward(self, taken: Payload, run: Pass) -> Payload:
        """Run the stage. taken: output of the previous stage.

        On the last stage, the result is the input of `loss` and `logits`.
        """

    @abstractmethod
    def loss(self, given: Payload, run: Pass) -> tuple[Tensor, Mapping[str, Counted]]:
        """Return (the network's own loss to differentiate, losses by the names of loss_names).

        given: the output of forward on the last stage. models/criterion.py lets an objective replace this loss.
        """

    @abstractmethod
    def label_losses(
        self, given: Payload, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of weights * losses, differentiable; the losses [batch, sequence], not differentiable).

        labels int64 and weights float32 [batch, sequence]. given: the output of forward on the last stage.
        """

    @abstractmethod
    def logits(self, given: Payload) -> Tensor:
        """Return float32 [batch, sequence, vocabulary], the same on every tensor rank. Not differentiable.

        given: the output of forward on the last stage.
        """


def mean_of_each_microbatch(mask: Tensor) -> Tensor:
    """Return weights of labels that sum to the number of labels in a microbatch: Megatron's mean for BERT and T5.

    mask: float32 [batch, sequence]. A microbatch without a label has weight 0.
    """
    return mask * (mask.numel() / mask.sum().clamp(min=1))
