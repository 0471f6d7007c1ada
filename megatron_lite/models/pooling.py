"""The embedding of a text: the hidden states of its tokens after the last norm, pooled into one vector of length 1.

A text's last token sees all of its tokens, so its hidden state stands for the text. The mean of all tokens is the other usual
choice. Source: Pooling and Normalize of sentence-transformers 5.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.parallel import comm
from megatron_lite.parallel.context import ContextGroup
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.settings.embedding import MEAN


def pooled_tokens(lengths: Tensor, positions: int, pooling: str) -> Tensor:
    """Return float32 [texts, positions]: 1 for each token that is pooled, else 0.

    lengths: int64 [texts], the tokens of each text, at least 1. pooling: one of settings.embedding.POOLINGS.
    """
    places = torch.arange(positions, device=lengths.device)
    ends = lengths.unsqueeze(1)
    chosen = places < ends if pooling == MEAN else places == ends - 1
    return chosen.float()


def embeddings(
    hidden: Tensor, chosen: Tensor, ranks: TensorGroup, context: ContextGroup | None
) -> Tensor:
    """Return float32 [texts, hidden] of length 1, the same on every tensor and context rank.

    hidden: [sequence (/ tp), texts, hidden], after the last norm. chosen: float32 [texts, sequence] of this context rank, from
    pooled_tokens.
    """
    own = ranks.own_part(chosen.t())
    # The length becomes 1, so that a sum gives what a mean gives.
    summed = torch.einsum("sb,sbh->bh", own, hidden.float())
    if ranks.group is not None and ranks.sequence:
        summed = comm.sum_over(summed, ranks.group, scatter=False)
    if context is not None:
        summed = comm.sum_over(summed, context.group, scatter=False)
    return F.normalize(summed, dim=-1)
