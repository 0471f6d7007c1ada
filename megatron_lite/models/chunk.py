"""The decoder: GPT-2 and 3, Llama, Mistral, Qwen 2 and 3, Phi-3, Mixtral, by configuration; one chunk of it, with Megatron core's names.

Activations are [sequence, batch, hidden], or with sequence parallelism this tensor rank's part of the sequence.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megatron_lite.models import recompute
from megatron_lite.models.ends import Embedding, Head
from megatron_lite.models.layer import Layer
from megatron_lite.models.mtp import Predictions
from megatron_lite.models.network import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.models.plan import Plan
from megatron_lite.models.preference import compare
from megatron_lite.parallel.payload import Payload
from megatron_lite.parallel.tensor import Norm


class Stack(nn.Module):
    """Layers, counted from 0, and where the stack ends the final norm."""

    def __init__(self, plan: Plan, layers: Iterable[nn.Module], *, ends: bool) -> None:
        super().__init__()
        self.recompute, normed = plan.options.recompute, ends and plan.config.norm.final
        self.layers = nn.ModuleList(layers)
        self.final_layernorm = Norm(plan.config.hidden, plan.norm) if normed else None
        if plan.options.compile:
            for layer in self.layers:
                setattr(layer, "forward", torch.compile(layer.forward))  # noqa: B010  # so that hooks stay outside

    def forward(self, x: Tensor, *beside: Tensor | Pass) -> Tensor:
        """beside: what every layer is handed beside its input."""

        def through(layer: nn.Module, x: Tensor) -> Tensor:
            made: Tensor = layer(x, *beside)
            return made

        x = recompute.run_layers(list(self.layers), x, through, self.recompute)
        return x if self.final_layernorm is None else self.final_layernorm(x)


def own_layers(plan: Plan, chunk: Chunk) -> Iterator[Layer]:
    """Of the only stack, those of a chunk."""
    return (Layer(plan, chunk.first_layer + local) for local in range(chunk.layers))


class ModelChunk(Network):
    """What one virtual stage of a decoder holds."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__(plan, chunk)
        predicts = chunk.is_last and plan.config.mtp_layers > 0
        embeds = chunk.is_first or predicts
        self.embedding = Embedding(plan) if embeds else None
        self.decoder = Stack(plan, own_layers(plan, chunk), ends=chunk.is_last)
        self.mtp = Predictions(plan) if predicts else None
        shares = plan.config.tie_embeddings and embeds
        self.output_layer = Head(plan, shares_embedding=shares) if chunk.is_last else None

    @classmethod
    def loss_names(cls, config: ModelConfig) -> tuple[str, ...]:
        return ("loss", *(f"mtp_{depth + 1}_loss" for depth in range(config.mtp_layers)))

    def units(self) -> Iterator[nn.Module]:
        yield from (module for module in (self.embedding, *self.decoder.layers) if module is not None)
        yield from (module for module in (self.decoder.final_layernorm, self.output_layer) if module is not None)
        yield from self.mtp.layers if self.mtp is not None else ()

    def forward(self, taken: Payload, run: Pass) -> Payload:
        """taken: what the stage before gave. On the last stage (activations behind the final norm,)."""
        if self.is_first:
            assert self.embedding is not None
            taken = (self.embedding(run),)
        (x,) = taken
        return (self.decoder(x, run),)

    def loss(self, given: Payload, run: Pass) -> tuple[Tensor, Mapping[str, Counted]]:
        """See Network. Losses of further tokens are left out where nothing goes backward."""
        assert self.output_layer is not None
        weights = torch.ones_like(run.labels, dtype=torch.float32) if run.weights is None else run.weights
        (hidden,) = given
        if run.reference is not None:
            return self._loss_of_pairs(hidden, weights, run, run.reference)
        total, losses = self.output_layer(hidden, self._shared(), run.labels, weights * run.share)
        found = {"loss": Counted(losses, weights)}
        if self.mtp is not None and torch.is_grad_enabled():
            names = self.loss_names(self.plan.config)[1:]
            part = run.share * self.plan.options.mtp_loss_scale / len(self.mtp.layers)
            assert run.counting is not None
            for name, (made, ahead) in zip(names, self.mtp(hidden, run, self._embed(run)), strict=True):
                # As in Megatron the mean over a microbatch's labels that are left, which counts like the mean over all of them.
                each = part * run.counting / ahead.counting.clamp(min=1)
                more, losses = self.output_layer(made, self._shared(), ahead.labels, ahead.weights * each)
                total, found[name] = total + more, Counted(losses, ahead.weights)
        return total, found

    def _loss_of_pairs(
        self, hidden: Tensor, counting: Tensor, run: Pass, reference: Tensor
    ) -> tuple[Tensor, Mapping[str, "Counted"]]:
        """The head is computed twice: what a label's loss counts for follows from all losses of its pair."""
        options = self.plan.options.preference
        assert self.output_layer is not None
        assert options is not None
        with torch.no_grad():
            _, losses = self.output_layer(hidden, self._shared(), run.labels, counting)
        compared = compare(losses, counting, reference, options, run.context)
        weights = counting * compared.weights.unsqueeze(1) * run.share
        total, _ = self.output_layer(hidden, self._shared(), run.labels, weights)
        once = float(run.context is None or run.context.rank == 0)  # all context ranks have the same pairs
        return total, {name: Counted(found, torch.full_like(found, once)) for name, found in compared.figures.items()}

    def _embed(self, run: Pass) -> Callable[[Tensor], Tensor]:
        def embed(tokens: Tensor) -> Tensor:
            assert self.embedding is not None
            embedded: Tensor = self.embedding(run, tokens)
            return embedded

        return embed

    def logits(self, given: Payload) -> Tensor:
        assert self.output_layer is not None
        return self.output_layer.logits(given[0], self._shared())

    def _shared(self) -> Tensor | None:
        return self.embedding.word_embeddings.weight if self.embedding is not None else None
