"""The gated delta rule (arXiv 2412.06464), chunk by chunk.

    S <- exp(g_t) S        S <- S + k_t (beta_t (v_t - S' k_t))'        y_t = S' q_t        for each head, S [key, value]

Within a chunk, the corrections of all tokens are the solution of one triangular system (the WY form).
"""

import torch
from torch import Tensor

from megatron_lite.models.state_space.chunks import boundaries, decay_between, in_chunks, passed
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
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y [batch, tokens, heads, value] in v's dtype, the last state [batch, heads, key, value]).

    q, k [batch, tokens, key heads, key], where each key head serves heads / key heads consecutive heads; v [batch,
    tokens, heads, value]; g [batch, tokens, heads], the logarithm of the decay; beta [batch, tokens, heads].
    documents: int [batch, tokens], numbers that never decrease. The state is zero before each document's first token.
    state: before the first token, of the first document; None: zero.
    The computation and the state are float32, or float64 for float64 inputs.
    """
    kernel = delta_kernel(v, documents, state)
    if kernel is not None:
        return delta_by(kernel, q, k, v, g, beta, documents=documents, state=state)
    dtype = torch.promote_types(v.dtype, torch.float32)
    bounds = None if documents is None else boundaries(documents, chunk)
    queries = _by_head(q, dtype, chunk)
    keys = _by_head(k, dtype, chunk)
    values = _by_head(v, dtype, chunk)
    decay = in_chunks(g.to(dtype), chunk).cumsum(2)
    writes = _by_head(beta, dtype, chunk).unsqueeze(-1)
    factors = passed(decay, bounds)
    into = factors.into.transpose(2, 3).unsqueeze(-1)
    out = factors.out.transpose(2, 3).unsqueeze(-1)
    between = decay_between(decay, bounds)

    served = v.shape[2] // k.shape[2]
    each_key = keys.repeat_interleave(served, 2)
    key_products = _products(keys, keys, served)
    system = (key_products * between * writes).tril(-1)
    known = torch.cat((values * writes, each_key * (writes * into)), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    corrections, from_state = solved.split((values.shape[-1], keys.shape[-1]), -1)
    to_end = each_key * out
    before, written, last = _pass_on(corrections, from_state, to_end, factors.through, state)

    query_products = _products(queries, keys, served)
    inside = (query_products * between) @ written
    each_query = queries.repeat_interleave(served, 2) * into
    y = inside + each_query @ before
    by_token = y.transpose(2, 3).flatten(1, 2)
    tokens = v.shape[1]
    return by_token[:, :tokens].to(v.dtype), last


def _by_head(x: Tensor, dtype: torch.dtype, chunk: int) -> Tensor:
    """[batch, tokens, heads, ...] -> [batch, chunks, heads, chunk, ...], in this dtype."""
    return in_chunks(x.to(dtype), chunk).transpose(2, 3)


def _products(left: Tensor, keys: Tensor, served: int) -> Tensor:
    """Return the products of a chunk's tokens [batch, chunks, heads, t, s], equal for all heads that a key head serves."""
    return (left @ keys.transpose(-1, -2)).repeat_interleave(served, 2)


def _pass_on(
    corrections: Tensor, from_state: Tensor, keys: Tensor, through: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (states before each chunk, values that each chunk writes, the last state).

    corrections: values that the chunks write if the state before them is zero. from_state: the factor of this state.
    keys: scaled by their decay up to the chunk's end.
    """
    batch, _, heads, _, width = keys.shape
    now = (
        keys.new_zeros(batch, heads, width, corrections.shape[-1])
        if state is None
        else state.to(keys.dtype)
    )
    before, written = [], []
    chunks = zip(
        *(each.unbind(1) for each in (corrections, from_state, keys, through)), strict=True
    )
    for correction, factor, key, decay in chunks:
        before.append(now)
        new = correction - factor @ now
        written.append(new)
        now = now * decay[..., None, None] + key.transpose(-1, -2) @ new
    return torch.stack(before, 1), torch.stack(written, 1), now


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (y [batch, heads, value], the next state) for one token of each row: the recurrence itself.

    q, k [batch, key heads, key], v [batch, heads, value], g and beta [batch, heads]; state: as in gated_delta_rule.
    """
    served = v.shape[1] // k.shape[1]
    query, key = (each.to(state.dtype).repeat_interleave(served, 1) for each in (q, k))
    state = state * g.to(state.dtype).exp()[..., None, None]
    read = (key.unsqueeze(-2) @ state).squeeze(-2)
    new = (v.to(state.dtype) - read) * beta.to(state.dtype).unsqueeze(-1)
    state = state + key.unsqueeze(-1) * new.unsqueeze(-2)
    y = (query.unsqueeze(-2) @ state).squeeze(-2)
    return y.to(v.dtype), state
