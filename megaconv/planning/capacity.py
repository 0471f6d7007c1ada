"""The capacity of experts: the largest number of tokens that each of them takes.

    capacity = ceil(tokens * k / experts * factor)                  tokens: of one microbatch, on this rank

Source: get_capacity of megatron/core/transformer/moe/moe_utils.py.
"""

from math import ceil


def capacity_of(tokens: int, per_token: int, experts: int, factor: float) -> int:
    """Return the largest number of tokens that an expert takes. It never exceeds the number of tokens."""
    return min(ceil(tokens * per_token / experts * factor), tokens)
