"""Attention by PyTorch, or by FlashAttention if it is installed. Documents of a packed row don't attend to each other."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaconv.errors import UsageError
from megatron_lite.models.across import attend_across
from megatron_lite.models.flash import MULTIPLE, WIDEST, Kernel, kernel_for
from megatron_lite.models.masks import block_mask, causal_mask, narrow_mask
from megatron_lite.models.passes import Packed, Pass
from megatron_lite.models.scored_attention import Rules, attend_by_scores
from megatron_lite.models.scores import raise_by_rows
from megatron_lite.parallel.context import ContextGroup, heads_for_tokens, tokens_for_heads
from megatron_lite.products.processor import lacks_bf16

KERNELS = {
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    "fused": (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    "unfused": (SDPBackend.MATH,),
    "local": (SDPBackend.MATH,),
}
"""Values of --attention-backend -> PyTorch's kernels, in order. The second one computes what the first one refuses: masks.

Plain products compute what neither takes, such as float32 with fewer key heads than heads.

With `auto`, PyTorch chooses. On Hopper and Blackwell it prefers cuDNN.
"""
QUERIES = 512
"""Queries of a block: longer windows and sinks are computed block by block, so that masks have this many rows."""
FEW_QUERIES = 8
"""Most queries for which a conversion of bf16 keys and values to float32 pays in inference: those of generation."""
MOST_IN_FLOAT32 = 1 << 24
"""Most numbers of keys that are converted from bf16 to float32 for one call: 64 MB for the keys, and as many for the values.

Without instructions for bf16, a query of 16 heads and 1000 keys takes 0.4 ms instead of 2.8 ms (Zen 3, one thread).
"""
LONG = 2 * QUERIES
"""Tokens from which on blocks pay: below, one call with a mask is faster."""


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
    rules: Rules | None = None,
) -> Tensor:
    """Return causal attention: shape of q, with v's width.

    q [sequence, batch, heads, width], k [keys, batch, kv_heads, width], v [keys, batch, kv_heads, v's width]. Every kv
    head serves heads / kv_heads consecutive heads.

    A token attends to itself and earlier tokens: within the last `window` tokens, and within its document. If the pass
    has `visible`, a token attends to all visible tokens, earlier and later. If there are more keys than queries, the
    keys are a cache, and key j has position j.

    scale: of scores; None: one over the square root of q's width.
    sinks [heads]: one more score for every query of a head, without a value.
    largest: float32 [heads], raised to the largest scores of the keys that this rank computes. Only for decoders
    without a cache.
    rules: None if a kernel can compute the scores. Only without sinks.
    backend: the value of --attention-backend.
    """
    with _kernels(backend, q):
        how: Any = {"window": window, "dropout": dropout, "scale": scale, "sinks": sinks}
        made: Tensor = _attend(q, k, v, run, backend=backend, largest=largest, rules=rules, **how)
        return made


def _kernels(backend: str, q: Tensor) -> AbstractContextManager[None]:
    """Return the region in which PyTorch takes the kernels of --attention-backend. A CPU has one fused kernel."""
    if backend == "auto" or not (q.is_cuda or backend in ("unfused", "local")):
        return nullcontext()
    region: AbstractContextManager[None] = sdpa_kernel(list(KERNELS[backend]), set_priority=True)
    return region


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: Pass,
    *,
    window: int | None,
    dropout: float,
    backend: str,
    scale: float | None,
    sinks: Tensor | None,
    largest: Tensor | None,
    rules: Rules | None,
) -> Tensor:
    """See attend."""
    if rules is not None:
        assert sinks is None, "no family has sinks and such rules"
        scored: Tensor = attend_by_scores(
            q, k, v, run, rules, window=window, dropout=dropout, scale=scale, largest=largest
        )
        return scored
    if run.visible is not None:
        return sdpa(q, k, v, run.visible[:, None, None, :], dropout, scale, sinks)
    if run.context is not None:
        return _with_others(
            q, k, v, run.context, run, window, dropout, backend, scale, sinks, largest
        )
    if largest is not None:
        raise_by_rows(largest, q, k, run.packed, window, scale)
    if len(k) != len(q):
        return sdpa(q, k, v, run.seen(len(k), window), dropout, scale, sinks)
    kernel = choose(backend, q, v, dropout) if sinks is None else None
    if run.packed is not None:
        fused = backend not in ("unfused", "local")
        packed: Tensor = _packed(
            kernel, q, k, v, run.packed, window, dropout, scale, sinks, fused=fused
        )
        return packed
    if kernel is not None:
        return kernel.attend(q, k, v, window, dropout, scale)
    return causal(q, k, v, window, dropout, scale, sinks)


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    dropout: float,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention of whole sequences by PyTorch. The arguments are those of attend.

    A window or sinks need a mask. Long sequences are computed in blocks of queries, with the keys that a block sees. So
    no mask of all queries and all keys exists, and keys before a window cost nothing.
    """
    length = len(q)
    masked = sinks is not None or (window is not None and window < length)
    if not masked or length <= LONG:
        mask = narrow_mask(length, window, q.device)
        return sdpa(q, k, v, mask, dropout, scale, sinks)
    made = []
    for start in range(0, length, QUERIES):
        end = min(start + QUERIES, length)
        queries = slice(start, end)
        keys = slice(_first_key(start, window), end)
        mask = _mask_of(queries, keys, window, q.device)
        block = sdpa(q[queries], k[keys], v[keys], mask, dropout, scale, sinks)
        made.append(block)
    return torch.cat(made)


def _first_key(query: int, window: int | None) -> int:
    """Return the first key that a query attends to."""
    return 0 if window is None else max(0, query - window + 1)


def _mask_of(queries: slice, keys: slice, window: int | None, device: torch.device) -> Tensor:
    """Return bool [queries, keys] for a block. Query i and key i have position i."""
    rows = queries.stop - queries.start
    columns = keys.stop - keys.start
    ahead = queries.start - keys.start
    return block_mask(rows, columns, ahead, window, device)


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
    """Attention over the context-parallel ranks. Dropout requires a2a; sizes.py refuses it with other methods."""
    near, far = ranks.over_heads, ranks.over_blocks
    if near is not None:
        q, k, v = (heads_for_tokens(x, near) for x in (q, k, v))
        sinks, largest = (
            None if x is None else x.chunk(near.size)[near.rank] for x in (sinks, largest)
        )
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
    of_heads = attend(q, k, v, replace(run, context=None), **how)
    return tokens_for_heads(of_heads, near)


def choose(backend: str, q: Tensor, v: Tensor, dropout: float) -> Kernel | None:
    """Return FlashAttention's kernel, or None for PyTorch's. Raises UsageError if flash can't compute these tensors."""
    if backend not in ("auto", "flash"):
        return None
    if backend == "flash" and q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        raise UsageError(
            "--attention-backend flash needs --bf16 or --fp16 on a GPU; else take --attention-backend auto"
        )
    return _flash_kernel(q, v, dropout)


def _flash_kernel(q: Tensor, v: Tensor, dropout: float) -> Kernel | None:
    same_width = q.shape[-1] == v.shape[-1]
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or not same_width:
        return None
    kernel: Kernel | None = kernel_for(q.device, width=q.shape[-1], dropout=dropout > 0)
    return kernel


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """PyTorch's scaled_dot_product_attention. mask: bool [..., queries, keys], True where a query attends to a key.

    None: each query attends to keys up to itself, or to all keys if there are more keys than queries.
    """
    width, keys_width = v.shape[-1], q.shape[-1]
    if width < keys_width:  # with unequal widths only the kernel that keeps all scores is available
        v = F.pad(v, (0, keys_width - width))
    if sinks is not None:
        scale = scale or keys_width**-0.5
        mask = causal_mask(len(q), len(k), q.device) if mask is None else mask
        # Every query attends to the sink, which becomes key 0.
        mask = F.pad(mask, (1, 0), value=True)
        # The kernel multiplies scores by scale, so divide the sink's score by it.
        q, k, v = with_sink(q, k, v, sinks / scale)
    causal = mask is None and len(q) == len(k)
    grouped = q.shape[2] != k.shape[2]
    if grouped and mask is not None and q.is_cuda:
        # With a mask, torch's own kernels for a GPU need as many key heads as heads.
        each = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(each, 2), v.repeat_interleave(each, 2)
        grouped = False
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    dtype = q.dtype
    if _is_quicker_in_float32(q, k):
        q, k, v = q.float(), k.float(), v.float()
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=grouped,
    )
    return out.to(dtype).permute(2, 0, 1, 3)[..., :width]


def _is_quicker_in_float32(q: Tensor, k: Tensor) -> bool:
    """Return whether bf16 attention is computed in float32: in inference, on a processor without bf16."""
    # Compiled code can't query inference mode.
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return False
    is_small = q.shape[-2] <= FEW_QUERIES and k.numel() <= MOST_IN_FLOAT32
    return is_small and q.dtype == torch.bfloat16 and lacks_bf16(q.device.type)


def with_sink(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Prepend a key with value 0 whose product with q is `scores` [heads]: a softmax with a sink for any kernel.

    Each head gets one more element for this product, and zeros up to the next multiple of 8, which GPU kernels require.
    """
    # One element for the sink's score, and zeros up to a multiple of 8.
    more = 8 - q.shape[-1] % 8
    # Queries contain the score and the sink's key a 1, so that their product is the score.
    tokens, batch, heads, _ = q.shape
    _, _, key_heads, width = k.shape
    of_heads = F.pad(scores.to(q.dtype)[:, None], (0, more - 1))
    queries = torch.cat((q, of_heads.expand(tokens, batch, heads, -1)), -1)
    sink = F.pad(k.new_ones(1), (width, more - 1)).expand(1, batch, key_heads, -1)
    keys = torch.cat((sink, F.pad(k, (0, more))))
    # The sink's value is 0, and values are as wide as keys.
    values = F.pad(v, (0, keys.shape[-1] - v.shape[-1], 0, 0, 0, 0, 1, 0))
    return queries, keys, values


def _back(window: int | None) -> tuple[int, int]:
    """Return the window as torch's kernel defines it: without the token itself, and with no later tokens."""
    return (-1 if window is None else window - 1, 0)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _packed(
    kernel: Kernel | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    window: int | None,
    dropout: float,
    scale: float | None,
    sinks: Tensor | None,
    *,
    fused: bool,
) -> Tensor:
    """Attention of packed rows: one kernel for all documents if available, else one call for each document.

    fused: whether PyTorch's kernel for packed documents may be used. Separate calls are faster than one call with a block mask.
    """
    if kernel is not None:
        queries, keys, values = map(_row_after_row, (q, k, v))
        made = kernel.attend_packed(queries, keys, values, packed, window, dropout, scale)
        return _rows_again(made, q)
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    is_plain = q.shape[-1] == v.shape[-1] and sinks is None and not dropout
    fits_kernel = q.shape[-1] <= WIDEST and q.shape[-1] % MULTIPLE == 0
    if fused and q.is_cuda and is_half and is_plain and fits_kernel and has_varlen():
        return _varlen_packed(q, k, v, packed, window, scale)
    rows = []
    for documents in packed.rows():
        pieces = []
        for document in documents:
            part = document.place
            attended = causal(q[part], k[part], v[part], window, dropout, scale, sinks)
            pieces.append(attended)
        row = torch.cat(pieces)
        rows.append(row)
    return torch.cat(rows, 1)


@cache
def has_varlen() -> bool:
    """Return whether this torch has a kernel for packed documents with windows."""
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return {"window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def _row_after_row(x: Tensor) -> Tensor:
    """[sequence, batch, ...] -> [batch * sequence, ...]."""
    return x.transpose(0, 1).flatten(0, 1)


def _rows_again(x: Tensor, like: Tensor) -> Tensor:
    """[batch * sequence, ...] -> [sequence, batch, ...]: the inverse of _row_after_row."""
    return x.view(like.shape[1], like.shape[0], *x.shape[1:]).transpose(0, 1)


def _varlen_packed(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: int | None, scale: float | None
) -> Tensor:
    from torch.nn.attention import varlen

    attention: Any = varlen.varlen_attn  # its parameters differ between versions of torch
    ends, longest, grouped = packed.cu_seqlens, packed.longest, q.shape[2] != k.shape[2]
    flat = map(_row_after_row, (q, k, v))
    how: Any = {"window_size": _back(window), "enable_gqa": grouped, "scale": scale}
    out: Tensor = attention(*flat, ends, ends, longest, longest, **how)
    return _rows_again(out, q)
