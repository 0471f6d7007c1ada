"""The decoder: GPT-2 and 3, Llama, Mistral, Qwen 2 and 3, Phi-3, Mixtral, by configuration; one chunk of it, with Megatron core's names.

Activations are [sequence, batch, hidden], or with sequence parallelism this tensor rank's part of the sequence.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megaconv.model.layout import Chunk
from megatron_lite.models import recompute
from megatron_lite.models.ends import Embedding, Head
from megatron_lite.models.layer import Layer
from megatron_lite.models.mtp import Predictions
from megatron_lite.models.passes import Pass
from megatron_lite.models.plan import Plan
from megatron_lite.parallel import comm
from megatron_lite.parallel.payload import Payload, Wire, Wires
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


class Counted(NamedTuple):
    """A loss of every label, and how much it counts; float32 [batch, sequence] without a gradient."""

    losses: Tensor
    weights: Tensor


class ModelChunk(nn.Module):
    """What one virtual stage holds. Its parameters are those of native_tensors(..., "core", ...), names and shapes alike."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__()
        self.plan, self.is_first, self.is_last = plan, chunk.is_first, chunk.is_last
        predicts = chunk.is_last and plan.config.mtp_layers > 0
        self.embedding = Embedding(plan) if chunk.is_first or predicts else None
        self.decoder = Decoder(plan, chunk)
        self.mtp = Predictions(plan) if predicts else None
        shares = plan.config.tie_embeddings and chunk.is_first
        self.output_layer = Head(plan, shares_embedding=shares) if chunk.is_last else None

    def takes(self, rows: int, length: int) -> Wires:
        """What the stage before this one gives, of a microbatch of so many rows, of each of which this rank has so many tokens."""
        return () if self.is_first else self._between(rows, length)

    def gives(self, rows: int, length: int) -> Wires:
        """What this stage gives to the one behind it."""
        return () if self.is_last else self._between(rows, length)

    def _between(self, rows: int, length: int) -> Wires:
        ranks = self.plan.ranks
        here = length // ranks.size if ranks.sequence else length
        return (Wire((here, rows, self.plan.config.hidden), next(self.parameters()).dtype),)

    def forward(self, taken: Payload, run: Pass) -> Payload:
        """taken: what the stage before gave. On the last stage (activations behind the final norm,)."""
        if self.is_first:
            assert self.embedding is not None
            taken = (self.embedding(run),)
        (x,) = taken
        return (self.decoder(x, run),)

    def loss(self, given: Payload, run: Pass) -> tuple[Tensor, Mapping[str, "Counted"]]:
        """(what to go backward from, the losses by the names that Plan.losses lists). On the last stage, of what forward gave.

        Those of further tokens are left out where nothing goes backward.
        """
        assert self.output_layer is not None
        weights = torch.ones_like(run.labels, dtype=torch.float32) if run.weights is None else run.weights
        (hidden,) = given
        total, losses = self.output_layer(hidden, self._shared(), run.labels, weights * run.share)
        found = {"loss": Counted(losses, weights)}
        if self.mtp is not None and torch.is_grad_enabled():
            names, part = self.plan.losses[1:], run.share * self.plan.options.mtp_loss_scale / len(self.mtp.layers)
            assert run.counting is not None
            for name, (made, ahead) in zip(names, self.mtp(hidden, run, self._embed(run)), strict=True):
                # As in Megatron the mean over a microbatch's labels that are left, which counts like the mean over all of them.
                each = part * run.counting / ahead.counting.clamp(min=1)
                more, losses = self.output_layer(made, self._shared(), ahead.labels, ahead.weights * each)
                total, found[name] = total + more, Counted(losses, ahead.weights)
        return total, found

    def _embed(self, run: Pass) -> Callable[[Tensor], Tensor]:
        def embed(tokens: Tensor) -> Tensor:
            assert self.embedding is not None
            embedded: Tensor = self.embedding(run, tokens)
            return embedded

        return embed

    def logits(self, given: Payload) -> Tensor:
        """float32 [batch, sequence, vocabulary], the same on every tensor rank; on the last stage, without a gradient."""
        head, ranks = self.output_layer, self.plan.ranks
        (hidden,) = given
        assert head is not None
        weight = self._shared() if head.weight is None else head.weight
        assert weight is not None
        if ranks.group and ranks.sequence:
            hidden = comm.gathered(hidden, ranks.group)
        own = (hidden @ weight.t()).float().permute(2, 1, 0)
        whole = comm.gathered(own, ranks.group) if ranks.group else own
        return whole[: self.plan.config.vocab].permute(1, 2, 0)

    def _shared(self) -> Tensor | None:
        return self.embedding.word_embeddings.weight if self.embedding is not None and self.is_first else None
