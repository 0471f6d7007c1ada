"""The inside of a mixer with a delta rule: heads of queries, keys and values, and the scan over the tokens of a row.

Gated delta nets and Kimi delta attention share it. Their rules, steps and kernels differ.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_lite.models.passes import Packed
from megatron_lite.models.recompute import recomputed
from megatron_lite.models.state_space.kernels import Kernel
from megatron_lite.products.wide import wide

EPSILON_OF_LENGTHS = 1e-6
"""Is added to the squared lengths of q and k."""

Rule = Callable[..., tuple[Tensor, Tensor]]
ChooseKernel = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Kernel | None]
"""(k, v, documents, state) -> the kernel that computes the rule for them, or None."""


def in_heads(x: Tensor, width: int) -> Tensor:
    """[tokens, batch, channels] -> [tokens, batch, heads, width]."""
    return x.view(*x.shape[:2], -1, width)


def heads_of_qkv(
    inner: Tensor, heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v [tokens, batch, key heads or heads, width], q and k of length 1, and q divided by sqrt(key_dim).

    inner: all three [tokens, batch, channels]. heads: those of v.
    """
    values = heads * value_dim
    keys = (inner.shape[-1] - values) // 2
    q, k, v = torch.split(inner, [keys, keys, values], -1)
    queries = _of_length_one(in_heads(q, key_dim)) * key_dim**-0.5
    return queries, _of_length_one(in_heads(k, key_dim)), in_heads(v, value_dim)


def _of_length_one(x: Tensor) -> Tensor:
    """Divide each head by its length, in float32 or float64."""
    precise = wide(x)
    return precise * torch.rsqrt(precise.square().sum(-1, keepdim=True) + EPSILON_OF_LENGTHS)


def scanned(
    rule: Rule,
    choose_kernel: ChooseKernel,
    inputs: tuple[Tensor, ...],
    packed: Packed | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (y [tokens, batch, heads, width], the last state) of a rule.

    inputs: q, k, v, the decay's logarithm and beta, each with the tokens first.
    """
    by_row = [each.transpose(0, 1) for each in inputs]
    documents = None if packed is None else packed.numbers
    ends = None if packed is None else packed.ends
    of_rows = partial(rule, documents=documents, ends=ends, state=state)
    _, keys, values, _, _ = by_row
    kernel = choose_kernel(keys, values, documents, state)
    y, state = recomputed(of_rows, *by_row) if kernel is None else of_rows(*by_row)
    return y.transpose(0, 1), state
