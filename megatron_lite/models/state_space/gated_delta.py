"""The gated delta rule (arXiv 2412.06464), chunk by chunk.

    S <- exp(g_t) S        S <- S + k_t (beta_t (v_t - S' k_t))'        y_t = S' q_t        for each head, S [key, value]

Within a chunk, the values that all tokens write are the solution of one triangular system (the WY form). The
package's docstring explains the names of shapes and factors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.models.state_space.chunks import (
    Passed,
    boundaries,
    decay_between,
    in_chunks,
    passed,
)
from megatron_lite.models.state_space.delta_rule import (
    by_head,
    by_token,
    delta_step,
    pass_on,
    written_parts,
)
from megatron_lite.models.state_space.kernels import delta_by, delta_kernel

CHUNK = 64
"""Tokens of a chunk. The result doesn't depend on it."""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    chunk: int = CHUNK,
    documents: Tensor | None = None,
    ends: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y [batch, tokens, heads, value] in v's dtype, the last state [batch, heads, key, value]).

    q, k [batch, tokens, key heads, key], where each key head serves heads / key heads consecutive heads; v [batch,
    tokens, heads, value]; g [batch, tokens, heads], the logarithm of the decay; beta [batch, tokens, heads].
    documents: int [batch, tokens], numbers that never decrease. The state is zero before each document's first token.
    ends: int64 [documents + 1], the start of each document in all rows, and the end of the last one, for a GPU's kernel.
    None: found in `documents`, for which the host waits.
    state: before the first token, of the first document; None: zero.
    The computation and the state are float32, or float64 for float64 inputs.
    """
    kernel = delta_kernel(k, v, documents, state)
    if kernel is not None:
        return delta_by(kernel, q, k, v, g, beta, documents=documents, ends=ends, state=state)
    dtype = torch.promote_types(v.dtype, torch.float32)
    queries = by_head(q, dtype, chunk)
    keys = by_head(k, dtype, chunk)
    values = by_head(v, dtype, chunk)
    strengths = by_head(beta, dtype, chunk).unsqueeze(-1)

    decay = in_chunks(g.to(dtype), chunk).cumsum(2)
    bounds = None if documents is None else boundaries(documents, chunk)
    between = decay_between(decay, bounds)
    factors = _Factors.of(passed(decay, bounds), between)

    heads_per_key = v.shape[2] // k.shape[2]
    key_of_head = keys.repeat_interleave(heads_per_key, 2)
    key_key = _products(keys, keys, heads_per_key)
    scaled = key_key * factors.between
    parts = written_parts(scaled, key_of_head, values, strengths, factors.into)
    keys_at_end = key_of_head * factors.out
    before, written, last = pass_on(parts, keys_at_end, factors.through, state)

    query_key = _products(queries, keys, heads_per_key)
    weights_of_chunk = query_key * factors.between
    from_chunk = weights_of_chunk @ written
    query_of_head = queries.repeat_interleave(heads_per_key, 2)
    query_of_state = query_of_head * factors.into
    from_state = query_of_state @ before
    y = from_chunk + from_state
    return by_token(y, v.shape[1]).to(v.dtype), last


class _Factors(NamedTuple):
    """The factors of the decay, with the heads before the tokens."""

    between: Tensor
    """[batch, chunks, heads, t, s]."""
    into: Tensor
    """[batch, chunks, heads, chunk, 1]."""
    out: Tensor
    """[batch, chunks, heads, chunk, 1]."""
    through: Tensor
    """[batch, chunks, heads, 1]."""

    @classmethod
    def of(cls, factors: Passed, between: Tensor) -> "_Factors":
        return cls(
            between=between,
            into=factors.into.transpose(2, 3).unsqueeze(-1),
            out=factors.out.transpose(2, 3).unsqueeze(-1),
            through=factors.through.unsqueeze(-1),
        )


def _products(left: Tensor, keys: Tensor, heads_per_key: int) -> Tensor:
    """Return the products of a chunk's tokens [batch, chunks, heads, t, s]: equal for all heads of a key head."""
    return (left @ keys.transpose(-1, -2)).repeat_interleave(heads_per_key, 2)


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (y [batch, heads, value], the next state) for one token of each row: the recurrence itself.

    q, k [batch, key heads, key], v [batch, heads, value], g and beta [batch, heads]; state: as in gated_delta_rule.
    """
    dtype = state.dtype
    heads_per_key = v.shape[1] // k.shape[1]
    query = q.to(dtype).repeat_interleave(heads_per_key, 1)
    key = k.to(dtype).repeat_interleave(heads_per_key, 1)
    decay = g.to(dtype).exp().unsqueeze(-1)
    return delta_step(query, key, v, decay, beta, state)
