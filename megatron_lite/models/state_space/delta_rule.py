"""The parts that both delta rules share: values that the tokens of a chunk write, and the state that passes through chunks.

    S <- decay S        S <- S + k_t (beta_t (v_t - S' k_t))'        y_t = S' q_t        for each head, S [key, value]

The decay is one number for each head (gated_delta.py) or for each channel of a key (kimi_delta.py). The package's
docstring explains the names of shapes and factors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.models.state_space.chunks import in_chunks


def by_head(x: Tensor, dtype: torch.dtype, chunk: int) -> Tensor:
    """[batch, tokens, heads, ...] -> [batch, chunks, heads, chunk, ...], in this dtype."""
    return in_chunks(x.to(dtype), chunk).transpose(2, 3)


def by_token(y: Tensor, tokens: int) -> Tensor:
    """[batch, chunks, heads, chunk, value] -> [batch, tokens, heads, value], without the last chunk's padding."""
    return y.transpose(2, 3).flatten(1, 2)[:, :tokens]


class WrittenParts(NamedTuple):
    """The values that tokens write: alone - of_state @ (the state before the chunk)."""

    alone: Tensor
    """[batch, chunks, heads, chunk, value]: the values if the state before the chunk is zero."""
    of_state: Tensor
    """[batch, chunks, heads, chunk, key]."""


def written_parts(
    products: Tensor, keys: Tensor, values: Tensor, strengths: Tensor, into: Tensor
) -> WrittenParts:
    """Solve (1 + system) @ written = known for each chunk, where `known` depends on the state before the chunk.

    products [batch, chunks, heads, t, s]: of the keys of two tokens, scaled by `between`; keys [batch, chunks, heads,
    chunk, key]; values [batch, chunks, heads, chunk, value]; strengths (beta) [batch, chunks, heads, chunk, 1]; into
    [batch, chunks, heads, chunk, key or 1]: the factor of that name.
    """
    system = (products * strengths).tril(-1)
    known = torch.cat((values * strengths, keys * (strengths * into)), -1)
    # unitriangular: the solver takes the diagonal as 1.
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    alone, of_state = solved.split((values.shape[-1], keys.shape[-1]), -1)
    return WrittenParts(alone, of_state)


def pass_on(
    parts: WrittenParts, keys_at_end: Tensor, through: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (states before each chunk, values that each chunk writes, the last state).

    keys_at_end [batch, chunks, heads, chunk, key]: the keys, scaled by `out`. through [batch, chunks, heads, key or 1].
    state: before the first chunk; None: zero.
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
        now = now * factor.unsqueeze(-1) + keys.transpose(-1, -2) @ new
    return torch.stack(before, 1), torch.stack(written, 1), now


def delta_step(
    query: Tensor, key: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (y [batch, heads, value], the next state) for one token of each row: the recurrence itself.

    query, key [batch, heads, key] in the state's dtype; v [batch, heads, value]; decay [batch, heads, key or 1], a
    factor; beta [batch, heads]; state [batch, heads, key, value].
    """
    strength = beta.to(state.dtype).unsqueeze(-1)
    state = state * decay.unsqueeze(-1)
    stored_value = key.unsqueeze(-2) @ state
    written = (v.to(state.dtype) - stored_value.squeeze(-2)) * strength
    state = state + key.unsqueeze(-1) * written.unsqueeze(-2)
    y = query.unsqueeze(-2) @ state
    return y.squeeze(-2).to(v.dtype), state
