"""The delta rule of Kimi delta attention (arXiv 2510.26692): gated_delta.py, with a decay for each channel of a key.

    S <- diag(exp(g_t)) S        S <- S + k_t (beta_t (v_t - S' k_t))'        y_t = S' q_t        for each head, S [key, value]

Products of two tokens have the factors exp(decay[t] - decay[s]), which differ by channel. Divided into exp(decay[t]) and
exp(-decay[s]), the second factor overflows. `decayed_products` divides them at a token between s and t, so that no factor is
above 1. The package's docstring explains the names of shapes and factors.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.models.state_space.chunks import Boundaries, boundaries, in_chunks, passed
from megatron_lite.models.state_space.delta_rule import (
    by_head,
    by_token,
    delta_step,
    pass_on,
    written_parts,
)
from megatron_lite.models.state_space.kernels import delta_by, kimi_delta_kernel

CHUNK = 64
"""Tokens of a chunk: a power of 2. The result doesn't depend on it."""


def kimi_delta_rule(
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

    q, k [batch, tokens, heads, key]; v [batch, tokens, heads, value]; g [batch, tokens, heads, key], the logarithm of the
    decay; beta [batch, tokens, heads]. chunk: a power of 2.
    documents, ends: see gated_delta_rule. The state is zero before each document's first token.
    state: before the first token, of the first document; None: zero.
    The computation and the state are float32, or float64 for float64 inputs.
    """
    kernel = kimi_delta_kernel(k, v, documents, state)
    if kernel is not None:
        return delta_by(kernel, q, k, v, g, beta, documents=documents, ends=ends, state=state)
    dtype = torch.promote_types(v.dtype, torch.float32)
    queries, keys, values = (by_head(each, dtype, chunk) for each in (q, k, v))
    strengths = by_head(beta, dtype, chunk).unsqueeze(-1)
    bounds = None if documents is None else boundaries(documents, chunk)

    # [batch, chunks, chunk, heads, key]
    decay = in_chunks(g.to(dtype), chunk).cumsum(2)
    into, out, through = _factors(decay, bounds)
    decay = decay.transpose(2, 3)
    key_key = _within_documents(decayed_products(keys, keys, decay), bounds)
    parts = written_parts(key_key, keys, values, strengths, into)
    before, written, last = pass_on(parts, keys * out, through, state)

    query_key = _within_documents(decayed_products(queries, keys, decay), bounds)
    y = query_key @ written + (queries * into) @ before
    return by_token(y, v.shape[1]).to(v.dtype), last


def _factors(decay: Tensor, bounds: Boundaries | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return into and out [batch, chunks, heads, chunk, key], and through [batch, chunks, heads, key].

    decay [batch, chunks, chunk, heads, key].
    """
    heads_and_keys = decay.shape[-2:]
    # Each channel decays as a head does in other mixers.
    of_channels = passed(decay.flatten(-2), bounds)
    into, out, through = (each.view(*each.shape[:-1], *heads_and_keys) for each in of_channels)
    return into.transpose(2, 3), out.transpose(2, 3), through


def _within_documents(products: Tensor, bounds: Boundaries | None) -> Tensor:
    """Set the products [batch, chunks, heads, t, s] of tokens of two documents to zero. All of them are finite."""
    return products if bounds is None else products * bounds.same.unsqueeze(2)


def decayed_products(left: Tensor, right: Tensor, decay: Tensor) -> Tensor:
    """Return [..., t, s]: the sum over channels of left[t] right[s] exp(decay[t] - decay[s]) for s up to t, else 0.

    left, right, decay [..., chunk, key]: the decay never increases. Blocks on the diagonal grow from one token to the chunk. In
    each step, two neighbours become a block of twice the size. The tokens of the second block read those of the first one.
    Their decay is divided at the last token of the first block.
    """
    # [..., blocks, size, size]
    products = (left * right).sum(-1)[..., None, None]
    size = 1
    while size < left.shape[-2]:
        # [..., pairs, size, key]
        _, later = _pairs(left, size)
        earlier, _ = _pairs(right, size)
        first, second = _pairs(decay, size)
        middle = first[..., -1:, :]
        read = later * (second - middle).exp()
        wrote = earlier * (middle - first).exp()
        between = read @ wrote.transpose(-1, -2)
        of_first, of_second = products[..., 0::2, :, :], products[..., 1::2, :, :]
        upper = F.pad(of_first, (0, size))
        lower = torch.cat((between, of_second), -1)
        products = torch.cat((upper, lower), -2)
        size *= 2
    return products.squeeze(-3)


def _pairs(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Split [..., chunk, key] into blocks of this size. Return the first ones and the second ones of all pairs."""
    blocks = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
    first, second = blocks.unbind(-3)
    return first, second


def kimi_delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (y [batch, heads, value], the next state) for one token of each row.

    q, k, g [batch, heads, key], v [batch, heads, value], beta [batch, heads]; state: as in kimi_delta_rule.
    """
    dtype = state.dtype
    return delta_step(q.to(dtype), k.to(dtype), v, g.to(dtype).exp(), beta, state)
