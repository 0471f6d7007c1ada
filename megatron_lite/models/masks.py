"""Masks of causal attention and of sliding windows: True where a query attends to a key."""

from functools import lru_cache

import torch
from torch import Tensor


def visible(back: Tensor, window: int | None) -> Tensor:
    """Return bool, the shape of `back`. back: the query's position minus the key's. window: includes the query's own position."""
    return back >= 0 if window is None else (back >= 0) & (back < window)


def block_mask(
    queries: int, keys: int, ahead: int, window: int | None, device: torch.device
) -> Tensor:
    """Return bool [queries, keys]. ahead: the first query's position minus the first key's."""
    back = (
        torch.arange(queries, device=device).unsqueeze(1)
        + ahead
        - torch.arange(keys, device=device)
    )
    return visible(back, window)


@lru_cache(maxsize=64)
def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return bool [length, length]. It is made once for all layers and passes. Documents may have many lengths."""
    return block_mask(length, length, 0, window, device)


def narrow_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask of a window, or None if it covers the whole sequence: a mask makes attention slower."""
    return None if window is None or window >= length else window_mask(length, window, device)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return bool [queries, keys] for attention without a mask: all keys if there are more keys than queries."""
    if queries < keys:
        return torch.ones(queries, keys, dtype=torch.bool, device=device)
    return window_mask(queries, queries, device)


def cache_mask(positions: Tensor, keys: int, window: int | None) -> Tensor:
    """Return bool [batch or 1, 1, queries, keys]: the keys of a cache. positions: [queries, batch or 1]."""
    back = positions.t()[:, None, :, None] - torch.arange(keys, device=positions.device)
    return visible(back, window)
