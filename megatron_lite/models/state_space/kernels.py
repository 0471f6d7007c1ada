"""Optional kernels of mixers with a state: mamba_ssm, causal_conv1d and flash-linear-attention.

| function         | package     | module                         | takes                                  |
|------------------|-------------|--------------------------------|----------------------------------------|
| ssd              | mamba-ssm   | `mamba_ssm.ops.triton.ssd_combined` | float32, bf16 and fp16            |
| gated_delta_rule | fla-core    | `fla.ops.gated_delta_rule`     | bf16 and fp16, keys of up to 256       |
| kimi_delta_rule  | fla-core    | `fla.ops.kda`                  | bf16 and fp16, keys of up to 256       |
| convolution      | causal-conv1d | `causal_conv1d`              | 2 to 4 positions, channels by eights   |

Each takes the documents of packed rows or a state before the first token, but not both.

A package is imported only for a tensor on a GPU: some of them can be imported without a GPU, and fail at the first call.
Sources: the packages' own files; tests/fixtures/signatures.json has the signatures.
"""

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

IN_16_BITS = (torch.bfloat16, torch.float16)
WIDEST_KEY = 256
"""Of flash-linear-attention."""


class Package(NamedTuple):
    """A function of a package, and the arguments that we pass."""

    module: str
    function: str
    places: int
    """Number of positional arguments."""
    keywords: tuple[str, ...]


SCAN = Package(
    "mamba_ssm.ops.triton.ssd_combined",
    "mamba_chunk_scan_combined",
    6,
    ("D", "initial_states", "seq_idx", "return_final_states"),
)
_OF_A_RULE = ("scale", "initial_state", "output_final_state", "cu_seqlens")
DELTA = Package("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", 5, _OF_A_RULE)
KIMI_DELTA = Package("fla.ops.kda", "chunk_kda", 5, _OF_A_RULE)
CONVOLUTION = Package(
    "causal_conv1d", "causal_conv1d_fn", 3, ("seq_idx", "initial_states", "activation")
)
Kernel = Callable[..., Any]


@cache
def installed(package: Package) -> Kernel | None:
    """Return a package's function, or None if the package is not installed or the function doesn't fit our call."""
    try:
        function: Kernel | None = getattr(import_module(package.module), package.function, None)
    except (ImportError, OSError):
        # OSError: a library of the package that can't be loaded.
        return None
    if function is None:
        return None
    try:
        inspect.signature(function).bind(*range(package.places), **dict.fromkeys(package.keywords))
    except TypeError:
        return None
    return function


@torch.compiler.disable  # type: ignore[untyped-decorator]  # an import can't be traced
def scan_kernel(x: Tensor, documents: Tensor | None, state: Tensor | None) -> Kernel | None:
    """Return mamba_ssm's scan for these inputs of ssd, or None."""
    has_both = documents is not None and state is not None
    if not x.is_cuda or x.dtype == torch.float64 or has_both:
        return None
    kernel: Kernel | None = installed(SCAN)
    return kernel


@torch.compiler.disable  # type: ignore[untyped-decorator]
def delta_kernel(
    k: Tensor, v: Tensor, documents: Tensor | None, state: Tensor | None
) -> Kernel | None:
    """Return the gated delta rule of flash-linear-attention for these inputs, or None."""
    return _rule_kernel(DELTA, k, v, documents, state)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def kimi_delta_kernel(
    k: Tensor, v: Tensor, documents: Tensor | None, state: Tensor | None
) -> Kernel | None:
    """Return the Kimi delta rule of flash-linear-attention for these inputs, or None."""
    return _rule_kernel(KIMI_DELTA, k, v, documents, state)


def _rule_kernel(
    package: Package, k: Tensor, v: Tensor, documents: Tensor | None, state: Tensor | None
) -> Kernel | None:
    has_both = documents is not None and state is not None
    fits = v.is_cuda and v.dtype in IN_16_BITS and k.shape[-1] <= WIDEST_KEY
    if has_both or not fits:
        return None
    kernel: Kernel | None = installed(package)
    return kernel


@torch.compiler.disable  # type: ignore[untyped-decorator]
def convolution_kernel(
    x: Tensor, width: int, documents: Tensor | None, before: Tensor | None
) -> Kernel | None:
    """Return causal_conv1d's convolution for x [tokens, batch, channels], or None."""
    has_both = documents is not None and before is not None
    fits = 2 <= width <= 4 and x.shape[-1] % 8 == 0 and len(x) > 1
    if not fits or has_both:
        return None
    if not x.is_cuda or x.dtype == torch.float64:
        return None
    kernel: Kernel | None = installed(CONVOLUTION)
    return kernel


def scan_by(
    kernel: Kernel,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    *,
    chunk: int,
    documents: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what ssd returns, by mamba_ssm's kernel. The arguments: see ssd."""
    made: tuple[Tensor, Tensor] = kernel(
        x,
        dt.float(),
        a.float(),
        b.to(x.dtype),
        c.to(x.dtype),
        chunk,
        D=d.float(),
        initial_states=state,
        seq_idx=_numbers_of_rows(documents),
        return_final_states=True,
    )
    y, last = made
    return y.to(x.dtype), last.float()


def delta_by(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    documents: Tensor | None,
    ends: Tensor | None = None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what gated_delta_rule or kimi_delta_rule returns, by its kernel of flash-linear-attention.

    The arguments: see there.
    Its earlier versions need as many key heads as heads. The package reads `ends` on the host, and keeps what it found while
    it gets the same tensor.
    """
    heads_per_key = v.shape[2] // k.shape[2]
    queries = q.to(v.dtype).repeat_interleave(heads_per_key, 2)
    keys = k.to(v.dtype).repeat_interleave(heads_per_key, 2)
    inputs = [queries, keys, v, g.float(), beta.to(v.dtype)]
    if documents is None:
        y, last = kernel(
            *inputs, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=None
        )
        return y.to(v.dtype), last.float()
    # The kernel takes the documents of one row only. Therefore all rows are joined to one.
    joined = [each.flatten(0, 1).unsqueeze(0) for each in inputs]
    limits = _document_limits(documents) if ends is None else ends
    y, last_states = kernel(
        *joined, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=limits
    )
    rows, tokens = v.shape[:2]
    ends_of_rows = torch.arange(1, rows + 1, device=v.device) * tokens
    last_documents = torch.searchsorted(limits, ends_of_rows) - 1
    return y.view(v.shape).to(v.dtype), last_states[last_documents].float()


def convolution_by(
    kernel: Kernel,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    documents: Tensor | None,
    before: Tensor | None,
) -> Tensor:
    """Return x after convolution and SiLU, [tokens, batch, channels], by causal_conv1d.

    weight [channels, 1, width]; documents, before: see short_convolution.
    """
    # Channels are adjacent, as the kernel needs them for documents and states.
    by_row = x.permute(1, 2, 0)
    made: Tensor = kernel(
        by_row,
        weight.squeeze(1).to(x.dtype),
        None if bias is None else bias.to(x.dtype),
        seq_idx=_numbers_of_rows(documents),
        initial_states=before,
        activation="silu",
    )
    return made.permute(2, 0, 1)


def _numbers_of_rows(documents: Tensor | None) -> Tensor | None:
    """Return int32 [batch, tokens]: the documents of each row, counted from 0."""
    if documents is None:
        return None
    return (documents - documents[:, :1]).to(torch.int32).contiguous()


def _document_limits(documents: Tensor) -> Tensor:
    """Return int64 [documents + 1]: the start of each document in all rows, and the end of the last one.

    A row's first token begins a document even if its number is that of the last row's document.
    """
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    changes = documents.diff(dim=1) != 0
    begins = torch.cat((first, changes), 1).flatten()
    starts = begins.nonzero().squeeze(1)
    end = starts.new_tensor([begins.numel()])
    return torch.cat((starts, end))
