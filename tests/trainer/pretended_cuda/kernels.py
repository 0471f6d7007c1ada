"""Kernels that exist only on a GPU: what they refuse, and what they compute, by plain operations on the CPU."""

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

ATEN = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
MULTIPLE_BYTES = 16
"""Grouped products read rows of which each begins at a multiple of this."""


class KernelRefused(RuntimeError):
    """A kernel does not support its arguments."""


def require(allowed: bool, message: str) -> None:
    """Raise KernelRefused unless allowed."""
    if not allowed:
        raise KernelRefused(message)


class Scores(NamedTuple):
    """The scaled scores of flash attention, and its operands with heads first, in float32."""

    scores: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    queries_per_key: int


def _mask(queries: int, keys: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    """Return bool [queries, keys]. Windows are relative to the last query and the last key; None and -1: no limit."""
    shift = keys - queries
    distance = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - shift
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
    if left is not None and left >= 0:
        seen &= distance >= -left
    if right is not None and right >= 0:
        seen &= distance <= right
    return seen


def _scores(q: Tensor, k: Tensor, v: Tensor, causal: bool, how: dict[str, Any]) -> Scores:
    require(q.dtype in HALF, f"flash attention takes fp16 and bf16, not {q.dtype}")
    width = q.shape[-1]
    require(width % 8 == 0 and width <= 256, f"flash attention refuses heads of {width}")
    contiguous = all(x.stride(-1) == 1 for x in (q, k, v))
    require(contiguous, "flash attention needs contiguous heads")
    times = q.shape[2] // k.shape[2]
    scale = how.get("scale") or width**-0.5
    wide = [x.repeat_interleave(times, 2) for x in (k, v)]
    q, k, v = (x.float().permute(0, 2, 1, 3) for x in (q, *wide))
    left, right = how.get("window_size_left"), how.get("window_size_right")
    seen = _mask(q.shape[2], k.shape[2], causal, left, right)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -math.inf)
    return Scores(scores, q, k, v, scale, times)


def _row_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, how: Any) -> list[Tensor]:
    """Return (output, log-sum-exp [batch, heads, length]) of whole rows."""
    found = _scores(q, k, v, causal, how)
    logs = found.scores.logsumexp(-1)
    weights = (found.scores - logs.clamp(min=-1e30).unsqueeze(-1)).exp()
    out = (weights @ found.v).permute(0, 2, 1, 3).to(q.dtype)
    return [out, logs]


def _row_backward(
    grad: Tensor, qkv: list[Tensor], out: Tensor, logs: Tensor, causal: bool, how: Any
) -> list[Tensor]:
    """Return the gradients of q, k, v of whole rows."""
    q, k, v = qkv
    found = _scores(q, k, v, causal, how)
    weights = (found.scores - logs.clamp(min=-1e30).unsqueeze(-1)).exp()
    grad_out = grad.float().permute(0, 2, 1, 3)
    grad_weights = grad_out @ found.v.mT
    along = (grad_out * out.float().permute(0, 2, 1, 3)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - along) * found.scale
    grad_q = grad_scores @ found.k
    grad_k = grad_scores.mT @ found.q
    grad_v = weights.mT @ grad_out
    # Sum over the query heads that share a key head.
    grad_k = grad_k.unflatten(1, (-1, found.queries_per_key)).sum(2)
    grad_v = grad_v.unflatten(1, (-1, found.queries_per_key)).sum(2)
    gradients = zip((grad_q, grad_k, grad_v), qkv, strict=True)
    return [x.permute(0, 2, 1, 3).to(like.dtype) for x, like in gradients]


def _documents(starts: Tensor) -> list[slice]:
    """Return the tokens of each document. starts: int32 [documents + 1]."""
    require(starts.dtype == torch.int32, "flash attention takes int32 starts")
    bounds = starts.tolist()
    return [slice(start, end) for start, end in pairwise(bounds)]


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **how: Any) -> tuple[Tensor, ...]:
    starts, _, _, _, dropout, causal, _ = rest
    require(not dropout, "the pretended kernel has no dropout")
    if starts is None:
        out, logs = _row_forward(q, k, v, causal, how)
    else:
        made = []
        for tokens in _documents(starts):
            row = [x[tokens].unsqueeze(0) for x in (q, k, v)]
            made.append(_row_forward(*row, causal, how))
        out = torch.cat([of_document.squeeze(0) for of_document, _ in made])
        logs = torch.cat([of_document.squeeze(0) for _, of_document in made], -1)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, logs, state, state.clone(), torch.empty(0)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, *rest: Any, **how: Any
) -> tuple[Tensor, ...]:
    starts, causal = rest[0], rest[5]
    if starts is None:
        return tuple(_row_backward(grad, [q, k, v], out, logs, causal, how))
    made = []
    for tokens in _documents(starts):
        of_out, *qkv, own = (x[tokens].unsqueeze(0) for x in (grad, q, k, v, out))
        own_logs = logs[:, tokens].unsqueeze(0)
        made.append(_row_backward(of_out, qkv, own, own_logs, causal, how))
    return tuple(torch.cat(parts, 1).squeeze(0) for parts in zip(*made, strict=True))


def fits_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    **_: Any,
) -> bool:
    """Return whether scaled_dot_product_attention would take flash attention. The pretended kernel has no dropout."""
    same_width = q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    return q.dtype in HALF and same_width and attn_mask is None and not dropout_p


def refuse_grouped_mask(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **how: Any
) -> None:
    """Raise KernelRefused for a mask with fewer key heads: torch's efficient attention has none, its flash attention no mask."""
    grouped = q.shape[1] != k.shape[1]
    require(attn_mask is None or not grouped, "with a mask, attention needs as many key heads")


def flash_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return scaled_dot_product_attention by one operation. q, k, v [batch, heads, length, width]."""
    require(enable_gqa or q.shape[1] == k.shape[1], "fewer key heads need enable_gqa")
    operation = ATEN._scaled_dot_product_flash_attention.default
    width = q.shape[-1]
    if width % 8:  # torch pads heads before it calls the kernel
        scale = scale or width**-0.5
        q, k, v = (F.pad(x, (0, -width % 8)) for x in (q, k, v))
    out: Tensor = operation(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :width]


class _FusedRMSNorm(torch.autograd.Function):
    """torch's fused norm, which exists only on a GPU, as one operation in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            normed, inverse = ATEN._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, inverse, weight)
        ctx.shape = shape
        found: Tensor = normed
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, inverse, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        operation = ATEN._fused_rms_norm_backward.default
        of_x, of_weight = operation(grad, x, ctx.shape, inverse, weight, wanted)
        return of_x, None, of_weight, None


def fused_rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm by the operation that a GPU has for it."""
    normed: Tensor = _FusedRMSNorm.apply(x, shape, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def _rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Any,
    inverse: Tensor,
    weight: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x and of the weight. inverse: one over the root mean square, from the forward pass."""
    wide, scaled = x.float(), grad.float()
    if weight is not None:
        scaled = scaled * weight.float()
    along = (scaled * wide).mean(-1, keepdim=True)
    of_x = inverse * (scaled - wide * along * inverse.square())
    of_weight = (grad.float() * wide * inverse).flatten(0, -2).sum(0)
    of_x, of_weight = of_x.to(x.dtype), of_weight.to(x.dtype if weight is None else weight.dtype)
    return of_x if wanted[0] else None, of_weight if wanted[1] else None


def _sdpa_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *_: Any, **how: Any
) -> tuple[Any, ...]:
    state, nothing = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    shape = nothing, nothing, q.shape[2], k.shape[2], state, state.clone(), nothing
    if q.is_meta:
        return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32), *shape
    out, logs = _row_forward(*(x.transpose(1, 2) for x in (q, k, v)), causal, how)
    return out.transpose(1, 2), logs, *shape


def _sdpa_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, *rest: Any, **how: Any
) -> list[Tensor]:
    if q.is_meta:
        return [torch.empty_like(x) for x in (q, k, v)]
    of_out, *qkv, own = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    made = _row_backward(of_out, qkv, own, logs, rest[5], how)
    return [x.transpose(1, 2) for x in made]


def _aligned(x: Tensor) -> bool:
    """Return whether one of the last two axes is contiguous, and the other's stride is a multiple of 16 bytes."""
    *_, first, second = x.stride()
    step = max(first, second) * x.element_size()
    return 1 in (first, second) and step % MULTIPLE_BYTES == 0


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *rest: Any, **_: Any) -> Tensor:
    """Return products of groups of a's rows, or, with two matrices, of groups of the summed axis."""
    require(offs is not None and offs.dtype == torch.int32, "grouped_mm takes int32 offsets")
    require(a.dtype == b.dtype == torch.bfloat16, "grouped_mm takes bf16")
    require(_aligned(a) and _aligned(b), f"grouped_mm refuses strides {a.stride()}, {b.stride()}")
    assert offs is not None
    if offs.is_meta:
        shape = (len(a),) if b.dim() == 3 else (len(offs), len(a))
        return a.new_empty(*shape, b.shape[-1])
    ends = offs.tolist()
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.dim() == 3:
        pieces = [a[start:end] @ b[number] for number, (start, end) in enumerate(bounds)]
        return torch.cat(pieces)
    return torch.stack([a[:, start:end] @ b[start:end] for start, end in bounds])


def _scaled(a: Tensor, b: Tensor, *rest: Any, **how: Any) -> Tensor:
    require(
        a.stride(1) == 1 and b.stride(0) == 1, "_scaled_mm takes a row-major and a column-major"
    )
    sides = (a.shape[1], *b.shape)
    require(all(side % 16 == 0 for side in sides), f"_scaled_mm refuses {a.shape} @ {b.shape}")
    both_e5m2 = a.dtype == b.dtype == torch.float8_e5m2
    require(not both_e5m2, "_scaled_mm refuses two operands in e5m2")
    made: Tensor = ATEN._scaled_mm.default(a, b, *rest, **how)
    return made


def _add_wide_product(
    total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor
) -> Tensor:
    """Return addmm of 16-bit matrices with a float32 sum, in place. It exists only on a GPU."""
    require(left.dtype in HALF and left.dtype == right.dtype, "a wide addmm takes two of 16 bits")
    require(total.dtype == dtype == torch.float32, "a wide addmm adds to float32")
    return out if out.is_meta else out.copy_(total + left.float() @ right.float())


def _wide_product(left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """Return mm of 16-bit matrices in float32. It exists only on a GPU."""
    require(left.dtype in HALF and left.dtype == right.dtype, "a wide mm takes two of 16 bits")
    require(out.dtype == dtype == torch.float32, "a wide mm makes float32")
    return out if out.is_meta else out.copy_(left.float() @ right.float())


KERNELS: dict[Any, Callable[..., Any]] = {
    ATEN.addmm.dtype_out: _add_wide_product,
    ATEN.mm.dtype_out: _wide_product,
    ATEN._grouped_mm.default: _grouped,
    ATEN._scaled_mm.default: _scaled,
    ATEN._fused_rms_norm.default: ATEN._fused_rms_norm.default,
    ATEN._fused_rms_norm_backward.default: _rms_norm_backward,
    ATEN._scaled_dot_product_flash_attention.default: _sdpa_forward,
    ATEN._scaled_dot_product_flash_attention_backward.default: _sdpa_backward,
}


@cache
def install_flash() -> torch.library.Library:
    """Give torch flash attention on CPUs, for the rest of the process. torch's varlen attention calls it too."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _flash_forward, "CPU")
    library.impl("_flash_attention_backward", _flash_backward, "CPU")
    return library
