"""Tokens reach their experts and come back, whatever experts they choose: also where a rank gets no tokens of another."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.models.build_plan import ExpertRanks
from megatron_lite.models.moe.counting import RowNumbers
from megatron_lite.models.moe.dispatch import by_exchange
from tests.trainer.parallel.worlds import World

EXPERTS, TOKENS, WIDTH = 4, 3, 2
SHARING, PARTS = ((0, 2), (1, 3)), ((0, 1), (2, 3))
"""Ranks that share the experts, two each, and ranks that have the two parts of the same experts."""
CHOICES = {
    "each expert": ([0, 2], [1, 3], [2, 1], [3, 0]),
    "experts of one rank": ([0, 1], [0, 1], [1, 0], [0, 1]),
    "another rank's, of one part": ([0, 1], [2, 3], [0, 1], [0, 1]),
}
"""The experts of all tokens of each rank."""


def group_of(rank: int, groups: tuple[tuple[int, ...], ...]) -> Any:
    made = [dist.new_group(list(members)) for members in groups]
    return next(group for group, members in zip(made, groups, strict=True) if rank in members)


def scaled(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """A part of each expert: the parts add up to the weighted rows."""
    assert sum(counts) == len(rows)
    return rows * weights / len(PARTS[0])


def go_there_and_back(rank: int, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, their weights, the result, and the gradient of the tokens."""
    ranks = ExpertRanks(experts=group_of(rank, SHARING), parts=group_of(rank, PARTS))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weights = torch.rand(TOKENS, 2, generator=generator)
    chosen = torch.tensor(CHOICES[name][rank]).expand(TOKENS, 2)
    made = by_exchange(x, weights, chosen, EXPERTS, ranks, scaled, RowNumbers())
    made.sum().backward()
    assert x.grad is not None
    return x.detach(), weights, made.detach(), x.grad


@pytest.mark.parametrize("name", CHOICES)
def test_tokens_come_back_from_parts_of_experts(name: str, world: World) -> None:
    for x, weights, made, gradient in world.run(4, go_there_and_back, name):
        factor = weights.sum(1, keepdim=True)
        torch.testing.assert_close(made, x * factor)
        torch.testing.assert_close(gradient, factor.expand_as(x))
