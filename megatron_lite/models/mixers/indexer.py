"""The indexer of sparse attention (DeepSeek V3.2): it chooses the keys that each query attends to.

    score of a query and a key = sum over heads of weight * relu(q k' / sqrt(head_dim)) / sqrt(heads)

A query attends to the keys with the best `topk` scores. All tensor ranks hold the whole indexer. Under sequence
parallelism each of them computes the choice for its own tokens. As in transformers, the indexer has no gradient, so
its weights keep their values. Source: modeling_deepseek_v32.py and modeling_glm_moe_dsa.py of transformers 5.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_lite.models.build_plan import Plan
from megatron_lite.models.passes import Pass
from megatron_lite.models.rotary import neighbours_apart, rotate
from megatron_lite.models.scored_attention import BLOCK, Rules, Visibility, all_keys, visibility
from megatron_lite.parallel import comm
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import TensorGroup

EPSILON = 1e-6
"""The epsilon of the norm of keys, in all models."""


class FixedLinear(nn.Module):
    """A matrix without a gradient that every tensor rank holds."""

    kinds: ClassVar = {"weight": Kind.CONSTANT}

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class FixedLayerNorm(nn.Module):
    """A LayerNorm without a gradient."""

    kinds: ClassVar = {"weight": Kind.CONSTANT, "bias": Kind.CONSTANT}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, EPSILON)


class Indexer(nn.Module):
    """The indexer of one layer, with Megatron core's names."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        config, indexer = plan.config, plan.config.indexer
        self.layer, self.ranks = layer, plan.ranks
        self.heads, self.head_dim, self.topk = indexer.heads, indexer.head_dim, indexer.topk
        self.rope_dim, self.interleaved = config.latent.rope_dim, indexer.interleaved
        self.linear_wq_b = FixedLinear(config.latent.q_rank, indexer.heads * indexer.head_dim)
        self.linear_wk = FixedLinear(config.hidden, indexer.head_dim)
        self.k_norm = FixedLayerNorm(indexer.head_dim)
        self.linear_weights_proj = FixedLinear(config.hidden, indexer.heads)

    @torch.no_grad()
    def keys(self, x: Tensor, run: Pass) -> Tensor:
        """Return [sequence, batch, 1, head_dim]. x [own tokens, batch, hidden]: the input of attention."""
        k = self.k_norm(self.linear_wk(x)).unsqueeze(2)
        return _all_tokens(self._rotated(k, run), self.ranks)

    @torch.no_grad()
    def choose(self, x: Tensor, latent: Tensor, k: Tensor, run: Pass) -> Tensor:
        """Return int64 [sequence, batch, topk or fewer]: the chosen keys, as indices of scored_attention.all_keys.

        x [own tokens, batch, hidden]: the input of attention. latent [own tokens, batch, q_rank]: normed.
        k [keys, batch, 1, head_dim]: of this context rank, or of the cache. If a query sees fewer than topk keys, its
        choice contains keys that it can't see.
        """
        k = all_keys(k, run)
        q = self._rotated(self.linear_wq_b(latent).unflatten(-1, (self.heads, -1)), run)
        weights = self.linear_weights_proj(x).float() * self.heads**-0.5
        seen = visibility(run, len(k)).own_part(self.ranks)
        chosen = list(self._best(q, k, weights, seen))
        return _all_tokens(torch.cat(chosen), self.ranks)

    def _rotated(self, x: Tensor, run: Pass) -> Tensor:
        """Rotate the first elements of each head of this rank's own tokens."""
        if run.rotary is None:
            return x
        cos, sin = (self.ranks.own_part(table) for table in run.rotary)
        if self.interleaved:
            x = neighbours_apart(x, self.rope_dim)
        return rotate(x, cos, sin)

    def _best(self, q: Tensor, k: Tensor, weights: Tensor, seen: Visibility) -> Iterator[Tensor]:
        """Yield the choices of BLOCK queries each. seen: of this rank's own tokens."""
        all_of_them = slice(0, len(k))
        keys = k.squeeze(2).permute(1, 2, 0).float()
        for start in range(0, len(q), BLOCK):
            part = slice(start, start + BLOCK)
            products = torch.matmul(q[part].float(), keys) * self.head_dim**-0.5
            scores = torch.matmul(weights[part].unsqueeze(-2), F.relu(products)).squeeze(-2)
            allowed = seen.block(part, all_of_them, None, Rules()).transpose(0, 1)
            hidden = scores.masked_fill(~allowed, -torch.inf)
            yield hidden.topk(min(self.topk, len(k)), -1).indices


def _all_tokens(x: Tensor, ranks: TensorGroup) -> Tensor:
    """[own tokens, ...] -> [sequence, ...] of all tensor ranks under sequence parallelism. Not differentiable."""
    if ranks.group is None or not ranks.sequence:
        return x
    return comm.gathered(x, ranks.group)
