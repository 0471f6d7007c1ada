"""Logits are processed as by transformers. Tokens are drawn as often as their probability says."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from megaconv.errors import UsageError
from megatron_lite.inference.sampling import (
    Sampling,
    choose,
    discourage,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    likelihood,
    penalize,
)
from tests.trainer.inference.models import FIXTURE

ROW = [3, 17, 3, 90]


def logits(seed: int) -> Tensor:
    return torch.empty(131).normal_(0, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(4))
def test_processors_are_those_of_transformers(seed: int) -> None:
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    ids, scores = torch.tensor([ROW]), logits(seed).unsqueeze(0)
    for penalty in (1.3, 0.7):
        torch.testing.assert_close(
            penalize(scores[0], ROW, penalty),
            RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)[0],
        )
    for k in (1, 5, 130, 500):
        torch.testing.assert_close(keep_top_k(scores, k), TopKLogitsWarper(k)(ids, scores))
    for p in (0.1, 0.5, 0.9, 0.999):
        torch.testing.assert_close(keep_top_p(scores, p), TopPLogitsWarper(p)(ids, scores))
        torch.testing.assert_close(keep_min_p(scores, p), MinPLogitsWarper(p)(ids, scores))


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-40, 5e-324])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(temperature: float) -> None:
    """The quotients would be infinite, without a probability, and the error would end a server."""
    given = logits(1)
    for more in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert choose(given, ROW, Sampling(temperature, **more)) == int(given.argmax())


def test_filters_are_those_of_megatron() -> None:
    expected = json.loads((FIXTURE / "expected.json").read_text())["filters"]
    given = torch.from_numpy(np.load(FIXTURE / "model.npz")["logits"].astype(np.float32))
    for name, kept in expected.items():
        what, number = name.split()
        found = (
            keep_top_k(given, int(number)) if what == "top_k" else keep_top_p(given, float(number))
        )
        assert torch.equal(found.isfinite().int(), torch.tensor(kept)), name


def test_a_token_is_drawn_as_often_as_it_is_likely() -> None:
    given = torch.tensor([1.0, 2.0, 0.0, -1.0, -9.0])
    sampling = Sampling(temperature=0.7, top_k=4, top_p=0.97)
    expected = keep_top_p(keep_top_k(given / 0.7, 4), 0.97).softmax(-1)
    assert int((expected > 0).sum()) == 3
    drawn = torch.tensor(
        [choose(given, ROW, Sampling(0.7, 4, 0.97, seed=seed)) for seed in range(4000)]
    )
    torch.testing.assert_close(drawn.bincount(minlength=5) / 4000, expected, atol=0.025, rtol=0)
    assert choose(given, ROW, sampling) == choose(given, ROW, sampling)


def test_greedy_takes_the_likeliest_after_the_penalty() -> None:
    given = torch.tensor([1.0, 2.0, 1.9])
    assert choose(given, [0], Sampling(0)) == choose(given, [0], Sampling(top_k=1)) == 1
    assert choose(given, [1], Sampling(0, repetition_penalty=1.2)) == 2


def test_penalties_count_what_was_generated_and_not_the_prompt() -> None:
    given = torch.tensor([1.0, 2.0, 1.9, 1.5])
    row, generated = [1, 2, 2], [2, 2]
    presence = Sampling(0, presence_penalty=0.5)
    frequency = Sampling(0, frequency_penalty=0.25)
    both = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    assert choose(given + torch.tensor([0, -0.3, 0, 0]), row, presence, generated=generated) == 1
    assert choose(given + torch.tensor([0, -0.7, 0, 0]), row, frequency, generated=generated) == 3
    changed = given - torch.tensor([0, 0, 1.0, 0])
    torch.testing.assert_close(discourage(given, generated, both), changed)
    assert torch.equal(discourage(given, [], both), given)


def test_a_bias_is_added_and_a_mask_forbids_whatever_is_added() -> None:
    given = torch.tensor([1.0, 2.0, 1.9, 1.5])
    favour = Sampling(0, logit_bias=((3, 100.0), (1, -100.0)))
    assert choose(given, [], favour) == 3
    assert choose(given, [], favour, allowed=torch.tensor([True, True, True, False])) == 2


def test_log_probabilities_are_of_the_raw_logits() -> None:
    given = logits(1)
    found = likelihood(given, 7, 3)
    expected = given.log_softmax(-1)
    assert found.log_prob == expected[7]
    assert [pair[0] for pair in found.top] == expected.argsort(descending=True)[:3].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": -0.1},
        {"min_p": 1.1}, {"repetition_penalty": 0}, {"repetition_penalty": 1e-40}, {"repetition_penalty": float("inf")},
    ],
)  # fmt: skip
def test_impossible_sampling_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        Sampling(**settings)  # type: ignore[arg-type]
