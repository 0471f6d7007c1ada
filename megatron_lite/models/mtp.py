"""Multi-token prediction (DeepSeek-V3): layers after the last, each of which predicts one token further ahead.

    h_d = final_norm(layer(join [norm(embedding of token t + d) ; norm(h_{d-1} of t)]))         h_0: the decoder's output after its norm

The head is the model's own. Tokens, labels and their weights shift one position to the left with every layer. At the
end of a row and of each document there is no label. Source: megatron/core/transformer/multi_token_prediction.py.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megaconv.model.predicting import predicting_kinds
from megatron_lite.models import recompute
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.layer import Layer
from megatron_lite.models.passes import Ahead, Pass
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import Norm, column_linear, joined_columns


class Join(nn.Module):
    """A matrix sharded by its output, whose output is gathered."""

    kinds: ClassVar = {"weight": Kind.SHARDED}

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.ranks = plan.ranks
        self.weight = nn.Parameter(
            torch.empty(plan.config.hidden // plan.ranks.size, 2 * plan.config.hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        return joined_columns(column_linear(x, self.weight, None, self.ranks), self.ranks)


class Parts(nn.Module):
    """The layers inside a prediction layer, if each is a mixer or an MLP."""

    def __init__(self, plan: Plan, first: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(plan, first + part) for part in range(count))

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        for layer in self.layers:
            x = layer(x, run)
        return x


class PredictionLayer(nn.Module):
    """One prediction layer."""

    def __init__(self, plan: Plan, depth: int) -> None:
        super().__init__()

        def norm() -> Norm:
            return Norm(plan.config.hidden, plan.norm)

        self.enorm, self.hnorm, self.eh_proj = norm(), norm(), Join(plan)
        inside = len(predicting_kinds(plan.config))
        first = plan.config.layer_count + depth * inside
        # Megatron core has a name for one layer, and another one for a stack of them.
        alone = inside == 1
        self.transformer_layer = Layer(plan, first) if alone else None
        self.mtp_model_layer = None if alone else Parts(plan, first, inside)
        self.final_layernorm = norm()

    def forward(self, embedded: Tensor, hidden: Tensor, run: Pass) -> Tensor:
        """embedded, hidden: both [sequence (/ tp), batch, hidden] -> the same shape."""
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        inside = self.transformer_layer or self.mtp_model_layer
        assert inside is not None
        made: Tensor = self.final_layernorm(inside(joined, run))
        return made


class Predictions(nn.Module):
    """All prediction layers; on the last stage."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.recompute = plan.options.recompute
        self.layers = nn.ModuleList(
            PredictionLayer(plan, depth) for depth in range(plan.config.mtp_layers)
        )

    def forward(
        self, hidden: Tensor, run: Pass, embed: Callable[[Ahead], Tensor]
    ) -> Iterator[tuple[Tensor, Ahead]]:
        """Yield (input of the head, its labels) for each depth. embed: embeds the tokens."""
        for layer, ahead in zip(self.layers, run.ahead, strict=True):
            embedded = embed(ahead)

            def through(layer: nn.Module, x: Tensor, embedded: Tensor = embedded) -> Any:
                return layer(embedded, x, run)

            hidden = recompute.run_layers([layer], hidden, through, self.recompute)
            yield hidden, ahead
