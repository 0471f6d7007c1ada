"""Context parallelism of mixers with a state: each rank computes some heads over all tokens of the sequence.

A state passes from token to token, so that tokens can't be divided as in attention. All heads of some tokens are
exchanged for some heads of all tokens before the convolution, and back after the scan. Without context parallelism
(None), all functions return their input. Source: mamba_context_parallel.py of megatron-core 0.16.1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.parallel.context import ContextGroup, heads_for_tokens, tokens_for_heads


class Heads(NamedTuple):
    """Heads whose channels follow each other in a projection."""

    number: int
    """The number of heads of this tensor rank. A number below the context-parallel size is repeated up to it."""
    width: int = 1


def own_heads_of_all_tokens(
    x: Tensor, parts: Sequence[Heads], context: ContextGroup | None
) -> Tensor:
    """[sequence / cp, batch, channels] -> [sequence, batch, channels of this rank's heads], in sequence order.

    parts: the heads of the channels, one part after another.
    """
    if context is None:
        return x
    exchanged = [
        heads_for_tokens(_enough(part, context.size, 2), context).flatten(2)
        for part in _parts(x, parts, 2)
    ]
    return torch.cat(exchanged, 2)


def all_heads_of_own_tokens(x: Tensor, context: ContextGroup | None) -> Tensor:
    """[sequence, batch, heads / cp, width] -> [sequence / cp, batch, heads, width]."""
    return x if context is None else tokens_for_heads(x, context)


def own_heads(parameter: Tensor, parts: Sequence[Heads], context: ContextGroup | None) -> Tensor:
    """Return the slice [channels of this rank's heads, ...] of a parameter [channels, ...]."""
    if context is None:
        return parameter
    own = [
        _enough(part, context.size, 0).chunk(context.size)[context.rank].flatten(0, 1)
        for part in _parts(parameter, parts, 0)
    ]
    return torch.cat(own)


def _parts(x: Tensor, parts: Sequence[Heads], axis: int) -> list[Tensor]:
    """Split the channels into parts, and the channels of each part into [heads, width]."""
    widths = [heads.number * heads.width for heads in parts]
    split = torch.split(x, widths, axis)
    return [
        part.view(*x.shape[:axis], heads.number, heads.width, *x.shape[axis + 1 :])
        for part, heads in zip(split, parts, strict=True)
    ]


def _enough(x: Tensor, size: int, axis: int) -> Tensor:
    """Repeat each head if there are fewer heads than ranks, so that each rank gets one."""
    count = x.shape[axis]
    return x if count % size == 0 else x.repeat_interleave(size // count, axis)
