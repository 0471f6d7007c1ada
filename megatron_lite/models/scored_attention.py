"""Attention for scores that no kernel computes: capped scores, ALiBi, chunks of the sequence, selected keys, joint tokens.

    weights = softmax(cap * tanh(scale * q k' / cap))          over the keys that a query attends to

The scores and the mask exist for BLOCK queries at a time, and for the keys in their reach. The backward pass computes
both again. So no tensor of all queries and all keys exists. Context-parallel ranks gather all
keys and values, whatever --cp-comm-type says.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_lite.models.masks import visible
from megatron_lite.models.passes import Pass
from megatron_lite.parallel import comm
from megatron_lite.parallel.tensor import TensorGroup

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
    joint: bool = False
    """True if tokens with the same number in Microbatch.joint attend to each other."""
    slopes: tuple[float, ...] | None = None
    """The decrease of each head's scores with each position of distance. None: the distance has no effect."""


def all_keys(x: Tensor, run: Pass) -> Tensor:
    """[keys of this rank, batch, ...] -> the keys of all context-parallel ranks, in sequence order. Differentiable.

    The order is that of one process, so that equal scores of an indexer give the same choice.
    """
    if run.context is None:
        return x
    parts = comm.shared_over(x.unsqueeze(0), run.context.group, gather=True)
    return run.context.glue(parts, 0)


@dataclass(frozen=True)
class Visibility:
    """The positions and documents that decide which keys a query attends to: small tensors, for all layers of a pass."""

    queries: Tensor
    """int64 [batch or 1, queries]: positions."""
    keys: Tensor
    """int64 [batch or 1, keys]: positions, in the order of all_keys."""
    documents: tuple[Tensor, Tensor] | None
    """int64 [batch, queries] and [batch, keys]: the number of each token's document. None: each row is one document."""
    in_order: bool
    """True if query i and key i have position i."""
    joint: tuple[Tensor, Tensor] | None = None
    """int64 [batch, queries] and [batch, keys]: see Microbatch.joint."""
    _slopes: dict[tuple[tuple[float, ...], torch.dtype], Tensor] = field(default_factory=dict)

    def slopes(self, numbers: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        """Return the slopes of heads, [heads]. They are made once for all layers, without waiting for the device."""
        key = numbers, dtype
        if key not in self._slopes:
            device = self.queries.device
            made = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
            self._slopes[key] = made.to(device, non_blocking=True)
        return self._slopes[key]

    def own_part(self, ranks: TensorGroup) -> "Visibility":
        """Return the visibility of this tensor rank's queries."""
        queries = ranks.own_part(self.queries.t()).t()
        documents = self.documents
        if documents is not None:
            documents = ranks.own_part(documents[0].t()).t(), documents[1]
        # No family has an indexer and joint tokens.
        return replace(self, queries=queries, documents=documents, in_order=False, joint=None)

    def reach(self, part: slice, window: int | None, rules: Rules) -> slice:
        """Return the keys among which are all that these queries attend to."""
        if not self.in_order or rules.joint:
            return slice(0, self.keys.shape[1])
        chunk = rules.chunk
        first = 0 if window is None else max(0, part.start - window + 1)
        if chunk is not None:
            first = max(first, part.start // chunk * chunk)
        return slice(first, min(part.stop, self.keys.shape[1]))

    def block(self, part: slice, keys: slice, window: int | None, rules: Rules) -> Tensor:
        """Return bool [batch or 1, queries of the part, keys]: True where a query attends to a key."""
        queries = self.queries[:, part].unsqueeze(2)
        places = self.keys[:, keys].unsqueeze(1)
        back = queries - places
        seen = visible(back, window)
        if rules.joint:
            together = self._joint(part, keys)
            seen = seen | (together if window is None else together & (back < window))
        if rules.chunk is not None:
            seen = seen & (queries // rules.chunk == places // rules.chunk)
        if self.documents is None:
            return seen
        return seen & _equal(self.documents, part, keys)

    def _joint(self, part: slice, keys: slice) -> Tensor:
        """Return bool [batch, queries of the part, keys]: True for tokens with the same number."""
        assert self.joint is not None
        is_joint = self.joint[0][:, part] >= 0
        return _equal(self.joint, part, keys) & is_joint.unsqueeze(2)


def _equal(numbers: tuple[Tensor, Tensor], part: slice, keys: slice) -> Tensor:
    """Return bool [batch, queries of the part, keys]: True for equal numbers. numbers: of all queries and of all keys."""
    of_queries, of_keys = numbers
    return of_queries[:, part].unsqueeze(2) == of_keys[:, keys].unsqueeze(1)


def visibility(run: Pass, keys: int) -> Visibility:
    """Return the visibility of keys, in the order of all_keys. It is made once for all layers."""
    if keys not in run.visibility:
        run.visibility[keys] = _visibility(run, keys)
    found: Visibility = run.visibility[keys]
    return found


def _visibility(run: Pass, keys: int) -> Visibility:
    queries = run.positions.t()
    if run.cache is not None:
        places = torch.arange(keys, device=queries.device).view(1, -1)
        joint = None if run.joint is None else (run.joint, _in_cache(run.joint, queries, keys))
        return Visibility(queries, places, None, in_order=False, joint=joint)
    context = run.context
    places = queries if context is None else context.whole(run.positions, 0).t()

    def both(of_keys: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return numbers of this rank's queries and of all keys."""
        if of_keys is None:
            return None
        return of_keys if context is None else context.own_part(of_keys, 1), of_keys

    in_order = run.in_order and context is None
    return Visibility(queries, places, both(run.documents), in_order, joint=both(run.joint))


def _in_cache(joint: Tensor, queries: Tensor, keys: int) -> Tensor:
    """Return int64 [batch, keys]: the numbers of all keys in a cache. Earlier ones are joint with no new token.

    joint: see Microbatch. queries: int64 [batch or 1, queries], their places.
    """
    nowhere = torch.full((len(joint), keys), -1, device=joint.device)
    return nowhere.scatter(1, queries.expand_as(joint), joint)


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
    seen = Scope(visibility(run, len(k)), rules, window)
    if largest is not None:
        _raise(largest, q, k, seen, scale)
    made = []
    for part in _parts(len(q)):
        keys = seen.reach(part)
        arguments = q[part], k[keys], v[keys], seen, part, scale, dropout
        if torch.is_grad_enabled() and len(q) > BLOCK:
            made.append(checkpoint(_weighted_sum, *arguments, use_reentrant=False))
        else:
            made.append(_weighted_sum(*arguments))
    return torch.cat(made)


def _parts(queries: int) -> Iterator[slice]:
    """Yield blocks of queries."""
    for start in range(0, queries, BLOCK):
        yield slice(start, min(start + BLOCK, queries))


class Scope(NamedTuple):
    """The keys that queries attend to, by all rules. Masks exist for BLOCK queries at a time."""

    seen: Visibility
    rules: Rules
    window: int | None

    def reach(self, part: slice) -> slice:
        """See Visibility.reach."""
        return self.seen.reach(part, self.window, self.rules)

    def hidden(self, part: slice) -> Tensor:
        """Return bool [batch or 1, 1, 1, queries of the part, keys in reach]: True where a query ignores a key."""
        keys = self.reach(part)
        allowed = self.seen.block(part, keys, self.window, self.rules)
        if self.rules.chosen is not None:
            allowed = allowed & self._selected(self.rules.chosen[part])[..., keys]
        return ~allowed[:, None, None]

    def distances(self, part: slice) -> Tensor:
        """Return int64 [batch or 1, 1, 1, queries of the part, keys in reach]: the query's position minus the key's."""
        places = self.seen.keys[:, self.reach(part)].unsqueeze(1)
        return (self.seen.queries[:, part].unsqueeze(2) - places)[:, None, None]

    def _selected(self, chosen: Tensor) -> Tensor:
        """Return bool [batch, queries, all keys]. chosen [queries, batch, any]."""
        of_rows = chosen.transpose(0, 1)
        shape = *of_rows.shape[:2], self.seen.keys.shape[1]
        selected = torch.zeros(shape, dtype=torch.bool, device=chosen.device)
        return selected.scatter_(2, of_rows, True)


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
    scope: Scope,
    part: slice,
    scale: float,
    dropout: float,
) -> Tensor:
    """Return [queries, batch, heads, width of v]. q: the queries of a part; k, v: the keys in their reach.

    The mask is made here, so that it is made again in the backward pass and not kept.
    """
    scores = _changed(_scores(q, k, scale), scope, part)
    shown = scores.masked_fill(scope.hidden(part), -torch.inf)
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = shown.softmax(-1, wide).to(q.dtype)
    values = v.permute(1, 2, 0, 3).unsqueeze(2)
    mixed = F.dropout(weights, dropout) @ values
    return mixed.permute(3, 0, 1, 2, 4).flatten(2, 3)


def _changed(scores: Tensor, scope: Scope, part: slice) -> Tensor:
    """Cap the scores, and lower them by the distance of query and key, where the rules say so."""
    cap, slopes = scope.rules.cap, scope.rules.slopes
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if slopes is not None:
        of_heads = scope.seen.slopes(slopes, scores.dtype).view(*scores.shape[1:3], 1, 1)
        scores = scores - of_heads * scope.distances(part)
    return scores


@torch.no_grad()
def _raise(largest: Tensor, q: Tensor, k: Tensor, scope: Scope, scale: float) -> None:
    """Raise `largest` [heads] to the scores before the cap."""
    for part in _parts(len(q)):
        scores = _scores(q[part], k[scope.reach(part)], scale)
        shown = scores.masked_fill(scope.hidden(part), -torch.inf)
        torch.maximum(largest, shown.amax((0, 3, 4)).flatten().float(), out=largest)
