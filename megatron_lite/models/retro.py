"""Retro: a decoder, some of whose layers attend to the retrieved neighbors of each chunk; with Megatron core's names.

    layer with retrieval    x += attention(norm(x));  N = norm(x);  x += gate * cross attention(N, E);  x += mlp(norm(x))
    encoder, first layer    E += attention(norm(E));  n = norm(E);  E = n + cross attention(n, N's chunk);  E += mlp(norm(E))
    encoder, other layers   as a layer without retrieval, but tokens attend to later tokens too

The first layer with retrieval holds the encoder, which makes E [neighbors * tokens, batch * chunks, hidden] for all
layers with retrieval. Rope rotates only self-attention of the decoder. The residual of the encoder's first layer is the
normed n, as in Megatron core. Source: megatron/core/models/retro, core 0.15.3.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from megaconv.model.layout import Chunk
from megatron_lite.models import recompute, rng
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.chunk import ModelChunk, Stack
from megatron_lite.models.cross_attention import CrossAttention
from megatron_lite.models.layer import Layer, Residual
from megatron_lite.models.mixers.self_attention import SelfAttention
from megatron_lite.models.mlp import MLP
from megatron_lite.models.passes import Pass
from megatron_lite.models.retrieval_chunks import Chunks
from megatron_lite.parallel.payload import Payload
from megatron_lite.parallel.tensor import Norm

State = tuple[Tensor, Tensor]
"""(activations of the decoder, E: before the encoder the neighbors' embedding [tokens, batch * chunks * neighbors, hidden])."""
OF_RETRIEVAL = (".cross_attention.", ".pre_cross_attn_layernorm.")
"""Parts of the names of all parameters that a GPT lacks."""


class SeparateNorm(nn.Module):
    """A norm inside a module, because of Megatron core's parameter names."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.norm = Norm(plan.config.hidden, plan.norm)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed


class Attn(nn.Module):
    """Cross attention as a module inside a module, because of Megatron core's parameter names."""

    def __init__(self, plan: Plan, number: int) -> None:
        """number: of the layer among all with attention to other sequences; part of the seed of dropout."""
        super().__init__()
        # Numbers after those of the encoder's self-attention, because both use the neighbors' seed.
        self.attn = CrossAttention(plan, plan.config.retrieval.layers + number)

    def attend(self, x: Tensor, memory: Tensor, source: Pass) -> Tensor:
        """x [queries, rows, hidden], memory [keys, rows, hidden]: each query attends to all keys of its row."""
        visible = torch.ones(memory.shape[1], len(memory), dtype=torch.bool, device=memory.device)
        found: Tensor = self.attn(x, memory, replace(source, visible=visible))
        return found


class FirstEncoderLayer(Residual):
    """The encoder's layer that attends to the decoder's chunks."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.ranks, self.dropout = plan.ranks, plan.options.hidden_dropout
        self.after_attention, self.after_cross_attention, self.after_mlp = (
            rng.At(0, place)
            for place in (rng.AFTER_ATTENTION, rng.AFTER_CROSS_ATTENTION, rng.AFTER_MLP)
        )
        self.self_attention = SelfAttention(plan, 0)
        self.pre_cross_attn_layernorm = Norm(plan.config.hidden, plan.norm)
        self.cross_attention = Attn(plan, 0)
        self.pre_mlp_layernorm = SeparateNorm(plan)
        self.mlp = MLP(plan, has_norm=False)

    def forward(self, x: Tensor, chunks: Tensor, source: Pass) -> Tensor:
        """x [tokens, rows, hidden]: neighbors. chunks [size, rows, hidden]: the chunk of each neighbor, normed."""
        x = x + self.drop(self.self_attention(x, source), source, self.after_attention)
        normed = self.pre_cross_attn_layernorm(x)
        found = self.cross_attention.attend(normed, chunks, source)
        x = normed + self.drop(found, source, self.after_cross_attention)
        made = self.mlp(self.pre_mlp_layernorm(x))
        return x + self.drop(made, source, self.after_mlp)


class Encoder(nn.Module):
    """The encoder of neighbors. It has no norm at its end."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        dropouts = plan.options.retrieval
        options = replace(
            plan.options,
            hidden_dropout=dropouts.hidden_dropout,
            attention_dropout=dropouts.attention_dropout,
        )
        own = replace(plan, options=options)
        others = (Layer(own, layer) for layer in range(1, plan.config.retrieval.layers))
        self.layers = nn.ModuleList([FirstEncoderLayer(own), *others])

    def forward(self, neighbors: Tensor, chunks: Tensor, source: Pass) -> Tensor:
        """Shapes as in FirstEncoderLayer."""
        first, *others = self.layers
        x: Tensor = first(neighbors, chunks, source)
        for layer in others:
            x = layer(x, source)
        return x


class RetrievalAttention(Attn):
    """Chunked cross attention, with the encoder in the first layer that has it."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__(plan, 1 + layer)
        retrieval = plan.config.retrieval
        self.size, self.neighbors = retrieval.chunk, retrieval.neighbors
        self.encoder = Encoder(plan) if layer == plan.config.retrieving[0] else None

    def forward(self, normed: Tensor, memory: Tensor, source: Pass) -> State:
        """normed [sequence, batch, hidden] -> (output of the same shape, E). memory: see State."""
        length, batch, _ = normed.shape
        count = len(source.tokens) // (batch * self.neighbors)
        chunks = Chunks(length, self.size, count)
        if self.encoder is not None:
            memory = self._encoded(memory, chunks.of(normed), source)
        found = self.attend(chunks.seeing(normed), memory, source)
        return chunks.placed(found, batch), memory

    def _encoded(self, neighbors: Tensor, chunks: Tensor, source: Pass) -> Tensor:
        """neighbors [tokens, rows * neighbors, hidden], chunks [size, rows, hidden] -> E [neighbors * tokens, rows, hidden]."""
        assert self.encoder is not None
        own = chunks.repeat_interleave(self.neighbors, dim=1)
        encoded = self.encoder(neighbors, own, source)
        tokens, _, hidden = encoded.shape
        by_neighbor = encoded.view(tokens, -1, self.neighbors, hidden).transpose(1, 2)
        memory: Tensor = by_neighbor.reshape(tokens * self.neighbors, -1, hidden)
        return memory


class RetrievalLayer(Residual):
    """A layer with attention to the neighbors of chunks."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        self.ranks, self.dropout = plan.ranks, plan.options.hidden_dropout
        self.gate = plan.options.retrieval.gate
        self.after_attention, self.after_cross_attention, self.after_mlp = (
            rng.At(layer, place)
            for place in (rng.AFTER_ATTENTION, rng.AFTER_CROSS_ATTENTION, rng.AFTER_MLP)
        )
        self.self_attention = SelfAttention(plan, layer)
        self.pre_cross_attn_layernorm = Norm(plan.config.hidden, plan.norm)
        self.cross_attention = RetrievalAttention(plan, layer)
        self.mlp = MLP(plan)

    def forward(self, x: Tensor, memory: Tensor | None, run: Pass) -> tuple[Tensor, Tensor | None]:
        """Return (x, E). memory: see State; None: without retrieval."""
        x = x + self.drop(self.self_attention(x, run), run, self.after_attention)
        if memory is not None:
            assert run.source is not None
            normed = self.pre_cross_attn_layernorm(x)
            found, memory = self.cross_attention(normed, memory, run.source)
            gated = found if self.gate == 1 else found * self.gate
            x = x + self.drop(gated, run, self.after_cross_attention)
        return x + self.drop(self.mlp(x), run, self.after_mlp), memory


class RetrievalStack(Stack):
    """The layers of the decoder, through which E passes beside the activations."""

    def forward(self, x: Tensor, memory: Tensor | None, run: Pass) -> Tensor:  # type: ignore[override]
        """memory: see State; None: without retrieval."""

        def through(
            layer: nn.Module, state: tuple[Tensor, Tensor | None]
        ) -> tuple[Tensor, Tensor | None]:
            x, memory = state
            if isinstance(layer, RetrievalLayer):
                made: tuple[Tensor, Tensor | None] = layer(x, memory, run)
                return made
            return layer(x, run), memory

        x, _ = recompute.run_layers(list(self.layers), (x, memory), through, self.recompute)
        return x if self.last_norm is None else self.last_norm(x)


class Retro(ModelChunk):
    """A Retro, which has one pipeline stage."""

    decoder: RetrievalStack

    def make_decoder(self, plan: Plan, chunk: Chunk) -> Stack:
        """Return the decoder's layers."""
        return RetrievalStack(plan, _layers(plan), ends=chunk.is_last)

    def is_frozen(self, name: str) -> bool:
        """Return True for what a gate of 0 leaves uncomputed."""
        is_off = not self.plan.options.retrieval.gate
        return is_off and any(part in name for part in OF_RETRIEVAL)

    def forward(self, taken: Payload, run: Pass) -> Payload:
        """Run the model. Without neighbors in the pass, or with a gate of 0, it is the GPT inside the Retro."""
        assert self.embedding is not None
        x: Tensor = self.embedding(run)
        if run.source is None or not len(run.source.tokens) or not self.plan.options.retrieval.gate:
            return (self.decoder(x, None, run),)
        source = replace(run.source, rotary=None, local_rotary=None)
        neighbors: Tensor = self.embedding(source)
        return (self.decoder(x, neighbors, replace(run, source=source)),)


def _layers(plan: Plan) -> Iterable[nn.Module]:
    for layer in range(plan.config.layer_count):
        retrieves = layer in plan.config.retrieving
        yield RetrievalLayer(plan, layer) if retrieves else Layer(plan, layer)
