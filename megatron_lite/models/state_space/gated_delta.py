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
    kernel = delta_kernel(v, documents, state)
    if kernel is not None:
        return delta_by(kernel, q, k, v, g, beta, documents=documents, ends=ends, state=state)
    dtype = torch.promote_types(v.dtype, torch.float32)
    queries = _by_head(q, dtype, chunk)
    keys = _by_head(k, dtype, chunk)
    values = _by_head(v, dtype, chunk)
    strengths = _by_head(beta, dtype, chunk).unsqueeze(-1)

    decay = in_chunks(g.to(dtype), chunk).cumsum(2)
    bounds = None if documents is None else boundaries(documents, chunk)
    between = decay_between(decay, bounds)
    factors = _Factors.of(passed(decay, bounds), between)

    heads_per_key = v.shape[2] // k.shape[2]
    key_of_head = keys.repeat_interleave(heads_per_key, 2)
    key_key = _products(keys, keys, heads_per_key)
    parts = _written_parts(key_key, key_of_head, values, strengths, factors)
    keys_at_end = key_of_head * factors.out
    before, written, last = _pass_on(parts, keys_at_end, factors.through, state)

    query_key = _products(queries, keys, heads_per_key)
    weights_of_chunk = query_key * factors.between
    from_chunk = weights_of_chunk @ written
    query_of_head = queries.repeat_interleave(heads_per_key, 2)
    query_of_state = query_of_head * factors.into
    from_state = query_of_state @ before
    y = from_chunk + from_state

    by_token = y.transpose(2, 3).flatten(1, 2)
    tokens = v.shape[1]
    without_padding = by_token[:, :tokens]
    return without_padding.to(v.dtype), last


class _Factors(NamedTuple):
    """The factors of the decay, with the heads before the tokens."""

    between: Tensor
    """[batch, chunks, heads, t, s]."""
    into: Tensor
    """[batch, chunks, heads, chunk, 1]."""
    out: Tensor
    """[batch, chunks, heads, chunk, 1]."""
    through: Tensor
    """[batch, chunks, heads]."""

    @classmethod
    def of(cls, factors: Passed, between: Tensor) -> "_Factors":
        return cls(
            between=between,
            into=factors.into.transpose(2, 3).unsqueeze(-1),
            out=factors.out.transpose(2, 3).unsqueeze(-1),
            through=factors.through,
        )


def _by_head(x: Tensor, dtype: torch.dtype, chunk: int) -> Tensor:
    """[batch, tokens, heads, ...] -> [batch, chunks, heads, chunk, ...], in this dtype."""
    return in_chunks(x.to(dtype), chunk).transpose(2, 3)


def _products(left: Tensor, keys: Tensor, heads_per_key: int) -> Tensor:
    """Return the products of a chunk's tokens [batch, chunks, heads, t, s]: equal for all heads of a key head."""
    return (left @ keys.transpose(-1, -2)).repeat_interleave(heads_per_key, 2)


class _WrittenParts(NamedTuple):
    """The values that tokens write: alone - of_state @ (the state before the chunk)."""

    alone: Tensor
    """[batch, chunks, heads, chunk, value]: the values if the state before the chunk is zero."""
    of_state: Tensor
    """[batch, chunks, heads, chunk, key]."""


def _written_parts(
    key_key: Tensor, key_of_head: Tensor, values: Tensor, strengths: Tensor, factors: _Factors
) -> _WrittenParts:
    """Solve (1 + system) @ written = known for each chunk, where `known` depends on the state before the chunk.

    key_key [batch, chunks, heads, t, s]; key_of_head [batch, chunks, heads, chunk, key]; values [batch, chunks, heads,
    chunk, value]; strengths (beta) [batch, chunks, heads, chunk, 1].
    """
    system = (key_key * factors.between * strengths).tril(-1)
    known_alone = values * strengths
    known_of_state = key_of_head * (strengths * factors.into)
    known = torch.cat((known_alone, known_of_state), -1)
    # unitriangular: the solver takes the diagonal as 1.
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    alone, of_state = solved.split((values.shape[-1], key_of_head.shape[-1]), -1)
    return _WrittenParts(alone, of_state)


def _pass_on(
    parts: _WrittenParts, keys_at_end: Tensor, through: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (states before each chunk, values that each chunk writes, the last state).

    keys_at_end [batch, chunks, heads, chunk, key]: the keys, scaled by their decay up to the chunk's end. through: as in
    _Factors.
    """
    if state is None:
        batch, _, heads, _, key = keys_at_end.shape
        now = keys_at_end.new_zeros(batch, heads, key, parts.alone.shape[-1])
    else:
        now = state.to(keys_at_end.dtype)
    before, written = [], []
    by_chunk = (each.unbind(1) for each in (parts.alone, parts.of_state, keys_at_end, through))
    for alone, of_state, keys, factor in zip(*by_chunk, strict=True):
        before.append(now)
        new = alone - of_state @ now
        written.append(new)
        now = now * factor[..., None, None] + keys.transpose(-1, -2) @ new
    return torch.stack(before, 1), torch.stack(written, 1), now


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
    strength = beta.to(dtype).unsqueeze(-1)
    decay = g.to(dtype).exp()[..., None, None]

    state = state * decay
    stored_value = key.unsqueeze(-2) @ state
    written = (v.to(dtype) - stored_value.squeeze(-2)) * strength
    state = state + key.unsqueeze(-1) * written.unsqueeze(-2)

    y = query.unsqueeze(-2) @ state
    return y.squeeze(-2).to(v.dtype), state
