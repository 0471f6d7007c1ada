"""Ten steps on pairs and on rated answers at any layout, on all weights and on adapters, are those of one process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from megatron_lite.settings.options import LoRA, Recompute
from tests.trainer.parallel import test_preference, test_rated_answers
from tests.trainer.parallel.compared_cases import Case, alone
from tests.trainer.parallel.compared_steps import Result, require_as_alone
from tests.trainer.parallel.worlds import World

Train = Callable[[int, Case], Result]
"""Trains one rank."""
OBJECTIVES: Mapping[str, Any] = {"pairs": test_preference, "rated answers": test_rated_answers}
QUICK = [
    {"tp": 2, "sequence_parallel": True, "zero": 1, "dp": 2},
    {"pp": 2, "lora": LoRA(4, 8)},
]
FURTHER = [
    {"tp": 2},
    {"pp": 2, "dp": 2, "recompute": Recompute("full")},
    {"tp": 2, "cp": 2, "sequence_parallel": True, "zero": 1},
    {"tp": 2, "sequence_parallel": True, "dp": 2, "zero": 1, "lora": LoRA(4, 8)},
    {"model": "gpt2-conv1d", "pp": 2},
    {"model": "mixtral-experts", "tp": 2, "sequence_parallel": True},
]


def each(layouts: Sequence[Mapping[str, Any]], *, own: bool = False) -> Iterator[Any]:
    """(train, case) of each objective. own: with the cases that only one objective has."""
    for name, objective in OBJECTIVES.items():
        cases: Iterable[Case] = (objective.Case(**layout) for layout in layouts)
        for case in (*cases, *(objective.FURTHER if own else ())):
            yield pytest.param(objective.train, case, id=f"{name} {case}")


@pytest.mark.parametrize(("train", "case"), list(each(QUICK)))
def test_ten_steps_at_a_layout_are_those_of_one_process(
    train: Train, case: Case, world: World
) -> None:
    assert_as_alone(train, case, world)


@pytest.mark.slow
@pytest.mark.parametrize(("train", "case"), list(each(FURTHER, own=True)))
def test_ten_steps_at_every_layout_are_those_of_one_process(
    train: Train, case: Case, world: World
) -> None:
    assert_as_alone(train, case, world)


def assert_as_alone(train: Train, case: Case, world: World) -> None:
    expected, weights = train(0, alone(case))
    # Batches of two kinds take turns.
    assert expected[-1].loss < 0.9 * expected[1].loss, "something is learned"
    require_as_alone(world.run(case.world, train, case), (expected, weights))
