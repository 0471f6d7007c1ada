"""The decoder of GPT-2 and 3, Llama, Mistral, Qwen 2 and 3, Phi-3, Mixtral and others, by configuration.

A chunk is the part of one virtual stage, with Megatron core's parameter names. Activations are [sequence, batch,
hidden]; with sequence parallelism this tensor rank's part of the sequence.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megatron_lite.models import recompute
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.ends import Embedding, Head, tied_embedding
from megatron_lite.models.head_projection import HeadProjection
from megatron_lite.models.layer import Layer
from megatron_lite.models.layer_inputs import LayerInputs
from megatron_lite.models.mtp import Predictions
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.offload import Offload
from megatron_lite.models.passes import Ahead, Pass
from megatron_lite.models.pooling import embeddings
from megatron_lite.models.score_head import ScoreHead
from megatron_lite.models.teaching import Teaching
from megatron_lite.parallel.payload import Payload
from megatron_lite.parallel.tensor import Norm
from megatron_lite.settings.options import Distillation


class Stack(nn.Module):
    """Layers, counted from 0, and the final norm if the stack ends here."""

    def __init__(self, plan: Plan, layers: Iterable[nn.Module], *, ends: bool) -> None:
        super().__init__()
        self.recompute, normed = plan.options.recompute, ends and plan.config.norm.final
        self.offload = Offload(plan.options.offloaded_layers)
        self.layers = nn.ModuleList(layers)
        # Megatron core has two names for the norm: its stack of hybrids has its own.
        hybrid = plan.config.has("hybrid_stack")
        norm = Norm(plan.config.hidden, plan.norm) if normed else None
        self.final_norm = norm if hybrid else None
        self.final_layernorm = None if hybrid else norm
        if plan.options.compile:
            for layer in self.layers:
                setattr(layer, "forward", torch.compile(layer.forward))  # noqa: B010  # hooks stay outside the compiled code

    def forward(self, x: Tensor, *beside: Tensor | Pass) -> Tensor:
        """Run all layers. beside: further arguments of every layer."""

        def through(layer: nn.Module, x: Tensor) -> Tensor:
            made: Tensor = layer(x, *beside)
            return made

        layers = list(self.layers)
        if self.offload.applies(x):
            x = self.offload.run(layers, x, through, list(_of_all_layers(beside)))
        else:
            x = recompute.run_layers(layers, x, through, self.recompute)
        return x if self.last_norm is None else self.last_norm(x)

    @property
    def last_norm(self) -> Norm | None:
        """The norm after the last layer, if the stack ends here."""
        return self.final_layernorm or self.final_norm


def _of_all_layers(beside: Iterable[Tensor | Pass]) -> Iterator[Tensor]:
    """Yield the tensors of a pass that all layers read."""
    for given in beside:
        if not isinstance(given, Pass):
            continue
        for tables in (given.rotary, given.local_rotary):
            yield from tables or ()


def own_layers(plan: Plan, chunk: Chunk) -> Iterator[Layer]:
    """Yield the layers of a chunk, for a model with a single stack."""
    return (Layer(plan, chunk.first_layer + local) for local in range(chunk.layers))


class ModelChunk(Network):
    """One virtual stage of a decoder."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__(plan, chunk)
        predicts = chunk.is_last and plan.config.mtp_layers > 0
        embeds = chunk.is_first or predicts
        self.embedding = Embedding(plan) if embeds else None
        has_inputs = chunk.is_first and plan.config.has("layer_inputs")
        self.layer_inputs = LayerInputs(plan) if has_inputs else None
        self.decoder = self.make_decoder(plan, chunk)
        self.mtp = Predictions(plan) if predicts else None
        shares = plan.config.tie_embeddings and embeds
        projects = chunk.is_last and plan.config.has("head_projection")
        self.head_projection = HeadProjection(plan) if projects else None
        self.output_layer: Head | ScoreHead | None = None
        if chunk.is_last:
            has_scores = plan.config.has("scores")
            self.output_layer = (
                ScoreHead(plan) if has_scores else Head(plan, shares_embedding=shares)
            )

    def make_decoder(self, plan: Plan, chunk: Chunk) -> Stack:
        """Return this stage's layers."""
        return Stack(plan, own_layers(plan, chunk), ends=chunk.is_last)

    @classmethod
    def loss_names(cls, config: ModelConfig) -> tuple[str, ...]:
        return ("loss", *(f"mtp_{depth + 1}_loss" for depth in range(config.mtp_layers)))

    def units(self) -> Iterator[nn.Module]:
        of_start = self.embedding, self.layer_inputs
        yield from (module for module in (*of_start, *self.decoder.layers) if module is not None)
        of_end = self.decoder.last_norm, self.head_projection, self.output_layer
        yield from (module for module in of_end if module is not None)
        yield from self.mtp.layers if self.mtp is not None else ()

    def shared(self) -> Iterator[nn.Module]:
        if isinstance(self.output_layer, Head):
            yield from tied_embedding(self.embedding, self.output_layer)

    def is_frozen(self, name: str) -> bool:
        """See Network.is_frozen. A head of scores is trained whole beside adapters, as by peft."""
        of_scores = name == "output_layer.weight" and self.plan.config.has("scores")
        return super().is_frozen(name) and not of_scores

    def forward(self, taken: Payload, run: Pass) -> Payload:
        """Run the stage. taken: output of the previous stage.

        On the last stage, the result is (the head's input,): activations after the final norm, and after the projection behind
        it if the model has one.
        """
        if self.is_first:
            assert self.embedding is not None
            taken = (self.embedding(run),)
        (x,) = taken
        x = self.decoder(x, run)
        return (x if self.head_projection is None else self.head_projection(x),)

    def loss(self, given: Payload, run: Pass) -> tuple[Tensor, Mapping[str, Counted]]:
        """See Network.loss. Without gradients, the losses of further tokens are not computed."""
        weights = run.label_weights()
        total, losses = self.label_losses(given, run.labels, weights * run.share)
        found = {"loss": Counted(losses, weights)}
        if self.mtp is None or not torch.is_grad_enabled():
            return total, found
        (hidden,) = given
        plan = self.plan
        _, *names = self.loss_names(plan.config)
        share = run.share * plan.options.mtp_loss_scale / len(self.mtp.layers)
        assert run.counting is not None
        predicted = self.mtp(hidden, run, self._embed(run))
        for name, (made, ahead) in zip(names, predicted, strict=True):
            # As in Megatron, this is the mean over the microbatch's remaining labels. It has the weight of
            # the mean over all labels.
            each = share * run.counting / ahead.counting.clamp(min=1)
            shares = ahead.weights * each
            further, losses = self.label_losses((made,), ahead.labels, shares)
            total = total + further
            found[name] = Counted(losses, ahead.weights)
        return total, found

    def label_losses(
        self, given: Payload, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(self.output_layer, Head)
        return self.output_layer.label_losses(given[0], self._shared(), labels, weights)

    def taught_losses(
        self, given: Payload, run: Pass, weights: Tensor, options: Distillation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (sum of weights * losses, cross entropy, divergence from the teacher). weights, losses: [batch, sequence]."""
        assert isinstance(self.output_layer, Head)
        assert run.teaching is not None
        return self.output_layer.taught_losses(
            given[0], self._shared(), run.labels, weights, run.teaching, options
        )

    def teaching(self, given: Payload) -> Teaching:
        """Return the predictions that a student learns. given: the output of forward on the last stage."""
        assert isinstance(self.output_layer, Head)
        return self.output_layer.teaching(given[0], self._shared())

    def predicted(self, hidden: Tensor, run: Pass) -> Tensor:
        """Return the head's input for the token after the next one, by the first MTP layer; on the last stage.

        hidden [sequence, batch, hidden]: this chunk's output after its final norm, or an earlier result. run.tokens: the
        tokens behind those of `hidden`. run.positions: those of `hidden`.
        """
        assert self.mtp is not None
        assert self.embedding is not None
        made: Tensor = self.mtp.layers[0](self.embedding(run), hidden, run)
        return made

    def _embed(self, run: Pass) -> Callable[[Ahead], Tensor]:
        def embed(ahead: Ahead) -> Tensor:
            assert self.embedding is not None
            embedded: Tensor = self.embedding(run, ahead)
            return embedded

        return embed

    def scores(self, given: Payload, run: Pass) -> Tensor:
        """Return float32 [batch, labels]: the head's scores of the tokens whose weight in the pass is 1, one in each row."""
        assert isinstance(self.output_layer, ScoreHead)
        found: Tensor = self.output_layer(given[0], run.label_weights(), run.context)
        return found

    def embeddings(self, given: Payload, run: Pass) -> Tensor:
        """Return float32 [batch, hidden]: the embedding of each row, of the tokens whose weight in the pass is 1."""
        return embeddings(given[0], run.label_weights(), self.plan.ranks, run.context)

    def logits(self, given: Payload) -> Tensor:
        assert isinstance(self.output_layer, Head)
        return self.output_layer.logits(given[0], self._shared())

    def _shared(self) -> Tensor | None:
        return self.embedding.word_embeddings.weight if self.embedding is not None else None
