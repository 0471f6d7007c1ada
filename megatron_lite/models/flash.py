"""FlashAttention 2, 3 and 4: three packages with similar functions. `kernel_for` selects one by its GPU and its functions.

| version | package      | module                 | GPUs               | dropout |
|---------|--------------|------------------------|--------------------|---------|
| 2       | flash-attn   | `flash_attn`           | Ampere and newer   | yes     |
| 3       | flash_attn_3 | `flash_attn_interface` | Hopper             | no      |
| 4       | flash-attn-4 | `flash_attn.cute`      | Hopper, Blackwell  | no      |

FlashAttention 4 makes `flash_attn` a namespace package without functions. So the functions decide, not the names of the
packages. Sources: the packages' own files; tests/fixtures/signatures.json has the signatures.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_lite.models.passes import Packed

MODULES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}
"""The module of each version's functions."""
HOPPER = 9
PREFERRED = {8: (2,), 9: (3, 2, 4), 10: (4, 2), 11: (4, 2), 12: (2,)}
"""Versions by the major number of the GPU's compute capability: 8 Ampere and Ada, 9 Hopper, 10 and above Blackwell."""
WIDEST, MULTIPLE = 256, 8
"""Heads have at most so many elements, and a multiple of these. FlashAttention 2 pads other heads itself."""
WIDEST_ON_BLACKWELL = 128
"""For FlashAttention 4. Newer versions have a kernel for heads of 256 elements too."""
OPTIONS = ("softmax_scale", "causal", "window_size", "deterministic")
"""Keywords of both functions, in all versions."""
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
"""Further keywords of the function for packed rows."""


@dataclass(frozen=True)
class Kernel:
    """The functions of one version."""

    version: int
    attention: Callable[..., Any]
    """`flash_attn_func`."""
    packed_attention: Callable[..., Any]
    """`flash_attn_varlen_func`."""

    @property
    def has_dropout(self) -> bool:
        return self.version == 2

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        dropout: float,
        scale: float | None,
    ) -> Tensor:
        """Return causal attention. Shapes as in attention.attend, of equal widths."""
        batch_first = [x.transpose(0, 1) for x in (q, k, v)]
        made = self.attention(*batch_first, **self._options(window, dropout, scale))
        return _output(made).transpose(0, 1)

    def attend_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packed: Packed,
        window: int | None,
        dropout: float,
        scale: float | None,
    ) -> Tensor:
        """Return causal attention within documents. q, k, v and the result: [tokens of all rows, heads, width]."""
        ends, longest = packed.cu_seqlens, packed.longest
        lengths = dict(zip(LENGTHS, (ends, ends, longest, longest), strict=True))
        options = self._options(window, dropout, scale)
        made = self.packed_attention(q, k, v, **lengths, **options)
        return _output(made)

    def _options(self, window: int | None, dropout: float, scale: float | None) -> dict[str, Any]:
        options: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": self._window_size(window),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if self.has_dropout:
            options["dropout_p"] = dropout
        return options

    def _window_size(self, window: int | None) -> tuple[int | None, int | None]:
        """Return the window as FlashAttention defines it: without the token itself, and with no later tokens."""
        if window is not None:
            return window - 1, 0
        return (None, None) if self.version == 4 else (-1, 0)


def _output(made: Any) -> Tensor:
    """Return the output. Some versions return the log-sum-exp too."""
    output: Tensor = made[0] if isinstance(made, tuple) else made
    return output


@cache
def kernel_of(version: int) -> Kernel | None:
    """Return the functions of a version, or None if the version is not installed or its functions don't fit our calls."""
    try:
        module = import_module(MODULES[version])
    except (ImportError, OSError):
        # OSError: a library of the package that can't be loaded.
        return None
    attention = getattr(module, "flash_attn_func", None)
    packed_attention = getattr(module, "flash_attn_varlen_func", None)
    dropout = ("dropout_p",) if version == 2 else ()
    if not fits(attention, (*OPTIONS, *dropout)):
        return None
    if not fits(packed_attention, (*LENGTHS, *OPTIONS, *dropout)):
        return None
    assert attention is not None
    assert packed_attention is not None
    return Kernel(version, attention, packed_attention)


def fits(function: Callable[..., Any] | None, keywords: tuple[str, ...]) -> bool:
    """Return whether the function takes q, k, v and these keywords, and requires nothing else."""
    if function is None:
        return False
    try:
        inspect.signature(function).bind("q", "k", "v", **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


@torch.compiler.disable  # type: ignore[untyped-decorator]  # an import can't be traced
def kernel_for(device: torch.device, *, width: int, dropout: bool) -> Kernel | None:
    """Return the best installed version for a GPU, or None.

    width: elements of a head. dropout: whether the version has to support dropout.
    """
    major, _ = torch.cuda.get_device_capability(device)
    for version in PREFERRED.get(major, ()):
        if not _takes_width(version, major, width):
            continue
        kernel = kernel_of(version)
        if kernel is not None and (kernel.has_dropout or not dropout):
            return kernel
    return None


def _takes_width(version: int, major: int, width: int) -> bool:
    """Return whether a version computes heads of this width on a GPU of this compute capability."""
    widest = WIDEST_ON_BLACKWELL if version == 4 and major > HOPPER else WIDEST
    return width <= widest and (version == 2 or width % MULTIPLE == 0)
