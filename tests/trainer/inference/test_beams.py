"""Beams are those of transformers' generate: rows, their order, their scores."""

from typing import Any

import pytest
import torch

from megaconv.errors import UsageError
from megatron_lite.inference.beams import BeamSettings, EarlyStopping, beam_search
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
    beams = beam_search(slots_of(model), prompt, BeamSettings(width, 8, stop, penalty, early))
    for beam, row in zip(beams, found.sequences[:, 3:].tolist(), strict=True):
        assert list(beam.tokens) == row[: len(beam.tokens)]
        assert set(row[len(beam.tokens) :]) <= {0, stop[0]}
    torch.testing.assert_close(torch.tensor([beam.score for beam in beams]), found.sequences_scores)


def test_beams_need_as_many_slots(model: Any) -> None:
    with pytest.raises(UsageError, match="9 beams"):
        beam_search(slots_of(model), [3], BeamSettings(9, 4))
