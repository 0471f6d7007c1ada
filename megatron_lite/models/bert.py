"""BERT in Megatron core's form: bidirectional layers and two losses.

    masked words                    final norm -> dense, gelu, norm -> the embedding's matrix and a bias
    whether two parts are swapped   final norm -> first token -> pooler: dense, tanh -> binary head

As in Megatron, each loss is a mean over a microbatch, and both have the same weight. A model for a task has a head for
the task in place of these. megatron_lite/objectives/answer_loss.py defines its loss:

    a class, or the right choice   final norm -> first token -> pooler: dense, tanh -> dropout -> classification or multiple-choice head
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megatron_lite.models.activation import ACTIVATIONS
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.chunk import Stack, own_layers
from megatron_lite.models.ends import Embedding, Head, tied_embedding
from megatron_lite.models.network_interface import Counted, Network, mean_of_each_microbatch
from megatron_lite.models.passes import Pass
from megatron_lite.models.rng import POOLED, At, Seed
from megatron_lite.parallel import comm
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.payload import Payload
from megatron_lite.parallel.tensor import Norm, NormOptions, TensorGroup

SWAPPED = "sop_loss"
"""Sentence order prediction; Megatron's name."""
SWAPPED_PARTS = "swapped"
"""Name among a microbatch's extras: int64 [batch], 1 if the two parts are swapped."""


class Dense(nn.Module):
    """A matrix and its bias, replicated on every tensor rank."""

    kinds: ClassVar = {"weight": Kind.OF_TOKENS, "bias": Kind.OF_TOKENS}

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))
        self.bias = nn.Parameter(torch.empty(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Transform(nn.Module):
    """The layers before the vocabulary matrix; under sequence parallelism applied to this rank's tokens."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        config = plan.config
        self.dense = Dense(config.hidden, config.hidden)
        self.layer_norm = Norm(config.hidden, NormOptions(config.norm.epsilon, centers=True))
        self.activate = ACTIVATIONS[config.head.activation]

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.layer_norm(self.activate(self.dense(x)))
        return normed


class Pooler(nn.Module):
    """Pool the first token: [sequence (/ tp), batch, hidden] -> [batch, hidden], the same on every tensor rank."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.ranks = plan.ranks
        self.dense = Dense(plan.config.hidden, plan.config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(first_token(x, self.ranks)))


class _FirstOfShared(torch.autograd.Function):
    """Broadcast the first token, which the first tensor rank holds under sequence parallelism. Gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.ranks, ctx.shape = ranks, x.shape
        first = x[0].clone() if ranks.rank == 0 else torch.zeros_like(x[0])
        comm.all_reduce(first, ranks.group)
        return first

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.clone()
        comm.all_reduce(summed, ctx.ranks.group)
        dx = grad.new_zeros(ctx.shape)
        if ctx.ranks.rank == 0:
            dx[0] = summed
        return dx, None


def first_token(x: Tensor, ranks: TensorGroup) -> Tensor:
    """Return the first token of each sequence, [batch, hidden], the same on every tensor rank."""
    if not ranks.sequence:
        return x[0]
    first: Tensor = _FirstOfShared.apply(x, ranks)  # type: ignore[no-untyped-call]
    return first


class Bert(Network):
    """One virtual stage of a BERT."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__(plan, chunk)
        config = plan.config
        head = config.head
        self.embedding = Embedding(plan) if chunk.is_first else None
        self.encoder = Stack(plan, own_layers(plan, chunk), ends=chunk.is_last)
        self.lm_head = None
        self.output_layer = None
        self.pooler = None
        self.binary_head = None
        self.classification_head = None
        self.multichoice_head = None
        if not chunk.is_last:
            return
        if config.has("transform"):
            shares = config.tie_embeddings and chunk.is_first
            self.lm_head = Transform(plan)
            self.output_layer = Head(plan, shares_embedding=shares)
        if config.has("pooler"):
            self.pooler = Pooler(plan)
        if head.binary:
            self.binary_head = Dense(config.hidden, 2)
        if head.classes:
            self.classification_head = Dense(config.hidden, head.classes)
        if head.choices:
            self.multichoice_head = Dense(config.hidden, 1)

    @classmethod
    def loss_names(cls, config: ModelConfig) -> tuple[str, ...]:
        return ("loss", SWAPPED) if config.head.binary else ("loss",)

    def units(self) -> Iterator[nn.Module]:
        heads = self.lm_head, self.output_layer, self.pooler, self.binary_head
        ends = (
            self.encoder.final_layernorm,
            *heads,
            self.classification_head,
            self.multichoice_head,
        )
        yield from (
            module for module in (self.embedding, *self.encoder.layers, *ends) if module is not None
        )

    def shared(self) -> Iterator[nn.Module]:
        yield from tied_embedding(self.embedding, self.output_layer)

    def forward(self, taken: Payload, run: Pass) -> Payload:
        if self.embedding is not None:
            taken = (self.embedding(run),)
        (x,) = taken
        return (self.encoder(x, run),)

    def loss(self, given: Payload, run: Pass) -> tuple[Tensor, Mapping[str, Counted]]:
        weights = mean_of_each_microbatch(run.label_weights())
        total, losses = self.label_losses(given, run.labels, weights * run.share)
        found = {"loss": Counted(losses, weights)}
        if self.pooler is not None and self.binary_head is not None:
            scores = self.binary_head(self.pooler(given[0])).float()
            each = F.cross_entropy(scores, run.extras[SWAPPED_PARTS], reduction="none")
            # Both losses have the same weight. Ranks that compute the same loss sum their gradients, so divide by their
            # number.
            total = total + each.mean() * (run.share * weights.numel() / self.alike)
            found[SWAPPED] = Counted(each.detach(), torch.ones_like(each))
        return total, found

    def label_losses(
        self, given: Payload, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert self.lm_head is not None
        assert self.output_layer is not None
        return self.output_layer.label_losses(
            self.lm_head(given[0]), self._shared(), labels, weights
        )

    @property
    def alike(self) -> int:
        """Number of ranks that compute the same loss and sum its gradients: tp with sequence parallelism, else 1."""
        return self.plan.ranks.size if self.plan.ranks.sequence else 1

    def scores(self, hidden: Tensor, examples: int, seed: Seed | None = None) -> Tensor:
        """Return float32 [examples, classes or choices] from the output of the last stage; the same on every tensor rank."""
        assert self.pooler is not None
        pooled, dropout = self.pooler(hidden), self.plan.options.hidden_dropout
        if seed is not None and dropout:  # every tensor rank holds the whole pooled tensor
            pooled = seed.drop(pooled.unsqueeze(0), dropout, At(0, POOLED), TensorGroup()).squeeze(
                0
            )
        head = self.classification_head or self.multichoice_head
        assert head is not None
        scores: Tensor = head(pooled).float()
        return scores.view(examples, -1)

    def logits(self, given: Payload) -> Tensor:
        assert self.lm_head is not None
        assert self.output_layer is not None
        return self.output_layer.logits(self.lm_head(given[0]), self._shared())

    def _shared(self) -> Tensor | None:
        return self.embedding.word_embeddings.weight if self.embedding is not None else None
