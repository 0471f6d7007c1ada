"""Computes the largest attention scores, which attention kernels don't return.

The scores are computed in blocks, so that the whole matrix never exists. A score is the input of the softmax: q k'
times the scale, over the keys that a query attends to.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_lite.models.masks import block_mask
from megatron_lite.models.passes import LargestScores, Packed

BLOCK = 512
"""Number of queries, and of keys, whose scores exist at a time."""

Seen = tuple[int, int | None] | None
"""(first query's position minus the first key's, window or None) for causal attention; None: queries attend to all keys."""


def of_layer(scores: LargestScores, layer: int, q: Tensor) -> Tensor | None:
    """Return float32 [heads of q] with -inf, to be raised; None if the pass has been through the layer (recomputation)."""
    if layer in scores.by_layer:
        return None
    scores.by_layer[layer] = torch.full((q.shape[2],), -torch.inf, device=q.device)
    return scores.by_layer[layer]


def raise_by_rows(
    largest: Tensor,
    q: Tensor,
    k: Tensor,
    packed: Packed | None,
    window: int | None,
    scale: float | None,
) -> None:
    """Raise `largest` to the scores of whole sequences on this rank. The arguments are those of attention.attend."""
    if packed is None:
        raise_to(largest, q, k, scale, (0, window))
        return
    for document in packed.documents():
        part = document.place
        raise_to(largest, q[part], k[part], scale, (0, window))


@torch.no_grad()
def raise_to(largest: Tensor, q: Tensor, k: Tensor, scale: float | None, seen: Seen) -> None:
    """Raise `largest` [heads] to the scores of q [queries, batch, heads, width] with k [keys, batch, kv_heads, width].

    Products are in q's dtype.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for queries, keys, hidden in _blocks(q, k, seen):
        found = _largest(queries, keys, hidden).float() * scale
        torch.maximum(largest, found, out=largest)


def _blocks(q: Tensor, k: Tensor, seen: Seen) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield (queries, keys, bool [queries, keys] of the hidden keys; None: no key is hidden), without blocks that are hidden."""
    for first_q in range(0, len(q), BLOCK):
        for first_k in range(0, len(k), BLOCK):
            queries, keys = q[first_q : first_q + BLOCK], k[first_k : first_k + BLOCK]
            if seen is None:
                yield queries, keys, None
                continue
            ahead, window = seen[0] + first_q - first_k, seen[1]
            nearest = ahead - len(keys) + 1
            farthest = ahead + len(queries) - 1
            reach = farthest + 1 if window is None else window
            if farthest < 0 or nearest >= reach:
                continue
            whole = nearest >= 0 and farthest < reach
            hidden = (
                None if whole else ~block_mask(len(queries), len(keys), ahead, window, q.device)
            )
            yield queries, keys, hidden


def _largest(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    """Return [heads], before the scale. hidden: bool [queries, keys]."""
    (queries, batch, heads, _), kv_heads = q.shape, k.shape[2]
    grouped = q.reshape(queries, batch, kv_heads, heads // kv_heads, -1).permute(1, 2, 3, 0, 4)
    # One product computes all query heads of a key/value head.
    products = grouped.flatten(2, 3) @ k.permute(1, 2, 3, 0)
    products = products.view(batch, heads, queries, len(k))
    if hidden is not None:
        products = products.masked_fill(hidden, -torch.inf)
    found: Tensor = products.amax((0, 2, 3))
    return found
