"""Attention: PyTorch's, or flash-attn where it is installed; documents of a packed row don't see each other."""

import inspect
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.errors import UsageError
from megatron_lite.models.across import attend_across
from megatron_lite.models.passes import Packed, Pass
from megatron_lite.models.scores import raise_by_rows
from megatron_lite.parallel.context import ContextGroup, heads_for_tokens, tokens_for_heads


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: Pass,
    *,
    window: int | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    scale: float | None = None,
    sinks: Tensor | None = None,
    largest: Tensor | None = None,
) -> Tensor:
    """q [sequence, batch, heads, width], k [keys, batch, kv_heads, width], v [keys, batch, kv_heads, of v] -> like q, of v wide.

    Every kv head serves heads / kv_heads heads in a row. A token sees itself and what comes before it: of the last `window`
    tokens, of its own document. In a pass that says which tokens are visible it sees those, before and behind. Where there are
    more keys than queries they are a cache's: key j is that of position j.
    scale: of scores; None: one over the root of q's width. sinks [heads]: a score that every query of a head has beside those of keys.
    largest: float32 [heads], raised to the largest scores of keys that this rank computes; in passes of decoders without a cache.
    """
    if run.visible is not None:
        return sdpa(q, k, v, run.visible[:, None, None, :], dropout, scale, sinks)
    if run.context is not None:
        return _with_others(q, k, v, run.context, run, window, dropout, backend, scale, sinks, largest)
    if largest is not None:
        raise_by_rows(largest, q, k, run.packed, window, scale)
    if len(k) != len(q):
        return sdpa(q, k, v, run.seen(len(k), window), dropout, scale, sinks)
    kernel = choose(backend, q, v) if sinks is None else "sdpa"
    if run.packed is not None:
        packed: Tensor = _packed(kernel, q, k, v, run.packed, window, dropout, scale, sinks)
        return packed
    if kernel == "flash":
        return flash(q, k, v, window, dropout, scale)
    return sdpa(q, k, v, _narrow(len(q), window, q.device), dropout, scale, sinks)


def _with_others(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: ContextGroup,
    run: Pass,
    window: int | None,
    dropout: float,
    backend: str,
    scale: float | None,
    sinks: Tensor | None,
    largest: Tensor | None,
) -> Tensor:
    """Where other ranks have the other tokens. Dropout goes with a2a alone: sizes.py refuses it otherwise."""
    near, far = ranks.over_heads, ranks.over_blocks
    if near is not None:
        q, k, v = (heads_for_tokens(x, near) for x in (q, k, v))
        sinks, largest = (None if x is None else x.chunk(near.size)[near.rank] for x in (sinks, largest))
    if far is not None:
        across: Tensor = attend_across(q, k, v, far, run.packed, scale, sinks, window, largest)
        return across if near is None else tokens_for_heads(across, near)
    assert near is not None
    how: Any = {
        "window": window,
        "backend": backend,
        "scale": scale,
        "sinks": sinks,
        "largest": largest,
        "dropout": dropout,
    }
    return tokens_for_heads(attend(q, k, v, replace(run, context=None), **how), near)


def choose(backend: str, q: Tensor, v: Tensor) -> str:
    """`flash` or `sdpa`. Raises UsageError where flash was asked for and can't be had."""
    fits = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1]
    if backend == "auto":
        return "flash" if fits and has_flash() else "sdpa"
    if backend == "flash" and not (fits and has_flash()):
        raise UsageError("flash attention needs the package flash-attn, a GPU, and bf16 or fp16; take --attention auto")
    return backend


@cache
def has_flash() -> bool:
    return find_spec("flash_attn") is not None


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """PyTorch's scaled_dot_product_attention. mask: bool, what each query sees, [..., queries, keys].

    None: all up to itself, and where there are more keys than queries all of them.
    """
    width = v.shape[-1]
    if width < q.shape[-1]:  # else there is no kernel but the one that keeps all scores
        v = F.pad(v, (0, q.shape[-1] - width))
    if sinks is not None:
        scale = scale or q.shape[-1] ** -0.5
        mask = _causal(len(q), len(k), q.device) if mask is None else mask
        mask = F.pad(mask, (1, 0), value=True)
        q, k, v = with_sink(q, k, v, sinks / scale)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    grouped, causal = q.shape[1] != k.shape[1], mask is None and q.shape[2] == k.shape[2]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return out.permute(2, 0, 1, 3)[..., :width]


def with_sink(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With one more key in front, whose product with q is `scores` [heads] and whose value is 0: a softmax with a sink by any kernel.

    Heads get a further element for it, and zeros up to the next multiple of 8, which kernels on GPUs ask for.
    """
    more = 8 - q.shape[-1] % 8
    marks = F.pad(scores.to(q.dtype)[:, None], (0, more - 1)).expand(*q.shape[:3], -1)
    sink = F.pad(k.new_ones(1), (k.shape[-1], more - 1)).expand(1, *k.shape[1:3], -1)
    keys = torch.cat((sink, F.pad(k, (0, more))))
    return torch.cat((q, marks), -1), keys, F.pad(v, (0, keys.shape[-1] - v.shape[-1], 0, 0, 0, 0, 1, 0))


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [queries, keys]: what no mask at all means."""
    if queries < keys:
        return torch.ones(queries, keys, dtype=torch.bool, device=device)
    return window_mask(queries, queries, device)


def _narrow(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """None where a window is as wide as the sequence: a mask makes attention slower."""
    return None if window is None or window >= length else window_mask(length, window, device)


@cache
def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """bool [length, length]: whether a row sees a column."""
    back = torch.arange(length, device=device).unsqueeze(1) - torch.arange(length, device=device)
    return (back >= 0) & (back < window)


def flash(q: Tensor, k: Tensor, v: Tensor, window: int | None, dropout: float, scale: float | None) -> Tensor:
    """flash-attn's kernel."""
    from flash_attn import flash_attn_func

    batch_first = (x.transpose(0, 1) for x in (q, k, v))
    back = _back(window)
    out: Tensor = flash_attn_func(
        *batch_first, dropout_p=dropout, softmax_scale=scale, causal=True, window_size=back, deterministic=exact()
    )
    return out.transpose(0, 1)


def exact() -> bool:
    """Whether kernels have to give the same bits twice (--deterministic-mode); the backward pass of flash-attn is slower so."""
    return torch.are_deterministic_algorithms_enabled()


def _back(window: int | None) -> tuple[int, int]:
    """As flash-attn counts: without the token itself, and nothing after it."""
    return (-1 if window is None else window - 1, 0)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _packed(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    window: int | None,
    dropout: float,
    scale: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One kernel for all documents where there is one, else one call for each: quicker than one with a block mask."""
    if kernel == "flash":
        return _flash_packed(q, k, v, packed, window, dropout, scale)
    fits = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1] and sinks is None
    if fits and not dropout and has_varlen():
        return _varlen_packed(q, k, v, packed, window, scale)
    rows = []
    for row, lengths in enumerate(packed.lengths):
        ends = list(accumulate(lengths))
        pieces = []
        for start, end in zip([0, *ends], ends, strict=False):
            part = slice(start, end), slice(row, row + 1)
            mask = _narrow(end - start, window, q.device)
            pieces.append(sdpa(q[part], k[part], v[part], mask, dropout, scale, sinks))
        rows.append(torch.cat(pieces))
    return torch.cat(rows, 1)


@cache
def has_varlen() -> bool:
    """Whether this torch has its own kernel for documents, with windows."""
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return {"window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def _row_after_row(x: Tensor) -> Tensor:
    """[sequence, batch, ...] -> [batch * sequence, ...]."""
    return x.transpose(0, 1).flatten(0, 1)


def _rows_again(x: Tensor, like: Tensor) -> Tensor:
    """The other way."""
    return x.view(like.shape[1], like.shape[0], *x.shape[1:]).transpose(0, 1)


def _flash_packed(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: int | None, dropout: float, scale: float | None
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    ends, longest = packed.cu_seqlens, packed.longest
    out: Tensor = flash_attn_varlen_func(
        *map(_row_after_row, (q, k, v)), ends, ends, longest, longest, dropout_p=dropout, softmax_scale=scale, causal=True,
        window_size=_back(window), deterministic=exact(),
    )  # fmt: skip
    return _rows_again(out, q)


def _varlen_packed(q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: int | None, scale: float | None) -> Tensor:
    from torch.nn.attention import varlen

    attention: Any = varlen.varlen_attn  # whose parameters differ from one torch to the next
    ends, longest, grouped = packed.cu_seqlens, packed.longest, q.shape[2] != k.shape[2]
    flat = map(_row_after_row, (q, k, v))
    how: Any = {"window_size": _back(window), "enable_gqa": grouped, "scale": scale}
    out: Tensor = attention(*flat, ends, ends, longest, longest, **how)
    return _rows_again(out, q)
