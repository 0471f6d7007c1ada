"""Attention for scores that no kernel computes: capped scores, chunks of the sequence, and selected keys.

    weights = softmax(cap * tanh(scale * q k' / cap))          over the keys that a query attends to

The scores exist for BLOCK queries at a time. The backward pass computes them again. Context-parallel ranks gather all
keys and values, whatever --cp-comm-type says.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_lite.models.masks import visible
from megatron_lite.models.passes import Packed, Pass
from megatron_lite.parallel import comm

BLOCK = 512
"""Queries whose scores exist at a time."""


class Rules(NamedTuple):
    """The rules of scores beyond a window."""

    cap: float | None = None
    """A tanh limits scores to the range between minus and plus this value."""
    chunk: int | None = None
    """Tokens attend to the tokens of their own chunk; a chunk has this many positions."""
    chosen: Tensor | None = None
    """int64 [queries, batch, any]: the keys that each query may attend to, as indices of all_keys. None: all keys."""


def all_keys(x: Tensor, run: Pass) -> Tensor:
    """[keys of this rank, batch, ...] -> the keys of all context-parallel ranks, in sequence order. Differentiable.

    The order is that of one process, so that equal scores of an indexer give the same choice.
    """
    if run.context is None:
        return x
    parts = comm.shared_over(x.unsqueeze(0), run.context.group, gather=True)
    return run.context.glue(parts, 0)


def visible_keys(run: Pass, keys: int, window: int | None, chunk: int | None) -> Tensor:
    """Return bool [batch or 1, queries, keys]: the keys that each query attends to, in the order of all_keys.

    It is computed once for all layers with the same window and chunk.
    """
    name = keys, window, chunk
    if name not in run.masks:
        run.masks[name] = _visible_keys(run, keys, window, chunk)
    return run.masks[name]


def _visible_keys(run: Pass, keys: int, window: int | None, chunk: int | None) -> Tensor:
    queries = run.positions.t().unsqueeze(2)
    if run.cache is not None:
        places = torch.arange(keys, device=queries.device).view(1, 1, -1)
    else:
        whole = run.positions if run.context is None else run.context.whole(run.positions, 0)
        places = whole.t().unsqueeze(1)
    seen = visible(queries - places, window)
    if chunk is not None:
        seen = seen & (queries // chunk == places // chunk)
    if run.packed is None:
        return seen
    of_keys = _documents(run.packed).to(queries.device)
    of_queries = of_keys if run.context is None else run.context.own_part(of_keys, 1)
    return seen & (of_queries.unsqueeze(2) == of_keys.unsqueeze(1))


def _documents(packed: Packed) -> Tensor:
    """Return int64 [batch, whole sequence]: the number of each token's document in its row."""
    rows = [
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        for lengths in packed.lengths
    ]
    return torch.stack(rows)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # masks are made once for many layers
def attend_by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: Pass,
    rules: Rules,
    *,
    window: int | None,
    dropout: float,
    scale: float | None,
    largest: Tensor | None,
) -> Tensor:
    """Return causal attention. The other arguments are those of attention.attend."""
    k, v = all_keys(k, run), all_keys(v, run)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seen = visible_keys(run, len(k), window, rules.chunk)
    if largest is not None:
        _raise(largest, q, k, seen, scale, rules)
    made = []
    for start in range(0, len(q), BLOCK):
        part = slice(start, start + BLOCK)
        mask = _allowed(seen, part, rules)
        arguments = q[part], k, v, mask, scale, rules.cap, dropout
        if torch.is_grad_enabled() and len(q) > BLOCK:
            made.append(checkpoint(_weighted_sum, *arguments, use_reentrant=False))
        else:
            made.append(_weighted_sum(*arguments))
    return torch.cat(made)


def _allowed(seen: Tensor, part: slice, rules: Rules) -> Tensor:
    """Return bool [batch or 1, queries of the part, keys]."""
    if rules.chosen is None:
        return seen[:, part]
    chosen = rules.chosen[part].transpose(0, 1)
    selected = torch.zeros(*chosen.shape[:2], seen.shape[2], dtype=torch.bool, device=seen.device)
    return selected.scatter_(2, chosen, True) & seen[:, part]


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return [batch, kv_heads, heads of each kv head, queries, keys]."""
    queries, batch, heads, width = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(queries, batch, kv_heads, heads // kv_heads, width).permute(1, 2, 3, 0, 4)
    scores: Tensor = grouped @ k.permute(1, 2, 3, 0).unsqueeze(2) * scale
    return scores


def _weighted_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    cap: float | None,
    dropout: float,
) -> Tensor:
    """Return [queries, batch, heads, width of v]."""
    scores = _scores(q, k, scale)
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    hidden = ~mask[:, None, None]
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1, wide).to(q.dtype)
    mixed = F.dropout(weights, dropout) @ v.permute(1, 2, 0, 3).unsqueeze(2)
    return mixed.permute(3, 0, 1, 2, 4).flatten(2, 3)


@torch.no_grad()
def _raise(largest: Tensor, q: Tensor, k: Tensor, seen: Tensor, scale: float, rules: Rules) -> None:
    """Raise `largest` [heads] to the scores before the cap."""
    for start in range(0, len(q), BLOCK):
        part = slice(start, start + BLOCK)
        hidden = ~_allowed(seen, part, rules)[:, None, None]
        scores = _scores(q[part], k, scale).masked_fill(hidden, -torch.inf)
        torch.maximum(largest, scores.amax((0, 3, 4)).flatten().float(), out=largest)
