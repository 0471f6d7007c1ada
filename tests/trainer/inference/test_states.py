"""Generation with states: whole rows give the same logits and tokens, whatever part of a prompt a turn reads.

The models are random in every weight. `Recomputed` computes each row from its first token.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_lite.engine import Engine
from megatron_lite.inference.batching import RunningBatch, steps
from megatron_lite.inference.beams import Beam, BeamSettings
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.inference.slots import Feed, LanguageModel, Recomputed
from megatron_lite.models.batch import Microbatch
from tests.trainer.parallel.small import Case, make_engine

WITH_STATES = ("mamba", "hybrid", "delta nets", "delta nets, experts", "kimi", "falcon h1")
LENGTH, SLOTS = 96, 4
VOCAB = 60
PROMPTS = [
    tuple((7 * token + 3 * row) % VOCAB for token in range(length))
    for row, length in enumerate((70, 1, 9, 30, 2))
]
REQUESTS = [
    *(Request(prompt, 6, Sampling(0)) for prompt in PROMPTS[:3]),
    Request(PROMPTS[3], 5, beams=BeamSettings(3)),
    *(Request(prompt, 6, Sampling(0)) for prompt in PROMPTS[3:]),
]


def recomputed(engine: Engine) -> Recomputed:
    def logits(rows: Sequence[Sequence[int]]) -> list[Tensor]:
        tokens = [torch.tensor([list(row)]) for row in rows]
        found = [engine.logits(Microbatch(each, each)) for each in tokens]
        return [each[0] for each in found if each is not None]

    return Recomputed(logits, SLOTS, LENGTH)


def answers(
    model: LanguageModel, prompt_tokens: int
) -> list[tuple[list[int], list[tuple[int, ...]]]]:
    """The tokens and the beams of each request. prompt_tokens: the most that a turn reads."""
    batch = RunningBatch(model, prompt_tokens)
    tokens: dict[int, list[int]] = {batch.add(request): [] for request in REQUESTS}
    beams: dict[int, tuple[Beam, ...]] = {}
    for step in steps(batch):
        beams[step.number] = step.beams
        if not step.beams:
            tokens[step.number].append(step.token)
    return [(tokens[number], [beam.tokens for beam in beams[number]]) for number in tokens]


@pytest.mark.parametrize("name", WITH_STATES)
def test_parts_of_prompts_beams_and_unequal_rows_give_the_tokens_of_whole_rows(name: str) -> None:
    engine = make_engine(Case(name))
    expected = answers(recomputed(engine), 512)
    assert len(expected[3][1]) == 3
    for prompt_tokens in (1, 7, 64):
        assert answers(EngineModel(engine, SLOTS, LENGTH), prompt_tokens) == expected


@pytest.mark.parametrize("name", WITH_STATES)
def test_logits_after_each_part_of_a_row_are_those_of_the_whole_row(name: str) -> None:
    engine = make_engine(Case(name))
    model, whole = EngineModel(engine, SLOTS, LENGTH), recomputed(engine)
    row = PROMPTS[0]
    start = 0
    for count in (1, 7, 1, 60, 1):
        feed = [Feed(2, start, row[start : start + count])]
        expected = whole.extend(feed)
        difference = (model.extend(feed) - expected).abs().max()
        assert difference <= 1e-5 * expected.abs().max()
        start += count
