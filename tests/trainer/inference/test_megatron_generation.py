"""What Megatron core 0.9.0 generated from a model without layers: tokens, lengths, log-probabilities, beams."""

import json
from typing import Any

import pytest
import torch

from megatron_lite.inference.megatron import MegatronSettings, Words, beam_search, generate
from tests.trainer.inference.models import FIXTURE, without_layers

EXPECTED: dict[str, Any] = json.loads((FIXTURE / "expected.json").read_text())
WORDS = Words(EXPECTED["eod"], EXPECTED["colon"], *[EXPECTED["newline"]] * 2, EXPECTED["double_newline"])


@pytest.mark.parametrize("name", EXPECTED["generate"])
def test_tokens_are_those_of_megatron(name: str) -> None:
    """Samples come from torch's own generator, whose numbers a release may change."""
    case = EXPECTED["generate"][name]
    settings = MegatronSettings(EXPECTED["tokens_to_generate"], seed=EXPECTED["seed"], **case["settings"])
    if settings.top_k != 1 and torch.__version__ != EXPECTED["torch"]:
        pytest.skip(f"sampled by torch {EXPECTED['torch']}, this is {torch.__version__}")
    found = generate(without_layers(), EXPECTED["prompts"], settings, WORDS)
    assert found.tokens.tolist() == case["tokens"]
    assert found.lengths == case["lengths"]
    torch.testing.assert_close(found.log_probs, torch.tensor(case["log_probs"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", EXPECTED["beam"])
def test_beams_are_those_of_megatron(name: str) -> None:
    case = EXPECTED["beam"][name]
    found = beam_search(
        without_layers(), EXPECTED["prompts"][-1], width=case["beam_width"], eod=EXPECTED["eod"],
        tokens_to_generate=EXPECTED["tokens_to_generate"], stop_token=case["stop_token"], length_penalty=case["length_penalty"],
    )  # fmt: skip
    assert [hypothesis.tokens for hypothesis in found] == case["tokens"]
    assert [hypothesis.score for hypothesis in found] == pytest.approx(case["scores"], abs=1e-5)
