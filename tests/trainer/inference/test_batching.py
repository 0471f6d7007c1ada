"""Requests of a running batch get what each gets alone, and what transformers' generate gives."""

from typing import Any

import pytest
import torch

from megaconv.errors import UsageError
from megatron_lite.inference.batching import RunningBatch, generate, steps
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from tests.trainer.inference.models import EOS, slots_of, tiny

pytestmark = pytest.mark.oracle

PROMPTS = [(3, 17, 90, 4, 22), (3, 60), (3, *range(40, 60)), (8, 8, 8), (77,)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


def expected(model: Any, prompt: tuple[int, ...], tokens: int, **settings: Any) -> list[int]:
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=tokens, do_sample=False,
        pad_token_id=0, **settings,
    )  # fmt: skip
    return found[0, len(prompt) :].tolist()


def test_greedy_tokens_are_those_of_transformers(model: Any) -> None:
    stop = frozenset([EOS, expected(model, PROMPTS[0], 9)[5]])
    for penalty in (1.0, 1.4):
        requests = [
            Request(prompt, 9 + number, Sampling(0, repetition_penalty=penalty), stop)
            for number, prompt in enumerate(PROMPTS)
        ]
        answers = generate(slots_of(model, 3), requests)
        for request, answer in zip(requests, answers, strict=True):
            tokens = expected(
                model,
                request.prompt,
                request.max_tokens,
                eos_token_id=list(stop),
                repetition_penalty=penalty,
            )
            assert answer.tokens == tokens
            assert answer.end == ("stop" if tokens[-1] in stop else "length")


def test_a_sample_depends_on_its_seed_alone(model: Any) -> None:
    requests = [
        Request(prompt, 8, Sampling(0.9, 20, 0.9, seed=number))
        for number, prompt in enumerate(PROMPTS)
    ]
    together = [answer.tokens for answer in generate(slots_of(model, 4), requests)]
    alone = [generate(slots_of(model, 1), [request])[0].tokens for request in requests]
    assert together == alone
    others = [
        generate(slots_of(model, 1), [Request(PROMPTS[0], 8, Sampling(seed=seed))])[0].tokens
        for seed in range(3)
    ]
    assert len({tuple(tokens) for tokens in others}) > 1


def test_log_probabilities_are_those_of_the_whole_row(model: Any) -> None:
    given = slots_of(model)
    answer = generate(given, [Request(PROMPTS[0], 6, Sampling(0), log_probs=2)])[0]
    whole = given.score([[*PROMPTS[0], *answer.tokens]], 2)[0]
    last = slice(len(PROMPTS[0]) - 1, None)
    torch.testing.assert_close(
        torch.tensor([found.log_prob for found in answer.likelihoods]), whole.log_probs[last]
    )
    assert [[token for token, _ in found.top] for found in answer.likelihoods] == whole.top_ids[
        last
    ].tolist()
    assert whole.greedy[last].all()


def test_requests_join_and_leave_while_others_go_on(model: Any) -> None:
    batch = RunningBatch(slots_of(model, 2), prompt_tokens=4)
    first = batch.add(Request(PROMPTS[0], 30, Sampling(0)))
    got: dict[int, list[int]] = {first: []}
    while not got[first]:
        for step in batch.turn():
            got[step.number].append(step.token)
    late = [batch.add(Request(prompt, 5, Sampling(0))) for prompt in PROMPTS[1:]]
    got |= {number: [] for number in late}
    assert batch.counts == (1, 4)
    for number, step in enumerate(steps(batch)):
        got[step.number].append(step.token)
        if number == 6:
            batch.cancel(late[-1])
    assert got.pop(late[-1]) == []
    assert got[first] == expected(model, PROMPTS[0], 30, eos_token_id=None)
    for number, prompt in zip(late[:-1], PROMPTS[1:], strict=False):
        assert got[number] == expected(model, prompt, 5, eos_token_id=None)
    assert batch.counts == (0, 0)
    assert not batch.busy


@pytest.mark.parametrize(
    ("request_", "words"), [(Request((), 5), "empty"), (Request((1,), 0), "max_tokens"), (Request((1,) * 90, 7), "97.*96")]
)  # fmt: skip
def test_a_request_without_room_is_refused(model: Any, request_: Request, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RunningBatch(slots_of(model)).add(request_)
