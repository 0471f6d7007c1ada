"""A second embedding of the tokens, with a part for each layer, which the layer adds after its MLP (Gemma 4 E2B and E4B).

Source: project_per_layer_inputs and Gemma4TextDecoderLayer of transformers 5.24.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_lite.models.activation import ACTIVATIONS
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.passes import Pass
from megatron_lite.models.whole_linear import WholeLinear
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import Norm, VocabEmbedding


class Table(VocabEmbedding):
    """The second embedding."""

    kinds: ClassVar = {"weight": Kind.SHARDED}
    heads_share = False


class LayerInputs(nn.Module):
    """The inputs of all layers: the mean of the second embedding and of a normed projection of the usual one."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        config, inputs, ranks = plan.config, plan.config.layer_inputs, plan.ranks
        self.ranks = ranks
        self.layers, self.width = config.layer_count, inputs.width
        self.table_scale, self.projection_scale = inputs.width**0.5, config.hidden**-0.5
        columns = self.layers * self.width
        self.word_embeddings = Table(inputs.vocab // ranks.size, columns, ranks)
        self.projection = WholeLinear(config.hidden, columns)
        self.norm = Norm(self.width, plan.norm)

    def forward(self, run: Pass, embedded: Tensor) -> tuple[Tensor, ...]:
        """embedded [sequence (/ tp), batch, hidden] -> for each layer [sequence (/ tp), batch, width]."""
        of_tokens: Tensor = self.word_embeddings(run.tokens.t())
        if run.pictures is not None:
            # All tokens of images have the embedding of the padding, which transformers doesn't train.
            of_tokens = run.pictures.detached(of_tokens, self.ranks)
        # Round the scale to the dtype first, as transformers does.
        of_tokens = of_tokens * torch.tensor(self.table_scale, dtype=of_tokens.dtype)
        projected = self.projection(embedded) * self.projection_scale
        normed = self.norm(projected.unflatten(-1, (self.layers, self.width)))
        inputs: Tensor = (normed + of_tokens.view_as(normed)) * 2**-0.5
        # One split, because its gradient is a single concatenation.
        each: tuple[Tensor, ...] = inputs.unbind(2)
        return each


class LayerInput(nn.Module):
    """The part of one layer: its input, gated by the hidden states, is projected, normed and added to them."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        hidden, width = plan.config.hidden, plan.config.layer_inputs.width
        self.activation = ACTIVATIONS[plan.config.mlp.activation]
        self.gate = WholeLinear(hidden, width)
        self.projection = WholeLinear(width, hidden)
        self.norm = Norm(hidden, plan.norm)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """x [sequence (/ tp), batch, hidden], own [sequence (/ tp), batch, width] -> the shape of x."""
        gated = self.activation(self.gate(x)) * own
        added: Tensor = self.norm(self.projection(gated))
        return x + added
