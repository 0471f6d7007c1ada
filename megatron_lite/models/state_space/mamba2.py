"""The state space of Mamba 2 (SSD, arXiv 2405.21060), chunk by chunk.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t'        y_t = S_t C_t + D x_t        for each head, S [width, state]

Within a chunk, tokens act on each other by one matrix product, as in attention. Between chunks, only the state passes.
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
    tokens = x.shape[1]
    from_state = padded[:, :tokens]
    past_the_state = wide.d.unsqueeze(-1) * wide.x
    y = from_state + past_the_state
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
    x = in_chunks(wide.x, chunk)
    inputs = x * times.unsqueeze(-1)
    keys = in_chunks(wide.b, chunk).transpose(2, 3)
    queries = in_chunks(wide.c, chunk).transpose(2, 3)

    decay = torch.cumsum(times * wide.a, 2)
    between = decay_between(decay, bounds)
    factors = passed(decay, bounds)

    inside = _inside(queries, keys, between, inputs)
    groups = wide.b.shape[2]
    at_end = inputs * factors.out.unsqueeze(-1)
    to_end = _by_group(at_end, groups)
    added = to_end.transpose(-1, -2) @ keys
    before, last = _pass_on(added, factors.through, state)
    read = _read(queries, before).reshape(inputs.shape)
    from_before = read * factors.into.unsqueeze(-1)
    y = inside + from_before
    return y.flatten(1, 2), last


def _read(queries: Tensor, before: Tensor) -> Tensor:
    """Return what each token reads from the state before its chunk, [batch, chunks, chunk, groups, heads of a group * width]."""
    found = queries @ before.transpose(-1, -2)
    return found.transpose(2, 3)


def _inside(queries: Tensor, keys: Tensor, between: Tensor, inputs: Tensor) -> Tensor:
    """Return what the tokens of a chunk give each other, [batch, chunks, chunk, heads, width]."""
    # [batch, chunks, groups, 1, t, s]: the products are equal for all heads of a group.
    products = (queries @ keys.transpose(-1, -2)).unsqueeze(3)
    by_group = between.view(*products.shape[:3], -1, *products.shape[4:])
    weights = (products * by_group).reshape(between.shape)
    made = weights @ inputs.transpose(2, 3)
    return made.transpose(2, 3)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[batch, chunks, chunk, heads, width] -> [batch, chunks, groups, chunk, heads of a group * width]."""
    return x.reshape(*x.shape[:3], groups, -1).transpose(2, 3)


def _pass_on(added: Tensor, through: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (states before each chunk [batch, chunks, groups, heads of a group * width, state], the last state).

    added: what each chunk adds, of the shape of the states. through: see Passed. state: before the first chunk.
    """
    shape = added.shape[0], through.shape[-1], -1, added.shape[-1]
    each_added = added.reshape(*added.shape[:2], *shape[1:])
    now = each_added.new_zeros(each_added[:, 0].shape) if state is None else state.to(added.dtype)
    before = []
    for more, factor in zip(each_added.unbind(1), through.unbind(1), strict=True):
        before.append(now)
        now = now * factor[..., None, None] + more
    return torch.stack(before, 1).view(added.shape), now


def ssd_step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (y [batch, heads, width], the next state) for one token of each row: the recurrence itself.

    x [batch, heads, width], dt [batch, heads], b and c [batch, groups, state]; a, d, state: as in ssd.
    """
    wide, times = x.to(state.dtype), dt.to(state.dtype)
    heads_of_group = x.shape[1] // b.shape[1]
    keys, queries = (each.to(state.dtype).repeat_interleave(heads_of_group, 1) for each in (b, c))
    factor = (times * a.to(state.dtype)).exp()
    new = (times.unsqueeze(-1) * wide).unsqueeze(-1) * keys.unsqueeze(-2)
    state = state * factor[..., None, None] + new
    y = (state @ queries.unsqueeze(-1)).squeeze(-1) + d.to(state.dtype).unsqueeze(-1) * wide
    return y.to(x.dtype), state
