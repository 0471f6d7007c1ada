"""The dense MLP of one layer, and the activations that experts have too."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megaconv.model.subjects import MLP as Shape  # noqa: N811
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
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
}
"""By the words of megaconv.model.subjects.MLP."""


def is_plain_swiglu(shape: Shape) -> bool:
    return shape.gated and shape.activation == "silu" and shape.clamp is None and not shape.offset


def activate(x: Tensor, shape: Shape) -> Tensor:
    """[..., gate then up] or [..., ffn] -> [..., ffn]."""
    function = ACTIVATIONS[shape.activation]
    if not shape.gated:
        return function(x)
    if is_plain_swiglu(shape) and x.requires_grad and not torch.compiler.is_compiling():
        activated: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
        return activated
    gate, up = x.chunk(2, -1)
    if shape.clamp is not None:
        gate, up = gate.clamp(max=shape.clamp), up.clamp(-shape.clamp, shape.clamp)
    return function(gate) * (up + shape.offset if shape.offset else up)


class MLP(nn.Module):
    keep: Keep

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        config, ffn = plan.config, plan.sizes["ffn"]
        self.keep, self.shape = plan.keep, config.mlp
        self.linear_fc1 = NormColumnLinear(
            config.hidden, ffn * (2 if config.mlp.gated else 1), plan.norm, plan.ranks,
            bias=config.mlp.bias, keep=plan.keep,
        )  # fmt: skip
        self.linear_fc2 = RowLinear(ffn, config.hidden, plan.ranks, bias=config.mlp.bias, norm_after=plan.norm_after)

    def forward(self, x: Tensor) -> Tensor:
        return self.keep(self._activate, self.linear_fc1(x), self.linear_fc2)

    def _activate(self, x: Tensor) -> Tensor:
        return activate(x, self.shape)
