"""The decoder: GPT-2 and 3, Llama, Mistral, Qwen 2 and 3, Phi-3, Mixtral, by configuration; one chunk of it, with Megatron core's names.

Activations are [sequence, batch, hidden], or with sequence parallelism this tensor rank's part of the sequence.
"""

import torch
from torch import Tensor, nn

from megaconv.model.layout import Chunk
from megatron_lite.models import recompute, rng
from megatron_lite.models.attention import Documents
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.ends import Embedding, Head
from megatron_lite.models.layer import Layer
from megatron_lite.models.moe.balance import Balance
from megatron_lite.models.plan import Pass, Plan
from megatron_lite.models.rotary import Rotary
from megatron_lite.parallel import comm
from megatron_lite.parallel.tensor import Norm


class Decoder(nn.Module):
    """The layers of a chunk, counted from 0, and on the last one the final norm."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__()
        self.recompute = plan.options.recompute
        self.layers = nn.ModuleList(Layer(plan, chunk.first_layer + local) for local in range(chunk.layers))
        norm = (plan.config.hidden, plan.config.norm.epsilon)
        self.final_layernorm = Norm(*norm, with_bias=plan.norm_bias) if chunk.is_last else None
        if plan.options.compile:
            for layer in self.layers:
                setattr(layer, "forward", torch.compile(layer.forward))  # noqa: B010  # so that hooks stay outside

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        def through(layer: nn.Module, x: Tensor) -> Tensor:
            made: Tensor = layer(x, run)
            return made

        x = recompute.run_layers(list(self.layers), x, through, self.recompute)
        return x if self.final_layernorm is None else self.final_layernorm(x)


class ModelChunk(nn.Module):
    """What one virtual stage holds. Its parameters are those of native_tensors(..., "core", ...), names and shapes alike."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__()
        self.plan, self.is_first, self.is_last = plan, chunk.is_first, chunk.is_last
        self.embedding = Embedding(plan) if chunk.is_first else None
        self.decoder = Decoder(plan, chunk)
        shares = plan.config.tie_embeddings and chunk.is_first
        self.output_layer = Head(plan, shares_embedding=shares) if chunk.is_last else None
        self.rotary: Rotary | None = None

    def forward(
        self, x: Tensor | None, batch: Microbatch, seed: rng.Seed | None, balance: Balance | None = None
    ) -> Tensor:
        """x: what the stage before gave; None on the first stage. On the last stage the final norm is done too."""
        length, dtype = batch.tokens.shape[1], next(self.parameters()).dtype
        if self.embedding is not None:
            x = self.embedding(batch, seed)
        assert x is not None, "a stage behind the first gets activations"
        config, tables = self.plan.config, None
        if config.positions.kind == "rope":
            self.rotary = self.rotary or Rotary(config, x.device, dtype)
            tables = self.rotary.tables(length, batch.positions)
        documents = None if batch.documents is None else Documents(batch.documents)
        made: Tensor = self.decoder(x, Pass(tables, documents, seed, balance))
        return made

    def loss(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of weights * losses; losses without a gradient). All [batch, sequence]; on the last stage."""
        assert self.output_layer is not None
        made: tuple[Tensor, Tensor] = self.output_layer(hidden, self._shared(), labels, weights)
        return made

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [batch, sequence, vocabulary], the same on every tensor rank; on the last stage, without a gradient."""
        head, ranks = self.output_layer, self.plan.ranks
        assert head is not None
        weight = self._shared() if head.weight is None else head.weight
        assert weight is not None
        if ranks.group and ranks.sequence:
            hidden = comm.gathered(hidden, ranks.group)
        own = (hidden @ weight.t()).float().permute(2, 1, 0)
        whole = comm.gathered(own, ranks.group) if ranks.group else own
        return whole[: self.plan.config.vocab].permute(1, 2, 0)

    def _shared(self) -> Tensor | None:
        return None if self.embedding is None else self.embedding.word_embeddings.weight
