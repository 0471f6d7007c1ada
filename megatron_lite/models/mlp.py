"""The dense MLP of one layer."""

import torch
from torch import Tensor, nn

from megatron_lite.models.activation import activate
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.input_matrix import input_matrix
from megatron_lite.models.mixers.wide_norm import WideNorm
from megatron_lite.models.xielu import XIELU
from megatron_lite.parallel.tensor import ColumnLinear, Keep, RowLinear


class MLP(nn.Module):
    """The dense MLP, with its norms: [sequence (/ tp), batch, hidden] -> the same shape."""

    keep: Keep

    def __init__(self, plan: Plan, *, has_norm: bool = True) -> None:
        """has_norm: False if the input is normed already."""
        super().__init__()
        config, ffn = plan.config, plan.sizes["ffn"]
        self.keep, self.shape, self.limit = plan.keep, config.mlp, plan.shared_limit
        self.gate_factor, self.factor = config.factors.mlp_gate, config.factors.mlp_down
        rows = ffn * (2 if config.mlp.gated else 1)
        bias = config.mlp.bias
        self.linear_fc1 = (
            input_matrix(plan, rows, bias=bias)
            if has_norm
            else ColumnLinear(config.hidden, rows, plan.ranks, bias=bias)
        )
        self.activation_func = XIELU() if config.mlp.activation == "xielu" else None
        self.inner_norm = WideNorm(ffn, plan.norm, plan.ranks) if config.norm.inner else None
        self.linear_fc2 = RowLinear(
            ffn, config.hidden, plan.ranks, bias=bias, norm_after=plan.norm_after
        )

    def forward(self, x: Tensor) -> Tensor:
        made = self.keep(self._activate, self.linear_fc1(x), self.linear_fc2)
        return made if self.factor == 1 else made * self.factor

    def _activate(self, x: Tensor) -> Tensor:
        if self.gate_factor != 1:
            gate, up = x.chunk(2, -1)
            x = torch.cat((gate * self.gate_factor, up), -1)
        trained = self.activation_func
        activated = activate(x, self.shape, limit=self.limit) if trained is None else trained(x)
        return activated if self.inner_norm is None else self.inner_norm(activated)
