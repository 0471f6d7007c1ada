"""Generation by Megatron core 0.9.0 from a model without layers: tokens, lengths, log-probabilities, beams."""

import json
from typing import Any

import pytest
import torch

from megatron_lite.inference import batching
from megatron_lite.inference.megatron import MegatronBeams, MegatronSettings, Words, generate
from megatron_lite.inference.requests import Request
from tests.trainer.inference.models import FIXTURE, without_layers

EXPECTED: dict[str, Any] = json.loads((FIXTURE / "expected.json").read_text())
WORDS = Words(
    EXPECTED["eod"], EXPECTED["colon"], *[EXPECTED["newline"]] * 2, EXPECTED["double_newline"]
)


@pytest.mark.parametrize("name", EXPECTED["generate"])
def test_tokens_are_those_of_megatron(name: str) -> None:
    """Samples come from torch's own generator, whose numbers a release may change."""
    case = EXPECTED["generate"][name]
    settings = MegatronSettings(
        EXPECTED["tokens_to_generate"], seed=EXPECTED["seed"], **case["settings"]
    )
    if settings.top_k != 1 and torch.__version__ != EXPECTED["torch"]:
        pytest.skip(f"sampled by torch {EXPECTED['torch']}, this is {torch.__version__}")
    found = generate(without_layers(), EXPECTED["prompts"], settings, WORDS)
    assert found.tokens.tolist() == case["tokens"]
    assert found.lengths == case["lengths"]
    torch.testing.assert_close(found.log_probs, torch.tensor(case["log_probs"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", EXPECTED["beam"])
def test_beams_are_those_of_megatron(name: str) -> None:
    case = EXPECTED["beam"][name]
    prompt = EXPECTED["prompts"][-1]
    rules = MegatronBeams(
        case["beam_width"], case["stop_token"], case["length_penalty"], EXPECTED["eod"]
    )
    request = Request(tuple(prompt), EXPECTED["tokens_to_generate"], beams=rules)
    (answer,) = batching.generate(without_layers(), [request])
    assert [[*prompt, *beam.tokens] for beam in answer.beams] == case["tokens"]
    assert [beam.score for beam in answer.beams] == pytest.approx(case["scores"], abs=1e-5)
