"""Weights that silently became others on one data-parallel rank are found, down to a bit."""

import pytest
import torch

from megatron_lite.parallel.replicas import checksum
from tests.trainer.parallel.small import Case, make_engine, step
from tests.trainer.parallel.worlds import World


def spoil(rank: int, case: Case, name: str | None) -> list[tuple[str, tuple[int, ...]]]:
    """The differing parameters after a step, with one bit of a parameter changed on the last rank."""
    engine = make_engine(case)
    step(engine, case, 0)
    engine.finish()
    if name is not None and rank == case.world - 1:
        bits = engine.chunks[0].get_parameter(name).detach().view(-1).view(torch.int32)
        bits[3] ^= 1
    found = [(one.name, one.ranks) for one in engine.differing()]
    engine.grid.close()
    return found


@pytest.mark.parametrize(
    "case", [Case("gpt2", dp=2, distributed=True), Case("qwen3", tp=2, dp=2)], ids=str
)
def test_one_bit_on_one_rank_is_found_on_all_that_should_hold_the_same(
    case: Case, world: World
) -> None:
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    ranks = world.run(case.world, spoil, case, name)
    others = [found for rank, found in enumerate(ranks) if rank % case.tp != case.tp - 1]
    assert [found for rank, found in enumerate(ranks) if rank % case.tp == case.tp - 1] == [
        [(name, (1,))]
    ] * 2
    assert not any(others)


def test_nothing_is_found_where_all_is_well(world: World) -> None:
    assert world.run(2, spoil, Case("llama", dp=2), None) == [[], []]


def test_a_checksum_knows_where_bits_stand() -> None:
    numbers = torch.arange(10.0)
    assert checksum(numbers) != checksum(numbers.flip(0))
    assert checksum(numbers) == checksum(numbers.clone())
    assert checksum(numbers.bfloat16()) != checksum(torch.zeros(10, dtype=torch.bfloat16))
