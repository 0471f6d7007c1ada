"""Attention whose heads work in pairs (DiffLlama): the second head's sum of values is subtracted from the first head's.

    (softmax(Q1 K1) - weight * softmax(Q2 K2)) [V1 V2], divided by its root mean square and scaled by 1 - initial weight
    weight = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + initial weight

Key/value heads 2i and 2i + 1 of a rank are a pair. Source: modeling_diffllama.py of transformers 5.24.
"""

from math import exp
from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_lite.models.build_plan import Plan
from megatron_lite.models.mixers.self_attention import SelfAttention
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.parameter_kinds import Kind


class DifferentialAttention(SelfAttention):
    """Self-attention with its norm and pairs of heads."""

    kinds: ClassVar = {
        **SelfAttention.kinds,
        **{f"lambda_{name}": Kind.OF_HEADS for name in ("q1", "k1", "q2", "k2")},
    }

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__(plan, layer)
        self.lambda_q1 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_k1 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_q2 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_k2 = nn.Parameter(torch.empty(self.head_dim))
        self.initial = 0.8 - 0.6 * exp(-0.3 * layer)
        self.norm_of_pairs = plan.norm._replace(with_weight=False, with_bias=False)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, run: Pass) -> Tensor:
        """Return the differences [sequence, batch, heads / 2, 2 * head_dim]."""
        of_first, of_second = (
            super(DifferentialAttention, self)._mixed(q, k, values, run) for values in _for_both(v)
        )
        both = torch.cat((of_first, of_second), -1)
        pairs = both.view(*both.shape[:2], self.kv_heads // 2, 2, self.group, -1)
        first, second = (heads.flatten(2, 3) for heads in pairs.unbind(3))
        difference: Tensor = self._difference(first, second)
        return difference

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        """Subtract second heads from first heads. It is not compiled, because each layer would be compiled anew."""
        weight = _factor(self.lambda_q1, self.lambda_k1) - _factor(self.lambda_q2, self.lambda_k2)
        difference = first - (weight + self.initial) * second
        normed: Tensor = self.norm_of_pairs.apply(difference, None, None)
        return normed * (1 - self.initial)


def _for_both(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of first heads, and those of second heads, for both heads of each pair. Both have v's shape."""
    first, second = v[:, :, ::2], v[:, :, 1::2]
    return first.repeat_interleave(2, 2), second.repeat_interleave(2, 2)


def _factor(left: Tensor, right: Tensor) -> Tensor:
    """Return the exponential of a product, computed in float32, in the dtype of the parameters."""
    product = torch.sum(left * right, dtype=torch.float32)
    return product.exp().to(left.dtype)
