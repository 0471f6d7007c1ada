"""T5: an encoder, and a decoder that attends to its output; one chunk of it, with Megatron core's names.

A stage has layers of the encoder, layers of the decoder, or all layers of both. The encoder's output passes from its
last stage through every stage of the decoder, together with the activations. Its gradient returns the same way.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megaconv.model.table import encoder_layers
from megatron_lite.models import rng
from megatron_lite.models.batch import Lengths
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.chunk import Stack
from megatron_lite.models.cross_attention import CrossAttention
from megatron_lite.models.ends import Embedding, Head, tied_embedding
from megatron_lite.models.layer import Layer, Residual
from megatron_lite.models.mixers.self_attention import SelfAttention
from megatron_lite.models.mlp import MLP
from megatron_lite.models.network_interface import Counted, Network, mean_of_each_microbatch
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.payload import Payload, Wires
from megatron_lite.parallel.tensor import Norm


class CrossLayer(Residual):
    """A decoder layer: self-attention, attention to the encoder's output, and an MLP."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        self.ranks, self.dropout = plan.ranks, plan.options.hidden_dropout
        self.after_attention, self.after_cross_attention, self.after_mlp = (
            rng.At(layer, place)
            for place in (rng.AFTER_ATTENTION, rng.AFTER_CROSS_ATTENTION, rng.AFTER_MLP)
        )
        self.self_attention = SelfAttention(plan, layer)
        self.pre_cross_attn_layernorm = Norm(plan.config.hidden, plan.norm)
        self.cross_attention = CrossAttention(plan, layer)
        self.mlp = MLP(plan)

    def forward(self, x: Tensor, memory: Tensor, run: Pass) -> Tensor:
        assert run.source is not None
        x = x + self.drop(self.self_attention(x, run), run, self.after_attention)
        found = self.cross_attention(self.pre_cross_attn_layernorm(x), memory, run.source)
        x = x + self.drop(found, run, self.after_cross_attention)
        return x + self.drop(self.mlp(x), run, self.after_mlp)


class LMHead(nn.Module):
    """The head, as a separate module because of Megatron core's parameter names."""

    def __init__(self, plan: Plan, *, shares_embedding: bool) -> None:
        super().__init__()
        self.output_layer = Head(plan, shares_embedding=shares_embedding)


class EncoderDecoder(Network):
    """One virtual stage of a T5."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__(plan, chunk)
        together = chunk.encoder is None
        self.starts_decoder = together or chunk.starts_decoder
        of_encoder = [Layer(plan, layer) for layer in encoder_layers(plan.config, chunk)]
        last_layer = chunk.first_layer + chunk.layers
        of_decoder = [CrossLayer(plan, layer) for layer in range(chunk.first_layer, last_layer)]
        self.embedding = Embedding(plan) if chunk.embeds else None
        self.encoder = None
        if of_encoder:
            self.encoder = Stack(plan, of_encoder, ends=together or chunk.ends_encoder)
        self.decoder = None
        if of_decoder:
            self.decoder = Stack(plan, of_decoder, ends=chunk.is_last)
        self.lm_head = None
        if chunk.is_last:
            shares = plan.config.tie_embeddings and chunk.embeds
            self.lm_head = LMHead(plan, shares_embedding=shares)

    @classmethod
    def loss_names(cls, config: ModelConfig) -> tuple[str, ...]:
        return ("loss",)

    def units(self) -> Iterator[nn.Module]:
        yield from (self.embedding,) if self.embedding is not None else ()
        for stack in (self.encoder, self.decoder):
            if stack is not None:
                yield from stack.layers
                yield from (stack.final_layernorm,) if stack.final_layernorm is not None else ()
        yield from (self.lm_head.output_layer,) if self.lm_head is not None else ()

    def shared(self) -> Iterator[nn.Module]:
        if self.lm_head is not None:
            yield from tied_embedding(self.embedding, self.lm_head.output_layer)

    def takes(self, lengths: Lengths) -> Wires:
        """Return the shapes of the stage's input.

        A stage of the encoder takes the encoder's activations. A stage of the decoder takes its own activations, then
        the encoder's output.
        """
        if self.is_first:
            return ()
        own = (
            ()
            if self.decoder is None or self.starts_decoder
            else (self.activations(lengths.rows, lengths.tokens),)
        )
        return *own, self.activations(lengths.rows, lengths.source)

    def gives(self, lengths: Lengths) -> Wires:
        if self.is_last:
            return ()
        own = () if self.decoder is None else (self.activations(lengths.rows, lengths.tokens),)
        return *own, self.activations(lengths.rows, lengths.source)

    def forward(self, taken: Payload, run: Pass) -> Payload:
        source = run.source
        assert source is not None, "there is a text for the encoder to read"
        if self.encoder is not None:
            x = self._embedded(source) if self.is_first else taken[0]
            taken = (self.encoder(x, source),)
        if self.decoder is None:
            return taken
        if self.starts_decoder:
            embedded = self._embedded(run)
            taken = (embedded, *taken)
        x, memory = taken
        x = self.decoder(x, memory, run)
        return (x,) if self.is_last else (x, memory)

    def _embedded(self, run: Pass) -> Tensor:
        assert self.embedding is not None
        embedded: Tensor = self.embedding(run)
        return embedded

    def loss(self, given: Payload, run: Pass) -> tuple[Tensor, Mapping[str, Counted]]:
        weights = mean_of_each_microbatch(run.label_weights())
        total, losses = self.label_losses(given, run.labels, weights * run.share)
        return total, {"loss": Counted(losses, weights)}

    def label_losses(
        self, given: Payload, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert self.lm_head is not None
        return self.lm_head.output_layer.label_losses(given[0], self._shared(), labels, weights)

    def logits(self, given: Payload) -> Tensor:
        assert self.lm_head is not None
        return self.lm_head.output_layer.logits(given[0], self._shared())

    def _shared(self) -> Tensor | None:
        return self.embedding.word_embeddings.weight if self.embedding is not None else None
