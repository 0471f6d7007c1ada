"""Attention to keys of other ranks, block by block. The blocks' outputs are combined by their log-sum-exp.

Let o, l be the output and the log-sum-exp of one block of keys, and o', l' those of another block. Then

    L = log(e^l + e^l'),    O = o e^(l-L) + o' e^(l'-L)

With the final O and L, the backward pass of each single block is exact. Each block is a small call of PyTorch's flash
attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.errors import UsageError
from megatron_lite.models.flash import MULTIPLE, WIDEST
from megatron_lite.models.masks import block_mask
from megatron_lite.models.passes import Packed
from megatron_lite.models.scores import raise_to
from megatron_lite.parallel.context import ContextGroup, Gathering, Ring

WALKS: dict[str, type[Ring] | type[Gathering]] = {"p2p": Ring, "all_gather": Gathering}
"""The methods to get keys and values of other ranks, by Megatron's names."""


Seen = tuple[int, int] | None
"""(first query's position minus the first key's, window), or None for a block without a window."""


class Block(NamedTuple):
    """A range of this rank's queries and the range of one rank's keys that they attend to."""

    rows: slice
    """Rows of the batch."""
    queries: slice
    keys: slice
    """Indices among the tokens that the ranks hold."""
    causal: bool
    """True: queries and keys are the same tokens, and each query attends to itself and earlier keys. False: to all keys."""
    ahead: int | None = None
    """Set if a sliding window hides some of these keys: the first query's position minus the first key's."""

    def queries_of(self, x: Tensor) -> Tensor:
        """Return the view of x [tokens, batch, ...] with this block's queries."""
        return x[self.queries, self.rows]

    def keys_of(self, x: Tensor) -> Tensor:
        """Return the view of x [tokens, batch, ...] with this block's keys."""
        return x[self.keys, self.rows]

    def seen(self, window: int | None) -> Seen:
        return None if self.ahead is None or window is None else (self.ahead, window)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The ranks that attend to each other's keys, and the options of their attention."""

    ranks: ContextGroup
    """ranks.how is a key of WALKS."""
    packed: Packed | None
    scale: float | None
    window: int | None

    def walk(self, keys_values: Tensor) -> Ring | Gathering:
        return WALKS[self.ranks.how](keys_values, self.ranks)

    def blocks(self, source: int, tokens: int) -> Iterator[Block]:
        """Yield the blocks with the keys of rank `source`. tokens: of each rank."""
        return blocks_of(self.ranks, source, tokens // 2, self.packed, self.window)


def blocks_of(
    ranks: ContextGroup, source: int, half: int, packed: Packed | None, window: int | None = None
) -> Iterator[Block]:
    """Yield the blocks of this rank's queries and the keys of rank `source`. half: tokens of one of the 2n sequence blocks."""
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
        for document in packed.documents():
            _, rows = document.place
            yield from _of_document(ranks, source, half, rows, document.start, document.end)
    elif source == ranks.rank:
        yield Block(everything, everything, everything, True)
    elif source < ranks.rank:
        yield Block(everything, everything, slice(0, half), False)
    else:
        yield Block(everything, slice(half, 2 * half), everything, False)


def _of_document(
    ranks: ContextGroup, source: int, half: int, rows: slice, start: int, end: int
) -> Iterator[Block]:
    """Yield the blocks for the document of tokens [start, end) of some rows. Documents don't attend to each other."""
    for here, block in enumerate(ranks.blocks(ranks.rank)):
        for there, other in enumerate(ranks.blocks(source)):
            queries = _part(block, here, half, start, end)
            keys = _part(other, there, half, start, end)
            if other <= block and queries is not None and keys is not None:
                yield Block(rows, queries, keys, other == block)


def _within(block: Block, ranks: ContextGroup, source: int, half: int, window: int) -> Block | None:
    """Return the part of a block inside the window, or None. Every remaining query attends to at least one key.

    The block lies within one sequence block on either side.
    """
    first_q, last_q = _positions(block.queries, ranks, ranks.rank, half)
    first_k, last_k = _positions(block.keys, ranks, source, half)
    # Keys before the window of all queries.
    skipped = max(0, first_q - window + 1 - first_k)
    # Queries whose window is after all keys.
    beyond = max(0, last_q - window + 1 - last_k)
    queries = slice(block.queries.start, block.queries.stop - beyond)
    keys = slice(block.keys.start + skipped, block.keys.stop)
    if queries.start >= queries.stop or keys.start >= keys.stop:
        return None
    first_k += skipped
    last_q -= beyond
    covered = last_q - first_k < window
    ahead = None if covered else first_q - first_k
    return block._replace(queries=queries, keys=keys, ahead=ahead)


def _positions(part: slice, ranks: ContextGroup, rank: int, half: int) -> tuple[int, int]:
    """Return the positions in the sequence of the first and the last token of a rank's slice."""
    return ranks.position(rank, part.start, half), ranks.position(rank, part.stop - 1, half)


def _part(block: int, place: int, half: int, start: int, end: int) -> slice | None:
    """Return the indices on a rank of the tokens [start, end) in a sequence block, or None.

    block: the sequence block; the rank holds it at `place`, 0 or 1.
    """
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
    """Return attention's output for this rank's tokens: shape of q, with v's width.

    The arguments are those of attention.attend. ranks.how is a key of WALKS.
    """
    width = v.shape[-1]
    if q.is_cuda:
        scale = scale or q.shape[-1] ** -0.5
        # The kernel needs a multiple of 8 elements in each head.
        q, k = (F.pad(x, (0, -x.shape[-1] % MULTIPLE)) for x in (q, k))
    if width < k.shape[-1]:
        # Keys and values get one width, so that they are sent as one tensor.
        v = F.pad(v, (0, k.shape[-1] - width))
    exchange = Exchange(ranks=ranks, packed=packed, scale=scale, window=window)
    out: Tensor = _Across.apply(q, k, v, sinks, exchange, largest)  # type: ignore[no-untyped-call]
    return out[..., :width]


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        exchange: Exchange,
        largest: Tensor | None,
    ) -> Tensor:
        scale = exchange.scale
        keys_values = torch.stack((k, v))
        out, logs = _nothing_yet(q)
        walk = exchange.walk(keys_values)
        for source, (keys, values) in walk.walk():
            for block in exchange.blocks(source, len(q)):
                queries = block.queries_of(q)
                own_keys = block.keys_of(keys)
                own_values = block.keys_of(values)
                seen = block.seen(exchange.window)
                part, log = _attended(
                    queries, own_keys, own_values, scale, seen, causal=block.causal
                )
                _merge(block.queries_of(out), block.queries_of(logs), part, log)
                if largest is not None:
                    causal = (0, None) if block.causal else None
                    visible = causal if seen is None else seen
                    raise_to(largest, queries, own_keys, scale, visible)
        if sinks is not None:  # a sink is a key with value 0
            _merge(out, logs, torch.zeros_like(out), sinks.expand_as(logs))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, keys_values, out, logs, sinks)
        ctx.exchange = exchange
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, keys_values, out, logs, sinks = ctx.saved_tensors
        exchange: Exchange = ctx.exchange
        dq = torch.zeros_like(q, dtype=torch.float32)
        walk = exchange.walk(keys_values)
        for source, (keys, values), (dk, dv) in walk.walk_back():
            for block in exchange.blocks(source, len(q)):
                queries_of, keys_of = block.queries_of, block.keys_of
                more_q, more_k, more_v = _gradients(
                    queries_of(grad),
                    queries_of(q),
                    keys_of(keys),
                    keys_of(values),
                    queries_of(out),
                    queries_of(logs),
                    exchange.scale,
                    block.seen(exchange.window),
                    causal=block.causal,
                )
                queries_of(dq).add_(more_q)
                keys_of(dk).add_(more_k)
                keys_of(dv).add_(more_v)
        dk, dv = walk.gradient.to(q.dtype)
        dsinks = None
        if sinks is not None:
            dsinks = _gradient_of_sinks(sinks, logs, grad, out)
        return dq.to(q.dtype), dk, dv, dsinks, None, None


def _nothing_yet(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp [length, batch, heads] before the first block, in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=wide, device=q.device)
    return out, torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)


def _gradient_of_sinks(sinks: Tensor, logs: Tensor, grad: Tensor, out: Tensor) -> Tensor:
    """Return the gradient of sinks: scores that take a part of the softmax and contribute no value."""
    along = (grad.to(logs.dtype) * out).sum(-1)
    return -((sinks - logs).exp() * along).sum((0, 1)).to(sinks.dtype)


def _merge(out: Tensor, logs: Tensor, part: Tensor, log: Tensor) -> None:
    """Merge the output and log-sum-exp of a block into `out` and `logs`, in place."""
    both = torch.logaddexp(logs, log)
    out.mul_((logs - both).exp_().unsqueeze(-1)).add_(part * (log - both).exp_().unsqueeze(-1))
    logs.copy_(both)


def _heads_first(x: Tensor) -> Tensor:
    """[length, batch, heads, ...] -> [batch, heads, length, ...]; the inverse is _length_first."""
    return x.movedim(0, 2)


def _length_first(x: Tensor) -> Tensor:
    return x.movedim(2, 0)


def _visible(q: Tensor, k: Tensor, seen: Seen) -> Tensor | None:
    """Return [queries, keys] of q's dtype: 0 where a query attends to a key, else -inf."""
    if seen is None:
        return None
    ahead, window = seen
    hidden = ~block_mask(len(q), len(k), ahead, window, q.device)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(
        hidden, -torch.inf
    )


def _window_size(q: Tensor, k: Tensor, seen: Seen) -> dict[str, int]:
    """Return the window as flash attention's kernels define it: relative to the last query and the last key."""
    if seen is None:
        return {}
    ahead, window = seen
    shift = len(k) - len(q)
    return {"window_size_left": window - 1 - ahead + shift, "window_size_right": ahead - shift}


def _attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, seen: Seen = None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return (output [length, batch, heads, width], log-sum-exp [length, batch, heads]) of one block."""
    causal = causal and seen is None
    if q.is_cuda:
        _check_kernel(q)
        batch_first = (x.transpose(0, 1) for x in (q, k, v))
        out, logs, *_ = torch.ops.aten._flash_attention_forward(
            *batch_first,
            None,
            None,
            len(q),
            len(k),
            0.0,
            causal,
            False,
            scale=scale,
            **_window_size(q, k, seen),
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
    """Return the gradients of q, k, v of one block. out, logs: the final values over all blocks."""
    causal = causal and seen is None
    if q.is_cuda:
        tensors = [x.transpose(0, 1).contiguous() for x in (grad, q, k, v, out)]
        # The kernel wants a state for dropout, although dropout is 0.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
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
        *tensors,
        _heads_first(logs).contiguous(),
        0.0,
        causal,
        attn_mask=_visible(q, k, seen),
        scale=scale,
    )
    return tuple(map(_length_first, found))


def _check_kernel(q: Tensor) -> None:
    """Raise UsageError for queries [length, batch, heads, width] that flash attention does not compute."""
    if q.shape[-1] > WIDEST:
        raise UsageError(
            f"context parallelism by p2p or all_gather takes heads of at most {WIDEST} elements on a GPU, "
            f"but these have {q.shape[-1]}; take --cp-comm-type a2a"
        )
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise UsageError(
            "context parallelism by p2p or all_gather needs --bf16 or --fp16 on a GPU; else take --cp-comm-type a2a"
        )
