"""The largest scores of attention, which its kernels don't tell: worked out beside them, in blocks, so that there is never the whole
matrix of them. A score is what goes into the softmax: q k' times the scale, of the keys that a query sees.
"""

from itertools import accumulate

import torch
from torch import Tensor

from megatron_lite.models.passes import LargestScores, Packed

BLOCK = 512
"""Queries, and keys, whose scores exist at one time."""

Seen = tuple[int, int | None] | None
"""(places that the first query is ahead of the first key, window or None) where a query sees keys up to its own place; None: all."""


def of_layer(scores: LargestScores, layer: int, q: Tensor) -> Tensor | None:
    """float32 [heads of q], -inf, to be raised; None where the pass has been through the layer, which is only computed again."""
    if layer in scores.by_layer:
        return None
    scores.by_layer[layer] = torch.full((q.shape[2],), -torch.inf, device=q.device)
    return scores.by_layer[layer]


def raise_by_rows(
    largest: Tensor, q: Tensor, k: Tensor, packed: Packed | None, window: int | None, scale: float | None
) -> None:
    """Of sequences that this rank has all of; as attention.attend has them."""
    if packed is None:
        raise_to(largest, q, k, scale, (0, window))
        return
    for row, lengths in enumerate(packed.lengths):
        ends = list(accumulate(lengths))
        for start, end in zip([0, *ends], ends, strict=False):
            part = slice(start, end), slice(row, row + 1)
            raise_to(largest, q[part], k[part], scale, (0, window))


@torch.no_grad()
def raise_to(largest: Tensor, q: Tensor, k: Tensor, scale: float | None, seen: Seen) -> None:
    """largest [heads] becomes at least the scores of q [queries, batch, heads, width] with k [keys, batch, kv_heads, width].

    Products are in q's dtype.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for first_q in range(0, len(q), BLOCK):
        for first_k in range(0, len(k), BLOCK):
            queries, keys = q[first_q : first_q + BLOCK], k[first_k : first_k + BLOCK]
            hidden = None
            if seen is not None:
                ahead, window = seen[0] + first_q - first_k, seen[1]
                nearest, farthest = ahead - len(keys) + 1, ahead + len(queries) - 1
                if farthest < 0 or (window is not None and nearest >= window):
                    continue  # no query sees any of these keys
                if nearest < 0 or (window is not None and farthest >= window):
                    hidden = ~_visible(ahead, len(queries), len(keys), window, q.device)
            torch.maximum(largest, _largest(queries, keys, hidden).float() * scale, out=largest)


def _visible(ahead: int, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [queries, keys]"""
    back = torch.arange(queries, device=device).unsqueeze(1) + ahead - torch.arange(keys, device=device)
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _largest(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    """[heads], before the scale. hidden: bool [queries, keys]."""
    (queries, batch, heads, _), kv_heads = q.shape, k.shape[2]
    grouped = q.reshape(queries, batch, kv_heads, heads // kv_heads, -1).permute(1, 2, 3, 0, 4)
    products = grouped.flatten(2, 3) @ k.permute(1, 2, 3, 0)  # of all heads of a kv head at once
    products = products.view(batch, heads, queries, len(k))
    if hidden is not None:
        products = products.masked_fill(hidden, -torch.inf)
    found: Tensor = products.amax((0, 2, 3))
    return found
