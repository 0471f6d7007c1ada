"""T5: an encoder, and a decoder that attends to it; one chunk of it, with Megatron core's names.

A stage has layers of the encoder or of the decoder, or all of both. What the encoder made goes on from its last stage through
every stage of the decoder, beside the activations, and its gradient comes back the same way.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from megaconv.model.layout import Chunk
from megaconv.model.table import encoder_layers
from megatron_lite.models import recompute, rng
from megatron_lite.models.batch import Lengths
from megatron_lite.models.chunk import Counted, activations
from megatron_lite.models.cross_attention import CrossAttention
from megatron_lite.models.ends import Embedding, Head
from megatron_lite.models.layer import Layer
from megatron_lite.models.mlp import MLP
from megatron_lite.models.passes import Pass
from megatron_lite.models.plan import Plan
from megatron_lite.models.self_attention import SelfAttention
from megatron_lite.parallel.payload import Payload, Wires
from megatron_lite.parallel.tensor import Norm


class CrossLayer(nn.Module):
    """Of the decoder: attention to what came before, attention to the encoder's text, MLP."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        self.layer, self.ranks, self.dropout = layer, plan.ranks, plan.options.hidden_dropout
        self.self_attention = SelfAttention(plan, layer)
        self.pre_cross_attn_layernorm = Norm(plan.config.hidden, plan.config.norm.epsilon, with_bias=plan.norm_bias)
        self.cross_attention = CrossAttention(plan, layer)
        self.mlp = MLP(plan)

    def forward(self, x: Tensor, memory: Tensor, run: Pass) -> Tensor:
        assert run.source is not None
        x = x + self._drop(self.self_attention(x, run), run, rng.AFTER_ATTENTION)
        found = self.cross_attention(self.pre_cross_attn_layernorm(x), memory, run.source)
        x = x + self._drop(found, run, rng.AFTER_CROSS_ATTENTION)
        return x + self._drop(self.mlp(x), run, rng.AFTER_MLP)

    def _drop(self, x: Tensor, run: Pass, place: int) -> Tensor:
        if run.seed is None or not self.dropout:
            return x
        dropped: Tensor = run.seed.drop(x, self.dropout, self.layer, place, self.ranks)
        return dropped


class Stack(nn.Module):
    """Layers of the encoder or of the decoder, counted from 0, and at the end of the stack its norm."""

    def __init__(self, plan: Plan, layers: Iterable[nn.Module], *, ends: bool) -> None:
        super().__init__()
        self.recompute, config = plan.options.recompute, plan.config
        self.layers = nn.ModuleList(layers)
        normed = ends and config.norm.final
        self.final_layernorm = Norm(config.hidden, config.norm.epsilon, with_bias=plan.norm_bias) if normed else None

    def forward(self, x: Tensor, *of_layers: Tensor | Pass) -> Tensor:
        """of_layers: what every layer is handed beside its input."""

        def through(layer: nn.Module, x: Tensor) -> Tensor:
            made: Tensor = layer(x, *of_layers)
            return made

        x = recompute.run_layers(list(self.layers), x, through, self.recompute)
        return x if self.final_layernorm is None else self.final_layernorm(x)


class LMHead(nn.Module):
    """Under the name that core has for it."""

    def __init__(self, plan: Plan, *, shares_embedding: bool) -> None:
        super().__init__()
        self.output_layer = Head(plan, shares_embedding=shares_embedding)


class EncoderDecoderChunk(nn.Module):
    """What one stage holds."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__()
        together = chunk.encoder is None
        self.plan, self.is_first, self.is_last = plan, chunk.is_first, chunk.is_last
        self.starts_decoder = together or chunk.starts_decoder
        of_encoder = encoder_layers(plan.config, chunk)
        of_decoder = range(chunk.first_layer, chunk.first_layer + chunk.layers)
        self.embedding = Embedding(plan) if chunk.embeds else None
        self.encoder = (
            Stack(plan, (Layer(plan, layer) for layer in of_encoder), ends=together or chunk.ends_encoder)
            if of_encoder
            else None
        )
        self.decoder = (
            Stack(plan, (CrossLayer(plan, layer) for layer in of_decoder), ends=chunk.is_last) if of_decoder else None
        )
        shares = plan.config.tie_embeddings and chunk.embeds
        self.lm_head = LMHead(plan, shares_embedding=shares) if chunk.is_last else None

    def units(self) -> Iterator[nn.Module]:
        """The modules before which parameters have to be there, in the order of a forward pass."""
        yield from (self.embedding,) if self.embedding is not None else ()
        for stack in (self.encoder, self.decoder):
            if stack is not None:
                yield from stack.layers
                yield from (stack.final_layernorm,) if stack.final_layernorm is not None else ()
        yield from (self.lm_head.output_layer,) if self.lm_head is not None else ()

    def takes(self, lengths: Lengths) -> Wires:
        """What the stage before this one gives, of a microbatch of these sizes."""
        if self.is_first:
            return ()
        memory = self._wires(lengths.rows, lengths.source)
        return memory if self.starts_decoder or self.decoder is None else self._of_decoder(lengths)

    def gives(self, lengths: Lengths) -> Wires:
        """What this stage gives to the one behind it."""
        if self.is_last:
            return ()
        return self._wires(lengths.rows, lengths.source) if self.decoder is None else self._of_decoder(lengths)

    def _of_decoder(self, lengths: Lengths) -> Wires:
        return *self._wires(lengths.rows, lengths.tokens), *self._wires(lengths.rows, lengths.source)

    def _wires(self, rows: int, tokens: int) -> Wires:
        return (activations(self.plan, rows, tokens, next(self.parameters()).dtype),)

    def forward(self, taken: Payload, run: Pass) -> Payload:
        """taken: what the stage before gave. On the last stage (activations behind the final norm,)."""
        source = run.source
        assert source is not None, "there is a text for the encoder to read"
        if self.encoder is not None:
            taken = (self.encoder(self._embedded(source) if self.is_first else taken[0], source),)
        if self.decoder is None:
            return taken
        if self.starts_decoder:
            taken = (self._embedded(run), *taken)
        x, memory = taken
        x = self.decoder(x, memory, run)
        return (x,) if self.is_last else (x, memory)

    def _embedded(self, run: Pass) -> Tensor:
        assert self.embedding is not None
        embedded: Tensor = self.embedding(run)
        return embedded

    def loss(self, given: Payload, run: Pass) -> tuple[Tensor, Mapping[str, Counted]]:
        """As ModelChunk.loss."""
        assert self.lm_head is not None
        weights = torch.ones_like(run.labels, dtype=torch.float32) if run.weights is None else run.weights
        (hidden,) = given
        total, losses = self.lm_head.output_layer(hidden, self._shared(), run.labels, weights * run.share)
        return total, {"loss": Counted(losses, weights)}

    def logits(self, given: Payload) -> Tensor:
        """As ModelChunk.logits."""
        (hidden,) = given
        assert self.lm_head is not None
        return self.lm_head.output_layer.logits(hidden, self._shared())

    def _shared(self) -> Tensor | None:
        return self.embedding.word_embeddings.weight if self.embedding is not None else None
