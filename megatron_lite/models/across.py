"""Attention to keys of other ranks: block by block, put together by the logarithms of the sums of exponentials.

With o, l of one block of keys (its output, log sum exp) and o', l' of another:  L = log(e^l + e^l'),  O = o e^(l-L) + o' e^(l'-L).
Given the final O and L, the backward pass of each block alone is exact. Blocks are small calls of PyTorch's own flash attention.
"""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.errors import UsageError
from megatron_lite.models.passes import Packed
from megatron_lite.models.scores import raise_to
from megatron_lite.parallel.context import ContextGroup, Gathering, Ring

WALKS: dict[str, type[Ring] | type[Gathering]] = {"p2p": Ring, "all_gather": Gathering}
"""How keys and values come here, by Megatron's words for it."""


class Block(NamedTuple):
    """Queries of this rank that see keys of one rank."""

    rows: slice
    """Of the batch."""
    queries: slice
    keys: slice
    """Places among the tokens of their ranks."""
    causal: bool
    """Queries and keys are the same tokens, and each sees itself and those before; else all see all."""
    ahead: int | None = None
    """Of a window that doesn't cover all of that: how many places the first query is ahead of the first key."""


def blocks_of(
    ranks: ContextGroup, source: int, half: int, packed: Packed | None, window: int | None = None
) -> Iterator[Block]:
    """What this rank's queries see of the keys of another, or of its own. half: tokens of one block of the cut."""
    everything = slice(None)
    if window is not None:
        blocks = (
            blocks_of(ranks, source, half, packed)
            if packed is not None
            else _of_document(ranks, source, half, everything, 0, 2 * ranks.size * half)
        )
        for block in blocks:
            seen = _within(block, ranks, source, half, window)
            if seen is not None:
                yield seen
    elif packed is not None:
        for row, lengths in enumerate(packed.lengths):
            ends = list(accumulate(lengths))
            for start, end in zip([0, *ends], ends, strict=False):
                yield from _of_document(ranks, source, half, slice(row, row + 1), start, end)
    elif source == ranks.rank:
        yield Block(everything, everything, everything, True)
    elif source < ranks.rank:
        yield Block(everything, everything, slice(0, half), False)
    else:
        yield Block(everything, slice(half, 2 * half), everything, False)


def _of_document(ranks: ContextGroup, source: int, half: int, rows: slice, start: int, end: int) -> Iterator[Block]:
    """Of the tokens [start, end) of some rows, which see nothing but each other."""
    for here, block in enumerate(ranks.blocks(ranks.rank)):
        for there, other in enumerate(ranks.blocks(source)):
            queries, keys = _part(block, here, half, start, end), _part(other, there, half, start, end)
            if other <= block and queries is not None and keys is not None:
                yield Block(rows, queries, keys, other == block)


def _within(block: Block, ranks: ContextGroup, source: int, half: int, window: int) -> Block | None:
    """What is left of a block that lies in one block of the cut on either side; every query that stays sees a key."""
    (first_q, last_q), (first_k, last_k) = (
        (ranks.position(rank, part.start, half), ranks.position(rank, part.stop - 1, half))
        for rank, part in ((ranks.rank, block.queries), (source, block.keys))
    )
    skipped = max(0, first_q - window + 1 - first_k)  # keys that are too old for all queries
    beyond = max(0, last_q - (last_k + window - 1))  # queries that are too late for all keys
    queries = slice(block.queries.start, block.queries.stop - beyond)
    keys = slice(block.keys.start + skipped, block.keys.stop)
    if queries.start >= queries.stop or keys.start >= keys.stop:
        return None
    first_k, last_q = first_k + skipped, last_q - beyond
    covered = last_q - first_k < window
    return Block(block.rows, queries, keys, block.causal, None if covered else first_q - first_k)


def _part(block: int, place: int, half: int, start: int, end: int) -> slice | None:
    """Where tokens [start, end) are that lie in a block of the cut, which a rank has at this of its two places."""
    first, last = max(start, block * half), min(end, (block + 1) * half)
    shift = (place - block) * half
    return slice(first + shift, last + shift) if first < last else None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_across(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: ContextGroup,
    packed: Packed | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    largest: Tensor | None = None,
) -> Tensor:
    """As attention.attend has them, of this rank's tokens -> like q, of v's width. ranks.how is a word of WALKS."""
    width = v.shape[-1]
    if width < k.shape[-1]:
        v = F.pad(v, (0, k.shape[-1] - width))  # so that keys and values travel as one
    out: Tensor = _Across.apply(q, k, v, sinks, scale, ranks, packed, window, largest)  # type: ignore[no-untyped-call]
    return out[..., :width]


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scale: float | None,
        ranks: ContextGroup,
        packed: Packed | None,
        window: int | None,
        largest: Tensor | None,
    ) -> Tensor:
        keys_values = torch.stack((k, v))
        length, batch, heads, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        logs = torch.full((length, batch, heads), -torch.inf, dtype=wide, device=q.device)
        for source, (keys, values) in WALKS[ranks.how](keys_values, ranks).walk():
            for rows, of_q, of_k, causal, ahead in blocks_of(ranks, source, length // 2, packed, window):
                seen = None if ahead is None or window is None else (ahead, window)
                part, log = _attended(q[of_q, rows], keys[of_k, rows], values[of_k, rows], scale, seen, causal=causal)
                _merge(out[of_q, rows], logs[of_q, rows], part, log)
                if largest is not None:
                    raise_to(
                        largest, q[of_q, rows], keys[of_k, rows], scale, (0, None) if causal and seen is None else seen
                    )
        if sinks is not None:  # a key of value 0
            _merge(out, logs, torch.zeros_like(out), sinks.expand_as(logs))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, keys_values, out, logs, sinks)
        ctx.scale, ctx.ranks, ctx.packed, ctx.window = scale, ranks, packed, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, keys_values, out, logs, sinks = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=torch.float32)
        walk = WALKS[ctx.ranks.how](keys_values, ctx.ranks)
        for source, (keys, values), (dk, dv) in walk.walk_back():
            for rows, of_q, of_k, causal, ahead in blocks_of(ctx.ranks, source, len(q) // 2, ctx.packed, ctx.window):
                at_q, at_k, seen = (of_q, rows), (of_k, rows), None if ahead is None else (ahead, ctx.window)
                back = partial(
                    _gradients, grad[at_q], q[at_q], keys[at_k], values[at_k], out[at_q], logs[at_q], ctx.scale, seen
                )
                for whole, part in zip((dq[at_q], dk[at_k], dv[at_k]), back(causal=causal), strict=True):
                    whole += part
        dk, dv = walk.gradient.to(q.dtype)
        dsinks = None if sinks is None else _gradient_of_sinks(sinks, logs, grad, out)
        return dq.to(q.dtype), dk, dv, dsinks, None, None, None, None, None


def _gradient_of_sinks(sinks: Tensor, logs: Tensor, grad: Tensor, out: Tensor) -> Tensor:
    """Of a score that takes its part of the softmax and gives nothing for it."""
    along = (grad.to(logs.dtype) * out).sum(-1)
    return -((sinks - logs).exp() * along).sum((0, 1)).to(sinks.dtype)


def _merge(out: Tensor, logs: Tensor, part: Tensor, log: Tensor) -> None:
    """In place."""
    both = torch.logaddexp(logs, log)
    out.mul_((logs - both).exp_().unsqueeze(-1)).add_(part * (log - both).exp_().unsqueeze(-1))
    logs.copy_(both)


def _heads_first(x: Tensor) -> Tensor:
    """[length, batch, heads, ...] -> [batch, heads, length, ...], and back with _length_first."""
    return x.movedim(0, 2)


def _length_first(x: Tensor) -> Tensor:
    return x.movedim(2, 0)


Seen = tuple[int, int] | None
"""(places that the first query is ahead of the first key, window); None: all, or where it is causal all up to itself."""


def _visible(q: Tensor, k: Tensor, seen: Seen) -> Tensor | None:
    """Of q's dtype [queries, keys]: 0 where a query sees a key, else -inf."""
    if seen is None:
        return None
    ahead, window = seen
    back = torch.arange(len(q), device=q.device).unsqueeze(1) + ahead - torch.arange(len(k), device=q.device)
    hidden = (back < 0) | (back >= window)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)


def _window_size(q: Tensor, k: Tensor, seen: Seen) -> dict[str, int]:
    """As flash attention's kernels count, from the last query and the last key."""
    if seen is None:
        return {}
    ahead, window = seen
    shift = len(k) - len(q)
    return {"window_size_left": window - 1 - ahead + shift, "window_size_right": ahead - shift}


def _attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, seen: Seen = None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """(output [length, batch, heads, width], log sum exp [length, batch, heads]) of one block."""
    causal = causal and seen is None
    if q.is_cuda:
        _check_dtype(q)
        batch_first = (x.transpose(0, 1) for x in (q, k, v))
        out, logs, *_ = torch.ops.aten._flash_attention_forward(
            *batch_first, None, None, len(q), len(k), 0.0, causal, False, scale=scale, **_window_size(q, k, seen)
        )
        return out.transpose(0, 1), _length_first(logs)
    out, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(_heads_first, (q, k, v)), 0.0, causal, attn_mask=_visible(q, k, seen), scale=scale
    )
    return _length_first(out), _length_first(logs)


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    scale: float | None,
    seen: Seen = None,
    *,
    causal: bool,
) -> tuple[Tensor, ...]:
    """Of q, k, v of one block, given what all blocks together made."""
    causal = causal and seen is None
    if q.is_cuda:
        tensors = [x.transpose(0, 1).contiguous() for x in (grad, q, k, v, out)]
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
        found = torch.ops.aten._flash_attention_backward(
            *tensors,
            _heads_first(logs).contiguous(),
            None,
            None,
            len(q),
            len(k),
            0.0,
            causal,
            state,
            state,
            scale=scale,
            **_window_size(q, k, seen),
        )
        return tuple(x.transpose(0, 1) for x in found)
    tensors = [_heads_first(x) for x in (grad, q, k, v, out)]
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, _heads_first(logs).contiguous(), 0.0, causal, attn_mask=_visible(q, k, seen), scale=scale
    )
    return tuple(map(_length_first, found))


def _check_dtype(q: Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise UsageError(
            "context parallelism by p2p or all_gather needs --bf16 or --fp16 on a GPU; else take --cp-comm-type a2a"
        )
