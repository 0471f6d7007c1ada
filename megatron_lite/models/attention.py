"""Causal attention: PyTorch's, or flash-attn where it is installed; one call a document where documents don't see each other."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import accumulate

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.errors import UsageError


class Documents:
    """For each sequence of a batch the lengths of its documents, which add up to the sequence.

    A class of its own so that torch.compile, which would compile anew for other numbers, never looks into it.
    """

    def __init__(self, lengths: tuple[tuple[int, ...], ...]) -> None:
        self.lengths = lengths


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    documents: Documents | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """q [sequence, batch, heads, head_dim], k and v [sequence, batch, kv_heads, head_dim] -> like q.

    Every kv head serves heads / kv_heads heads in a row. A token sees itself and what comes before it: of the last `window`
    tokens, of its own document.
    """
    call = flash if choose(backend, q) == "flash" else sdpa
    if documents is None:
        return call(q, k, v, window, dropout)
    attended: Tensor = _by_document(call, q, k, v, window, documents, dropout)
    return attended


Call = Callable[[Tensor, Tensor, Tensor, int | None, float], Tensor]


def choose(backend: str, q: Tensor) -> str:
    """`flash` or `sdpa`. Raises UsageError where flash was asked for and can't be had."""
    fits = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    if backend == "auto":
        return "flash" if fits and has_flash() else "sdpa"
    if backend == "flash" and not (fits and has_flash()):
        raise UsageError("flash attention needs the package flash-attn, a GPU, and bf16 or fp16; take --attention auto")
    return backend


@cache
def has_flash() -> bool:
    return find_spec("flash_attn") is not None


def sdpa(q: Tensor, k: Tensor, v: Tensor, window: int | None, dropout: float) -> Tensor:
    """PyTorch's scaled_dot_product_attention, with a mask only where a window is narrower than the sequence."""
    length = q.shape[0]
    mask = None if window is None or window >= length else window_mask(length, window, q.device)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped
    )
    return out.permute(2, 0, 1, 3)


@cache
def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """bool [length, length]: whether a row sees a column."""
    back = torch.arange(length, device=device).unsqueeze(1) - torch.arange(length, device=device)
    return (back >= 0) & (back < window)


def flash(q: Tensor, k: Tensor, v: Tensor, window: int | None, dropout: float) -> Tensor:
    """flash-attn's kernel; it counts a window without the token itself."""
    from flash_attn import flash_attn_func

    back = (-1, -1) if window is None else (window - 1, 0)
    batch_first = (x.transpose(0, 1) for x in (q, k, v))
    out: Tensor = flash_attn_func(*batch_first, dropout_p=dropout, causal=True, window_size=back, deterministic=True)
    return out.transpose(0, 1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_document(
    call: Call, q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Documents, dropout: float
) -> Tensor:
    """Quicker than one call with a block mask, and needs no kernel of its own."""
    rows = []
    for row, lengths in enumerate(documents.lengths):
        ends = list(accumulate(lengths))
        pieces = []
        for start, end in zip([0, *ends], ends, strict=False):
            part = slice(start, end), slice(row, row + 1)
            pieces.append(call(q[part], k[part], v[part], window, dropout))
        rows.append(torch.cat(pieces))
    return torch.cat(rows, 1)
