"""The state space of Mamba 2 (SSD, arXiv 2405.21060), chunk by chunk.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t'        y_t = S_t C_t + D x_t        for each head, S [width, state]

Within a chunk, tokens act on each other by one matrix product, as in attention. Between chunks, only the state passes.
B is the key with which a token writes into the state, and C the query with which it reads. The package's docstring
explains the names of shapes and factors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.models.state_space.chunks import (
    Boundaries,
    boundaries,
    decay_between,
    in_chunks,
    passed,
)
from megatron_lite.models.state_space.kernels import scan_by, scan_kernel

CHUNK = 64
"""Tokens of a chunk. The result doesn't depend on it."""


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    *,
    chunk: int = CHUNK,
    documents: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y [batch, tokens, heads, width] in x's dtype, the last state [batch, heads, width, state]).

    x [batch, tokens, heads, width]; dt [batch, tokens, heads], positive; a [heads], negative; b, c [batch, tokens,
    groups, state], where each group serves heads / groups consecutive heads; d [heads].
    documents: int [batch, tokens], numbers that never decrease. The state is zero before each document's first token.
    state: before the first token, of the first document; None: zero.
    The computation and the state are float32, or float64 for float64 inputs.
    """
    kernel = scan_kernel(x, documents, state)
    if kernel is not None:
        return scan_by(kernel, x, dt, a, b, c, d, chunk=chunk, documents=documents, state=state)
    bounds = None if documents is None else boundaries(documents, chunk)
    wide = _Inputs(x, dt, a, b, c, d).widened()
    padded, last = _chunked(wide, chunk, bounds, state)
    through_state = padded[:, : x.shape[1]]
    past_the_state = wide.d.unsqueeze(-1) * wide.x
    y = through_state + past_the_state
    return y.to(x.dtype), last


class _Inputs(NamedTuple):
    """The inputs of `ssd`."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor

    def widened(self) -> "_Inputs":
        """Return the inputs in the dtype of the computation."""
        dtype = torch.promote_types(self.x.dtype, torch.float32)
        return _Inputs(*[tensor.to(dtype) for tensor in self])


def _chunked(
    wide: _Inputs, chunk: int, bounds: Boundaries | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (y without the term past the state, padded to whole chunks, the last state)."""
    times = in_chunks(wide.dt, chunk)
    # [batch, chunks, chunk, heads, width]
    inputs = in_chunks(wide.x, chunk) * times.unsqueeze(-1)
    # [batch, chunks, groups, chunk, state]
    keys = in_chunks(wide.b, chunk).transpose(2, 3)
    queries = in_chunks(wide.c, chunk).transpose(2, 3)

    decay = torch.cumsum(times * wide.a, 2)
    between = decay_between(decay, bounds)
    factors = passed(decay, bounds)

    from_chunk = _read_chunk(queries, keys, between, inputs)

    inputs_at_end = inputs * factors.out.unsqueeze(-1)
    groups = wide.b.shape[2]
    inputs_by_group = _by_group(inputs_at_end, groups)
    added = inputs_by_group.transpose(-1, -2) @ keys
    before, last = _pass_on(added, factors.through, state)
    stored = _read_state(queries, before).reshape(inputs.shape)
    from_state = stored * factors.into.unsqueeze(-1)

    y = from_chunk + from_state
    return y.flatten(1, 2), last


def _read_state(queries: Tensor, before: Tensor) -> Tensor:
    """Return what each token reads from the state before its chunk, [batch, chunks, chunk, groups, heads of a group * width]."""
    found = queries @ before.transpose(-1, -2)
    return found.transpose(2, 3)


def _read_chunk(queries: Tensor, keys: Tensor, between: Tensor, inputs: Tensor) -> Tensor:
    """Return what each token reads from the tokens of its chunk, [batch, chunks, chunk, heads, width]."""
    # [batch, chunks, groups, 1, t, s]: the products are equal for all heads of a group.
    products = (queries @ keys.transpose(-1, -2)).unsqueeze(3)
    by_group = between.view(*products.shape[:3], -1, *products.shape[4:])
    weights = (products * by_group).reshape(between.shape)
    read = weights @ inputs.transpose(2, 3)
    return read.transpose(2, 3)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[batch, chunks, chunk, heads, width] -> [batch, chunks, groups, chunk, heads of a group * width]."""
    return x.reshape(*x.shape[:3], groups, -1).transpose(2, 3)


def _pass_on(added: Tensor, through: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (states before each chunk [batch, chunks, groups, heads of a group * width, state], the last state).

    added: what each chunk adds, of the shape of the states. through: see Passed. state: before the first chunk.
    """
    batch, chunks, _, _, state_width = added.shape
    heads = through.shape[-1]
    added_by_head = added.reshape(batch, chunks, heads, -1, state_width)
    now = added.new_zeros(added_by_head[:, 0].shape) if state is None else state.to(added.dtype)
    before = []
    for more, factor in zip(added_by_head.unbind(1), through.unbind(1), strict=True):
        before.append(now)
        now = now * factor[..., None, None] + more
    return torch.stack(before, 1).view(added.shape), now


def ssd_step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (y [batch, heads, width], the next state) for one token of each row: the recurrence itself.

    x [batch, heads, width], dt [batch, heads], b and c [batch, groups, state]; a, d, state: as in ssd.
    """
    dtype = state.dtype
    heads_of_group = x.shape[1] // b.shape[1]
    keys = b.to(dtype).repeat_interleave(heads_of_group, 1)
    queries = c.to(dtype).repeat_interleave(heads_of_group, 1)

    times = dt.to(dtype)
    decay = (times * a.to(dtype)).exp()
    wide = x.to(dtype)
    inputs = times.unsqueeze(-1) * wide
    written = inputs.unsqueeze(-1) * keys.unsqueeze(-2)
    state = state * decay[..., None, None] + written

    through_state = state @ queries.unsqueeze(-1)
    past_the_state = d.to(dtype).unsqueeze(-1) * wide
    y = through_state.squeeze(-1) + past_the_state
    return y.to(x.dtype), state
