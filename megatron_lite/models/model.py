"""The decoder: GPT-2 and 3, Llama, Mistral, Qwen 2 and 3, Phi-3, by configuration; one chunk of it, with Megatron core's names.

Activations are [sequence, batch, hidden], or with sequence parallelism this tensor rank's part of the sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout, padded_vocab
from megaconv.model.sharding import rank_sizes
from megatron_lite.models import recompute, rng
from megatron_lite.models.attention import Documents, attend
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.loss import head_loss
from megatron_lite.models.rotary import Rotary, rotate
from megatron_lite.parallel import comm
from megatron_lite.parallel.tensor import Keep, Made, Norm, NormColumnLinear, RowLinear, TensorGroup, VocabEmbedding
from megatron_lite.settings.options import ModelOptions


@dataclass(frozen=True)
class Plan:
    """What all parts of a model are built from."""

    config: ModelConfig
    options: ModelOptions
    ranks: TensorGroup
    sizes: dict[str, int]
    """This tensor rank's share of heads, kv_heads, ffn."""
    vocab_rows: int
    """Of the whole vocabulary, padding included."""

    @property
    def norm_bias(self) -> bool:
        return self.config.norm.kind == "LayerNorm"

    @property
    def keep(self) -> Keep:
        return recompute.make_again if self.options.recompute.granularity == "selective" else recompute.keep


TRAINED = ("gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Families that this decoder is, by configuration."""
NOT_COMPUTED = {
    "interleaved": "rotary positions of neighbouring elements",
    "skips_rope": "layers whose q and k don't rotate",
    "relu2": "squared ReLU",
    "zero_centered": "norms that multiply with their weight + 1",
    "output_norm": "norms after its sublayers, not before them",
    "sandwich_norm": "norms after its sublayers, too",
    "wide_qk_norm": "norms of q and k over all heads",
    "qk_l2_norm": "q and k divided by their L2 norm",
    "scaled_scores": "attention scores with a scale of their own",
    "capped_scores": "capped attention scores",
    "capped_logits": "capped logits",
    "scaled_embedding": "a scaled embedding",
    "two_ropes": "another base of rope in layers with a window",
    "sinks": "attention sinks",
    "clamped": "a clamped activation",
}
"""Features of a model that this decoder has no code for, whatever its family."""


def make_plan(config: ModelConfig, layout: Layout, options: ModelOptions, ranks: TensorGroup) -> Plan:
    """Raises NotExpressible for a model that can't be trained, LayoutError for one that can't be sharded."""
    if config.experts.count:
        raise NotExpressible(
            f"the model has {config.experts.count} experts a layer; mixtures of experts can't be trained yet"
        )
    if config.family not in TRAINED:
        raise NotExpressible(f"a {config.family} can't be trained yet; models that can are {', '.join(TRAINED)}")
    for feature, what in NOT_COMPUTED.items():
        if config.has(feature):
            raise NotExpressible(f"the model has {what}, which can't be trained yet")
    rows = padded_vocab(config.vocab, options.vocab_divisor, layout.tp)
    return Plan(config, options, ranks, rank_sizes(config, layout), rows)


@dataclass(frozen=True)
class Pass:
    """What every layer needs of a microbatch."""

    rotary: tuple[Tensor, Tensor] | None = None
    documents: Documents | None = None
    seed: rng.Seed | None = None
    """Of dropout; None: nothing is dropped."""


class SelfAttention(nn.Module):
    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        config, sizes = plan.config, plan.sizes
        self.layer, self.ranks, self.options, self.head_dim = layer, plan.ranks, plan.options, config.attention.head_dim
        self.kv_heads, self.group = sizes["kv_heads"], config.attention.heads // config.attention.kv_heads
        self.window = config.layers[layer].window
        self.linear_qkv = NormColumnLinear(
            config.hidden, self.kv_heads * (self.group + 2) * self.head_dim, config.norm.epsilon, plan.ranks,
            norm_bias=plan.norm_bias, bias=config.attention.qkv_bias, keep=plan.keep,
        )  # fmt: skip
        norm = (config.attention.head_dim, config.norm.epsilon)
        self.q_layernorm = Norm(*norm, with_bias=False) if config.attention.qk_norm else None
        self.k_layernorm = Norm(*norm, with_bias=False) if config.attention.qk_norm else None
        self.linear_proj = RowLinear(
            sizes["heads"] * self.head_dim, config.hidden, plan.ranks, bias=config.attention.o_bias
        )

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        mixed = self.linear_qkv(x)
        mixed = mixed.unflatten(-1, (self.kv_heads, self.group + 2, self.head_dim))
        # One split, whose gradient is one concatenation; that of a slice is as large as the whole.
        q, k, v = (part.flatten(2, 3) for part in mixed.split((self.group, 1, 1), -2))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if run.rotary is not None:
            q, k = rotate(q, *run.rotary), rotate(k, *run.rotary)
        projected: Tensor = self.linear_proj(self._attend(q, k, v, run).flatten(2))
        return projected

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, run: Pass) -> Tensor:
        how: Any = {"window": self.window, "documents": run.documents, "backend": self.options.attention}
        if run.seed is None or not self.options.attention_dropout:
            return attend(q, k, v, **how)
        with run.seed.for_attention(self.layer, self.ranks, q.device):
            return attend(q, k, v, dropout=self.options.attention_dropout, **how)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping nothing but its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        activated: Tensor = F.silu(gate).mul_(up)
        return activated

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=dgate)
        torch.mul(F.silu(gate), grad, out=dup)
        return dx


ACTIVATIONS: dict[str, Made] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class MLP(nn.Module):
    activation: Made
    keep: Keep

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        config, ffn = plan.config, plan.sizes["ffn"]
        self.keep, self.gated, self.activation = plan.keep, config.mlp.gated, ACTIVATIONS[config.mlp.activation]
        self.linear_fc1 = NormColumnLinear(
            config.hidden, ffn * (2 if config.mlp.gated else 1), config.norm.epsilon, plan.ranks,
            norm_bias=plan.norm_bias, bias=config.mlp.bias, keep=plan.keep,
        )  # fmt: skip
        self.linear_fc2 = RowLinear(ffn, config.hidden, plan.ranks, bias=config.mlp.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.keep(self._activate, self.linear_fc1(x), self.linear_fc2)

    def _activate(self, x: Tensor) -> Tensor:
        """[..., gate then up] or [..., ffn] -> [..., ffn]."""
        if not self.gated:
            return self.activation(x)
        if self.activation is F.silu and not torch.compiler.is_compiling():
            activated: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
            return activated
        gate, up = x.chunk(2, -1)
        return self.activation(gate) * up


class Layer(nn.Module):
    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        self.layer, self.ranks, self.dropout = layer, plan.ranks, plan.options.hidden_dropout
        self.self_attention = SelfAttention(plan, layer)
        self.mlp = MLP(plan)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        x = x + self._drop(self.self_attention(x, run), run, rng.AFTER_ATTENTION)
        return x + self._drop(self.mlp(x), run, rng.AFTER_MLP)

    def _drop(self, x: Tensor, run: Pass, place: int) -> Tensor:
        if run.seed is None or not self.dropout:
            return x
        dropped: Tensor = run.seed.drop(x, self.dropout, self.layer, place, self.ranks)
        return dropped


class Embedding(nn.Module):
    """Keys, and learned positions where the model has them."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        config = plan.config
        self.ranks, self.dropout = plan.ranks, plan.options.hidden_dropout
        self.word_embeddings = VocabEmbedding(plan.vocab_rows // plan.ranks.size, config.hidden, plan.ranks)
        learned = config.positions.kind == "learned"
        self.position_embeddings = nn.Embedding(config.max_positions, config.hidden) if learned else None

    def forward(self, batch: Microbatch, seed: rng.Seed | None) -> Tensor:
        x: Tensor = self.word_embeddings(batch.tokens.t())
        if self.position_embeddings is not None:
            x = x + self._positions(batch)
        return seed.drop(x, self.dropout, 0, rng.EMBEDDING, self.ranks) if seed and self.dropout else x

    def _positions(self, batch: Microbatch) -> Tensor:
        assert self.position_embeddings is not None
        length = batch.tokens.shape[1]
        places = torch.arange(length, device=batch.tokens.device).unsqueeze(1)
        if batch.positions is not None:
            places = batch.positions.t()
        positions: Tensor = self.position_embeddings(self.ranks.own_part(places))
        return positions


class Head(nn.Module):
    """The last matrix, or (weight None) the embedding's in its place."""

    def __init__(self, plan: Plan, *, shares_embedding: bool) -> None:
        super().__init__()
        self.plan = plan
        rows = plan.vocab_rows // plan.ranks.size
        self.weight = None if shares_embedding else nn.Parameter(torch.empty(rows, plan.config.hidden))

    def forward(self, hidden: Tensor, shared: Tensor | None, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """labels, weights [batch, sequence]. See head_loss; its losses come back as [batch, sequence]."""
        weight = shared if self.weight is None else self.weight
        assert weight is not None
        plan = self.plan
        # On a CPU each tensor rank has fewer columns, and a collective is dear.
        rows = plan.options.loss_rows or (1024 if hidden.is_cuda else 128 * plan.ranks.size)
        total, losses = head_loss(
            hidden, weight, labels.t().reshape(-1), weights.t().reshape(-1), plan.config.vocab, rows, plan.ranks
        )
        return total, losses.view(labels.shape[1], labels.shape[0]).t()


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

    def forward(self, x: Tensor | None, batch: Microbatch, seed: rng.Seed | None) -> Tensor:
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
        made: Tensor = self.decoder(x, Pass(tables, documents, seed))
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
