"""Beams are those of transformers' generate: rows, their order, their scores."""

from typing import Any

import pytest
import torch

from megaconv.errors import UsageError
from megatron_lite.inference.batching import RunningBatch, generate, steps
from megatron_lite.inference.beams import BeamSettings, EarlyStopping
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from tests.trainer.inference.models import slots_of, tiny

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


GRID = [
    pytest.param(width, penalty, early, stops, marks=[] if quick else [pytest.mark.slow])
    for stops in (1, 40)
    for width, penalty in ((2, 1.0), (4, 0.4), (5, -0.5), (3, 2.0))
    for early in (False, True, "never")
    for quick in [(width, early) in {(2, False), (3, "never"), (4, True)}]
]


@pytest.mark.parametrize(("width", "penalty", "early", "stops"), GRID)
def test_beams_are_those_of_transformers(
    model: Any, width: int, penalty: float, early: EarlyStopping, stops: int
) -> None:
    """40 stop tokens of 131: most rows end early, so that every rule about ended ones decides something."""
    stop = list(range(4, 4 + stops))
    prompt = [3, 17, 90]
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 3), max_new_tokens=8, do_sample=False, pad_token_id=0,
        num_beams=width, num_return_sequences=width, eos_token_id=stop, length_penalty=penalty, early_stopping=early,
        output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    request = Request(
        tuple(prompt), 8, stop_ids=frozenset(stop), beams=BeamSettings(width, penalty, early)
    )
    beams = generate(slots_of(model), [request])[0].beams
    for beam, row in zip(beams, found.sequences[:, 3:].tolist(), strict=True):
        assert list(beam.tokens) == row[: len(beam.tokens)]
        assert set(row[len(beam.tokens) :]) <= {0, stop[0]}
    torch.testing.assert_close(torch.tensor([beam.score for beam in beams]), found.sequences_scores)


def test_beams_need_as_many_slots(model: Any) -> None:
    with pytest.raises(UsageError, match="9 beams"):
        generate(slots_of(model), [Request((3,), 4, beams=BeamSettings(9))])


@pytest.mark.parametrize("penalty", [100.0, -100.0, float("nan")])
def test_a_length_penalty_whose_powers_overflow_is_refused(penalty: float) -> None:
    with pytest.raises(UsageError, match=r"--length-penalty .* must be from -50 to 50"):
        BeamSettings(2, penalty)
    assert (1 << 20) ** 50.0 * (1 << 20) ** -50.0 == 1


def test_beam_searches_and_other_requests_of_a_running_batch_get_what_each_gets_alone(
    model: Any,
) -> None:
    prompts = [(3, 17, 90), (8, 8, 8), (3, *range(40, 52)), (77,)]
    searches = [
        Request(prompt, 6, stop_ids=frozenset([4]), beams=BeamSettings(3)) for prompt in prompts
    ]
    greedy = [Request(prompt, 5 + number, Sampling(0)) for number, prompt in enumerate(prompts)]
    requests = [request for pair in zip(searches, greedy, strict=True) for request in pair]
    alone = [generate(slots_of(model), [request])[0] for request in requests]
    batch = RunningBatch(slots_of(model, 7), prompt_tokens=4)
    numbers = [batch.add(request) for request in requests[:4]]
    at_once, found = 0, {number: ([], ()) for number in numbers}
    for turn, step in enumerate(steps(batch)):
        if turn == 3:
            late = [batch.add(request) for request in requests[4:]]
            numbers += late
            found |= {number: ([], ()) for number in late}
        at_once = max(at_once, batch.counts[0])
        tokens, _ = found[step.number]
        found[step.number] = [*tokens, *([step.token] if step.token >= 0 else [])], step.beams
    assert at_once == 3  # two searches with three rows each, and another request
    for number, answer in zip(numbers, alone, strict=True):
        tokens, beams = found[number]
        assert tokens == answer.tokens
        assert [beam.tokens for beam in beams] == [beam.tokens for beam in answer.beams]


def test_a_search_that_is_given_up_frees_its_slots(model: Any) -> None:
    batch = RunningBatch(slots_of(model, 3))
    first = batch.add(Request((3, 17), 6, beams=BeamSettings(3)))
    late = batch.add(Request((8, 8), 2, Sampling(0)))
    batch.turn()
    assert batch.counts == (1, 1)
    batch.cancel(first)
    assert [step.number for step in steps(batch)] == [late, late]
    assert batch.add(Request((3, 17), 6, beams=BeamSettings(3)))
    assert list(steps(batch))[-1].beams
