"""Copies of tokens for their experts, and sums of the experts' outputs: gathered, they are what index_add makes of them."""

import torch

from megatron_lite.models.moe.copies import Copies, copies_of

TOKENS, PER_TOKEN, WIDTH = 7, 3, 5


def _made(copies: Copies) -> list[torch.Tensor]:
    """Return the copies, the sums, and the gradients of both inputs."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    rows = torch.randn(TOKENS * PER_TOKEN, WIDTH, dtype=torch.float64, generator=generator)
    rows.requires_grad_()
    copied, summed = copies.of(x), copies.summed(rows, x)
    (copied.square().sum() + summed.pow(3).sum()).backward()
    assert x.grad is not None
    assert rows.grad is not None
    return [copied, summed, x.grad, rows.grad]


def test_gathered_sums_are_those_of_additions_one_after_the_other() -> None:
    slot = torch.randperm(TOKENS * PER_TOKEN, generator=torch.Generator().manual_seed(1))
    place = slot.argsort().view(TOKENS, PER_TOKEN)
    added = copies_of(slot, PER_TOKEN, TOKENS * PER_TOKEN)
    assert added.place is None
    gathered = Copies(slot, added.token, place)
    for found, expected in zip(_made(gathered), _made(added), strict=True):
        torch.testing.assert_close(found, expected)
