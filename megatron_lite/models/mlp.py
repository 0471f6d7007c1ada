"""The dense MLP of one layer, and the activations that experts have too."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_lite.models.plan import Plan
from megatron_lite.parallel.tensor import Keep, Made, NormColumnLinear, RowLinear


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


def activate(x: Tensor, activation: str, *, gated: bool) -> Tensor:
    """[..., gate then up] or [..., ffn] -> [..., ffn]. activation: a word of ACTIVATIONS."""
    function = ACTIVATIONS[activation]
    if not gated:
        return function(x)
    if function is F.silu and not torch.compiler.is_compiling():
        activated: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
        return activated
    gate, up = x.chunk(2, -1)
    return function(gate) * up


class MLP(nn.Module):
    keep: Keep

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        config, ffn = plan.config, plan.sizes["ffn"]
        self.keep, self.gated, self.activation = plan.keep, config.mlp.gated, config.mlp.activation
        self.linear_fc1 = NormColumnLinear(
            config.hidden, ffn * (2 if config.mlp.gated else 1), config.norm.epsilon, plan.ranks,
            norm_bias=plan.norm_bias, bias=config.mlp.bias, keep=plan.keep,
        )  # fmt: skip
        self.linear_fc2 = RowLinear(ffn, config.hidden, plan.ranks, bias=config.mlp.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.keep(self._activate, self.linear_fc1(x), self.linear_fc2)

    def _activate(self, x: Tensor) -> Tensor:
        return activate(x, self.activation, gated=self.gated)
