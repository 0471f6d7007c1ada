"""The head of a reward model: a linear layer that gives a text a score, the score of its last token.

Every tensor rank of the last stage has the whole layer. A row's last token may be on one tensor rank (sequence
parallelism) or on one context rank alone, so that the ranks add up their scores.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_lite.models.build_plan import Plan
from megatron_lite.parallel import comm
from megatron_lite.parallel.context import ContextGroup
from megatron_lite.parallel.parameter_kinds import Kind


class ScoreHead(nn.Module):
    """A matrix [labels, hidden] without a bias."""

    kinds: ClassVar = {"weight": Kind.OF_TOKENS}

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.ranks = plan.ranks
        self.weight = nn.Parameter(torch.empty(plan.config.head.labels, plan.config.hidden))

    def forward(self, hidden: Tensor, chosen: Tensor, context: ContextGroup | None) -> Tensor:
        """Return float32 [batch, labels], the same on every tensor and context rank.

        hidden: [sequence (/ tp), batch, hidden]. chosen: float32 [batch, sequence] of this context rank, 1 at each
        row's last token, else 0.
        """
        own = self.ranks.own_part(chosen.t()).to(hidden.dtype)
        # A sum over one token: exact in every dtype, and it needs no index of a token on another rank.
        picked = torch.einsum("sb,sbh->bh", own, hidden)
        scores = F.linear(picked, self.weight).float()
        if self.ranks.group is not None and self.ranks.sequence:
            scores = comm.sum_over(scores, self.ranks.group, scatter=False)
        return scores if context is None else comm.sum_over(scores, context.group, scatter=False)
