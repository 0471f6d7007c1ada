"""What the engine asks of one virtual stage of a model, of whatever kind."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megatron_lite.models.batch import Lengths
from megatron_lite.models.passes import Pass
from megatron_lite.models.plan import Plan
from megatron_lite.parallel.payload import Payload, Wire, Wires


class Counted(NamedTuple):
    """Losses of labels or of pairs, and how much each of them counts; of one shape, without a gradient."""

    losses: Tensor
    weights: Tensor


class Network(nn.Module, ABC):
    """Its parameters are those of native_tensors(..., "core", ...), names and shapes alike."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__()
        self.plan, self.is_first, self.is_last = plan, chunk.is_first, chunk.is_last

    @classmethod
    @abstractmethod
    def loss_names(cls, config: ModelConfig) -> tuple[str, ...]:
        """Of all losses that the last stage computes; the first is the one that is meant by the word alone."""

    @abstractmethod
    def units(self) -> Iterator[nn.Module]:
        """The modules before which parameters have to be there."""

    def takes(self, lengths: Lengths) -> Wires:
        """What the stage before this one gives, of a microbatch of these sizes: of one stack its activations alone."""
        return () if self.is_first else (self.activations(lengths.rows, lengths.tokens),)

    def gives(self, lengths: Lengths) -> Wires:
        """What this stage gives to the one behind it."""
        return () if self.is_last else (self.activations(lengths.rows, lengths.tokens),)

    def activations(self, rows: int, tokens: int) -> Wire:
        """Of so many tokens of so many rows."""
        ranks = self.plan.ranks
        here = tokens // ranks.size if ranks.sequence else tokens
        return Wire((here, rows, self.plan.config.hidden), next(self.parameters()).dtype)

    @abstractmethod
    def forward(self, taken: Payload, run: Pass) -> Payload:
        """taken: what the stage before gave. On the last stage what `loss` and `logits` take."""

    @abstractmethod
    def loss(self, given: Payload, run: Pass) -> tuple[Tensor, Mapping[str, Counted]]:
        """(what to go backward from, losses by the names of loss_names). On the last stage, of what forward gave."""

    @abstractmethod
    def logits(self, given: Payload) -> Tensor:
        """float32 [batch, sequence, vocabulary], the same on every tensor rank; on the last stage, without a gradient."""


def mean_of_each_microbatch(mask: Tensor) -> Tensor:
    """Weights of labels, of which those of a microbatch make as much together as if all counted: Megatron's mean for BERT and T5.

    mask float32 [batch, sequence]. A microbatch without a label counts for nothing.
    """
    return mask * (mask.numel() / mask.sum().clamp(min=1))
