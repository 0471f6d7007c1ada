"""Vectors of rows of tokens by a decoder, in one pass through its layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.engine import Engine
from megatron_lite.inference.rows_together import padded
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.pooling import embeddings, pooled_tokens


def row_vectors(engine: Engine, rows: Sequence[Sequence[int]], pooling: str) -> Tensor | None:
    """Return float32 [rows, hidden], the vectors of rows of tokens, of one pass. None on stages other than the last one."""
    device = engine.grid.device
    tokens = padded(rows).to(device)
    last = engine.last_stage(Microbatch(tokens, tokens))
    if last is None:
        return None
    chunk, hidden = last
    assert isinstance(chunk, ModelChunk)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    chosen = pooled_tokens(lengths, tokens.shape[1], pooling)
    return embeddings(hidden, chosen, chunk.plan.ranks, None)
