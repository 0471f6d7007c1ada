"""A matrix with an activation and a norm, between the last norm of a decoder and its head (ModernBERT's decoders)."""

from torch import Tensor, nn

from megatron_lite.models.activation import ACTIVATIONS
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.whole_linear import WholeLinear
from megatron_lite.parallel.tensor import Norm


class HeadProjection(nn.Module):
    """The layers before the head; under sequence parallelism applied to this rank's tokens."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        hidden = plan.config.hidden
        self.dense = WholeLinear(hidden, hidden)
        self.norm = Norm(hidden, plan.norm)
        self.activate = ACTIVATIONS[plan.config.head.projection]

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.activate(self.dense(x)))
        return normed
