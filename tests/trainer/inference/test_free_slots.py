"""Rows that are reused: the tokens are those of a computation from the first token, and only new tokens are computed."""

import pytest

from megatron_lite.engine import Engine
from megatron_lite.inference.batching import RunningBatch, steps
from megatron_lite.inference.free_slots import FreeSlots, Held, common
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from tests.trainer.parallel.small import Case, make_engine

LENGTH, SLOTS, VOCAB = 96, 3, 60
SYSTEM = tuple((7 * token) % VOCAB for token in range(30))
FIRST = (*SYSTEM, 1, 2, 3)
OTHER = (*SYSTEM, 9, 8)


def answered(batch: RunningBatch, prompt: tuple[int, ...], count: int = 5) -> tuple[int, ...]:
    batch.add(Request(prompt, count, Sampling(0)))
    return tuple(step.token for step in steps(batch))


def alone(engine: Engine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return answered(RunningBatch(EngineModel(engine, 1, LENGTH)), prompt)


@pytest.mark.parametrize("name", ["qwen3", "hybrid"])
def test_a_conversation_goes_on_from_what_was_computed(name: str) -> None:
    engine = make_engine(Case(name))
    batch = RunningBatch(EngineModel(engine, SLOTS, LENGTH), reuse_rows=True)
    said = answered(batch, FIRST)
    longer = (*FIRST, *said, 4, 5)
    assert answered(batch, longer) == alone(engine, longer)
    assert batch.free.reused_tokens == len(FIRST) + len(said) - 1


@pytest.mark.parametrize(("name", "reused"), [("qwen3", len(SYSTEM)), ("hybrid", 0)])
def test_another_question_copies_what_both_begin_with(name: str, reused: int) -> None:
    """A state can't be turned back. A hybrid continues whole rows alone."""
    engine = make_engine(Case(name))
    batch = RunningBatch(EngineModel(engine, SLOTS, LENGTH), reuse_rows=True)
    said = answered(batch, FIRST)
    assert answered(batch, OTHER) == alone(engine, OTHER)
    assert batch.free.reused_tokens == reused
    longer = (*FIRST, *said, 4, 5)
    assert answered(batch, longer) == alone(engine, longer)
    assert batch.free.reused_tokens == reused + len(FIRST) + len(said) - 1


def test_a_row_that_still_grows_is_copied() -> None:
    engine = make_engine(Case("qwen3"))
    batch = RunningBatch(EngineModel(engine, SLOTS, LENGTH), reuse_rows=True)
    number = batch.add(Request(FIRST, 12, Sampling(0)))
    for _ in range(4):
        batch.turn()
    batch.add(Request(OTHER, 5, Sampling(0)))
    found = [step for step in steps(batch) if step.number != number]
    assert tuple(step.token for step in found) == alone(engine, OTHER)
    assert batch.free.reused_tokens == len(SYSTEM)


def test_rows_are_forgotten_where_something_else_used_the_slots() -> None:
    engine = make_engine(Case("qwen3"))
    batch = RunningBatch(EngineModel(engine, SLOTS, LENGTH), reuse_rows=True)
    answered(batch, FIRST)
    batch.forget_rows()
    assert answered(batch, FIRST) == alone(engine, FIRST)
    assert batch.free.reused_tokens == 0


def test_the_row_that_was_used_least_recently_makes_room() -> None:
    free = FreeSlots(EngineModel(make_engine(Case("qwen3")), SLOTS, LENGTH), reuse=True)
    for slot in range(SLOTS):
        assert free.take(FIRST, None, dict) == (slot, 0)
    for slot in (1, 0, 2):
        free.give_back(slot, Held((slot,) * 20))
    assert free.take((5,) * 20, None, dict) == (1, 0)
    assert free.take((2,) * 40, None, dict) == (2, 20)
    assert free.take((0,) * 40, 1, dict) == (0, 0), "the row is of another adapter"
    assert free.take(FIRST, None, dict) is None


def test_common_tokens_are_counted() -> None:
    assert common((1, 2, 3), (1, 2, 4, 5)) == 2
    assert common((), (1,)) == 0
    assert common((1, 2), (1, 2, 3)) == 2
    assert common((3,), (1,)) == 0
