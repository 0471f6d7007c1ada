"""BERT in Megatron core's form: layers that see in both directions, and two losses.

    words that were hidden          final norm -> dense, gelu, norm -> the embedding's matrix and a bias
    whether two parts are swapped   final norm -> first token -> pooler: dense, tanh -> binary head

As in Megatron each is a mean over a microbatch, and both count alike. One that learns a task has a head for it in their place:

    a class, or the right choice   final norm -> first token -> pooler: dense, tanh -> dropout -> classification or multiple-choice head

The loss is then a mean over the examples of a step.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megatron_lite.models.chunk import Stack, own_layers
from megatron_lite.models.ends import Embedding, Head
from megatron_lite.models.mlp import ACTIVATIONS
from megatron_lite.models.network import Counted, Network, mean_of_each_microbatch
from megatron_lite.models.passes import Pass
from megatron_lite.models.plan import Plan
from megatron_lite.models.rng import POOLED, At, Seed
from megatron_lite.parallel import comm
from megatron_lite.parallel.kinds import Kind
from megatron_lite.parallel.payload import Payload
from megatron_lite.parallel.tensor import Norm, NormOptions, TensorGroup

SWAPPED = "sop_loss"
"""Sentence order prediction, by Megatron's word."""
ACCURACY = "accuracy"
"""Of a task: the part of its examples that is answered right."""


class Dense(nn.Module):
    """A matrix and its bias, whole on every tensor rank."""

    kinds: ClassVar = {"weight": Kind.OF_TOKENS, "bias": Kind.OF_TOKENS}

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(out, width)), nn.Parameter(torch.empty(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Transform(nn.Module):
    """What lies before the matrix of words; under sequence parallelism of this rank's tokens."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        config = plan.config
        self.dense = Dense(config.hidden, config.hidden)
        self.layer_norm = Norm(config.hidden, NormOptions(config.norm.epsilon, with_bias=True))
        self.activate = ACTIVATIONS[config.head.activation]

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.layer_norm(self.activate(self.dense(x)))
        return normed


class Pooler(nn.Module):
    """The first token of each sequence, [sequence (/ tp), batch, hidden] -> [batch, hidden], the same on every tensor rank."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.ranks = plan.ranks
        self.dense = Dense(plan.config.hidden, plan.config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(first_token(x, self.ranks)))


class _FirstOfShared(torch.autograd.Function):
    """Under sequence parallelism the first tensor rank has it. Gradients of all ranks are summed."""

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
    if not ranks.sequence:
        return x[0]
    first: Tensor = _FirstOfShared.apply(x, ranks)  # type: ignore[no-untyped-call]
    return first


class Bert(Network):
    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__(plan, chunk)
        config, last = plan.config, chunk.is_last
        hidden, for_words = config.hidden, last and config.has("transform")
        self.embedding = Embedding(plan) if chunk.is_first else None
        self.encoder = Stack(plan, own_layers(plan, chunk), ends=last)
        self.lm_head = Transform(plan) if for_words else None
        shares = config.tie_embeddings and chunk.is_first
        self.output_layer = Head(plan, shares_embedding=shares) if for_words else None
        self.pooler = Pooler(plan) if last and config.has("pooler") else None
        self.binary_head = Dense(hidden, 2) if last and config.head.binary else None
        self.classification_head = Dense(hidden, config.head.classes) if last and config.head.classes else None
        self.multichoice_head = Dense(hidden, 1) if last and config.head.choices else None

    @classmethod
    def loss_names(cls, config: ModelConfig) -> tuple[str, ...]:
        if config.head.classes or config.head.choices:
            return "loss", ACCURACY
        return ("loss", SWAPPED) if config.head.binary else ("loss",)

    def units(self) -> Iterator[nn.Module]:
        heads = self.lm_head, self.output_layer, self.pooler, self.binary_head
        ends = (self.encoder.final_layernorm, *heads, self.classification_head, self.multichoice_head)
        yield from (module for module in (self.embedding, *self.encoder.layers, *ends) if module is not None)

    def forward(self, taken: Payload, run: Pass) -> Payload:
        if self.embedding is not None:
            taken = (self.embedding(run),)
        (x,) = taken
        return (self.encoder(x, run),)

    def loss(self, given: Payload, run: Pass) -> tuple[Tensor, Mapping[str, Counted]]:
        (hidden,) = given
        if self.lm_head is None:
            return self._loss_of_task(hidden, run)
        assert self.output_layer is not None
        mask = torch.ones_like(run.labels, dtype=torch.float32) if run.weights is None else run.weights
        weights = mean_of_each_microbatch(mask)
        total, losses = self.output_layer(self.lm_head(hidden), self._shared(), run.labels, weights * run.share)
        found = {"loss": Counted(losses, weights)}
        if self.pooler is not None and self.binary_head is not None:
            assert run.swapped is not None
            each = F.cross_entropy(self.binary_head(self.pooler(hidden)).float(), run.swapped, reduction="none")
            total = total + each.mean() * (run.share * mask.numel() / self._alike)
            found[SWAPPED] = Counted(each.detach(), torch.ones_like(each))
        return total, found

    @property
    def _alike(self) -> int:
        """How many ranks compute the same of the pooled token, and have their gradients summed: under sequence parallelism."""
        return self.plan.ranks.size if self.plan.ranks.sequence else 1

    def _loss_of_task(self, hidden: Tensor, run: Pass) -> tuple[Tensor, Mapping[str, Counted]]:
        assert run.answers is not None
        assert run.counting_answers is not None
        scores, weights = self.scores(hidden, len(run.answers), run.seed), run.counting_answers
        each = F.cross_entropy(scores, run.answers, reduction="none")
        right = (scores.argmax(1) == run.answers).to(weights.dtype)
        total = torch.dot(each, weights) * (run.share / self._alike)
        return total, {"loss": Counted(each.detach(), weights), ACCURACY: Counted(right, weights)}

    def scores(self, hidden: Tensor, examples: int, seed: Seed | None = None) -> Tensor:
        """float32 [examples, classes or choices], of what a model for a task gives on its last stage; the same on every tensor rank."""
        assert self.pooler is not None
        pooled, dropout = self.pooler(hidden), self.plan.options.hidden_dropout
        if seed is not None and dropout:  # every rank has all of it
            pooled = seed.drop(pooled.unsqueeze(0), dropout, At(0, POOLED), TensorGroup()).squeeze(0)
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
