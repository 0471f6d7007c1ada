"""The modules before and after the layers: the embedding and the head."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_lite.models import rng
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.logit_loss import CrossEntropy, LogitLoss, capped, in_rows
from megatron_lite.models.lora.token_rows import TokenRows
from megatron_lite.models.loss import head_loss, rows_at_a_time
from megatron_lite.models.passes import Ahead, Pass
from megatron_lite.models.teaching import Distilled, Teaching
from megatron_lite.parallel import comm
from megatron_lite.parallel.parameter_kinds import Kind, ParametersFreed
from megatron_lite.parallel.tensor import Norm, VocabEmbedding
from megatron_lite.products.product import PLAIN, Product
from megatron_lite.settings.options import Distillation


class Positions(nn.Embedding):
    """A table of learned vectors, for positions or for token types."""

    kinds: ClassVar = {"weight": Kind.OF_TOKENS}


def waves(positions: Tensor, width: int, base: float) -> Tensor:
    """Return float32 [..., width]: sines, then cosines, of positions at falling frequencies (arXiv 1706.03762)."""
    pairs = torch.arange(width // 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * base ** (-pairs / (width // 2))
    return torch.cat((angles.sin(), angles.cos()), -1)


class Embedding(nn.Module):
    """The embedding of tokens, plus learned positions and token types if the model has them."""

    gradient_needs_parameters: ClassVar = False
    """The gradient of a table needs the tokens alone."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        config = plan.config
        self.ranks = plan.ranks
        self.dropout = plan.options.hidden_dropout
        self.at = rng.At(0, rng.EMBEDDING)
        self.scale = config.embedding_scale
        self.word_embeddings = VocabEmbedding(
            plan.vocab_rows // plan.ranks.size, config.hidden, plan.ranks
        )
        self.token_rows: TokenRows | None = None
        """Rows that are trained beside adapters."""
        learned = config.positions.kind == "learned"
        self.position_embeddings = (
            Positions(config.sizes()["position_rows"], config.hidden) if learned else None
        )
        self.first_position = config.positions.offset
        self.wave_base = config.positions.theta if config.positions.kind == "sinusoidal" else None
        self.tokentype_embeddings = (
            Positions(config.token_types, config.hidden) if config.token_types else None
        )
        self.norm = Norm(config.hidden, plan.norm) if config.norm.embedding else None

    def forward(self, run: Pass, ahead: Ahead | None = None) -> Tensor:
        """ahead: its tokens are used in place of the pass's."""
        given = run if ahead is None else ahead
        tokens = given.tokens.t()
        x: Tensor = self.word_embeddings(tokens)
        if self.token_rows is not None:
            x = self.token_rows.embedded(x, tokens)
        if self.scale is not None:
            # Round the scale to the dtype first, as transformers does.
            x = x * torch.tensor(self.scale, dtype=x.dtype)
        if given.pictures is not None:
            x = given.pictures.embedded(x, self.ranks)
        if self.position_embeddings is not None:
            rows = run.positions + self.first_position
            x = x + self.position_embeddings(self.ranks.own_part(rows))
        if self.wave_base is not None:
            rows = self.ranks.own_part(run.positions + self.first_position)
            x = x + waves(rows, x.shape[-1], self.wave_base).to(x.dtype)
        if self.tokentype_embeddings is not None:
            assert run.types is not None
            x = x + self.tokentype_embeddings(self.ranks.own_part(run.types.t()))
        if self.norm is not None:
            x = self.norm(x)
        if run.seed is None or not self.dropout:
            return x
        dropped: Tensor = run.seed.drop(x, self.dropout, self.at, self.ranks)
        return dropped


class Head(nn.Module):
    """The output matrix, or (weight None) the tied embedding, and a bias if the model has one."""

    kinds: ClassVar = {"weight": Kind.VOCABULARY, "bias": Kind.SHARDED}

    def __init__(self, plan: Plan, *, shares_embedding: bool) -> None:
        super().__init__()
        self.plan = plan
        self.product_of_logits: Product = PLAIN
        rows = plan.vocab_rows // plan.ranks.size
        self.weight = (
            None if shares_embedding else nn.Parameter(torch.empty(rows, plan.config.hidden))
        )
        self.token_rows: TokenRows | None = None
        """Rows that are trained beside adapters; those of the embedding if the head is tied to it."""
        has_bias = plan.config.head.bias or plan.config.has("transform")
        self.bias = nn.Parameter(torch.empty(rows)) if has_bias else None

    def forward(
        self, hidden: Tensor, shared: Tensor | None, loss: LogitLoss
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of weights * losses, losses [loss.count, batch, sequence]); see head_loss."""
        plan, weight = self.plan, self._matrix(shared)
        hidden = self._divided(hidden)
        rows = plan.options.loss_rows or rows_at_a_time(
            hidden.device, weight.shape[0] * loss.count, plan.ranks.size
        )
        total, losses = head_loss(
            hidden,
            weight,
            self.bias,
            loss,
            plan.config.vocab,
            rows,
            plan.ranks,
            plan.config.head.logit_cap,
            None if self.token_rows is None else self.token_rows.written_into(weight),
        )
        return total, losses.view(loss.count, -1, hidden.shape[1]).transpose(1, 2)

    def taught_losses(
        self,
        hidden: Tensor,
        shared: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        teaching: Teaching,
        options: Distillation,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (sum of weights * losses, cross entropy, divergence from the teacher). labels, weights, losses: [batch, sequence]."""
        rows = teaching.rows(self.plan.ranks)
        loss = Distilled(in_rows(labels), in_rows(weights), rows, teaching, options)
        total, losses = self(hidden, shared, loss)
        cross_entropy, divergence = losses
        return total, cross_entropy, divergence

    def label_losses(
        self, hidden: Tensor, shared: Tensor | None, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of weights * losses, losses [batch, sequence]): the cross entropy. labels, weights [batch, sequence]."""
        temperature = self.plan.options.loss_temperature
        loss = CrossEntropy(in_rows(labels), in_rows(weights), temperature)
        total, losses = self(hidden, shared, loss)
        return total, losses[0]

    def teaching(self, hidden: Tensor, shared: Tensor | None) -> Teaching:
        """Return the predictions that this head would compute."""
        cap = self.plan.config.head.logit_cap
        return Teaching(self._divided(hidden), self._matrix(shared), self.bias, cap)

    def logits(self, hidden: Tensor, shared: Tensor | None) -> Tensor:
        """Return float32 [batch, sequence, vocabulary], the same on every tensor rank. Not differentiable."""
        ranks = self.plan.ranks
        hidden = self._divided(hidden)
        if ranks.group and ranks.sequence:
            hidden = comm.gathered(hidden, ranks.group)
        matrix = self._matrix(shared)
        if self.token_rows is not None:
            self.token_rows.written_into(matrix)
        logits = self.product_of_logits.linear(hidden, matrix, self.bias).float()
        own = capped(logits, self.plan.config.head.logit_cap).permute(2, 1, 0)
        whole = comm.gathered(own, ranks.group) if ranks.group else own
        return whole[: self.plan.config.vocab].permute(1, 2, 0)

    def _divided(self, hidden: Tensor) -> Tensor:
        """Divide the input of the matrix in place of the logits, which are many more."""
        divisor = self.plan.config.head.divisor
        return hidden if divisor is None else hidden / divisor

    def _matrix(self, shared: Tensor | None) -> Tensor:
        weight = shared if self.weight is None else self.weight
        assert weight is not None
        if not weight.untyped_storage().nbytes():
            raise ParametersFreed
        return weight


def tied_embedding(embedding: Embedding | None, head: Head | None) -> Iterator[nn.Module]:
    """Yield the embedding if the head uses its matrix."""
    if embedding is not None and head is not None and head.weight is None:
        yield embedding
