"""Drafts of MTP layers on the pretended GPU: the tokens, guesses and counts of a CPU, with few copies."""

from dataclasses import astuple
from typing import Any, NamedTuple

import pytest
import torch

from megaconv.model.layout import Layout
from megatron_lite.engine import Engine
from megatron_lite.inference.batching import generate
from megatron_lite.inference.drafting_model import DraftingModel
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.slots import Feed
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions
from tests.trainer.inference.test_drafting import LENGTH, REQUESTS, learned
from tests.trainer.parallel.small import CPU, MODELS
from tests.trainer.pretended_cuda.device import GPU, PretendedGpu
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld

SLOTS, DRAFTS = 2, 3
READ = [Feed(0, 0, (5, 9, 11)), Feed(1, 0, (7, 2))]
KNOWN = [Feed(0, 0, (9, 11, 30)), Feed(1, 0, (2, 40))]
"""The tokens that follow those of READ."""


class Drafted(NamedTuple):
    """Tokens of all answers, the counts of drafts, and guesses behind two rows."""

    tokens: list[list[int]]
    counts: tuple[int, ...]
    guesses: list[tuple[int, ...]]


def learned_weights(name: str) -> dict[str, Any]:
    """Return the weights of a model that has learned that each token has one follower."""
    return {key: tensor.detach().clone() for _, key, tensor in learned(name).parameters()}


def engine_of(name: str, weights: dict[str, Any], device: torch.device) -> Engine:
    """Make an engine that generates."""
    config = MODELS[name]
    layout = Layout(stage_layers=(config.layer_count,))
    grid = make_grid(layout, 1, device, experts=config.experts.count > 0)
    options = ModelOptions(dtype="float32", trains=False, vocab_divisor=4)
    engine = Engine(config, grid, options, None)
    for _, key, tensor in engine.parameters():
        tensor.copy_(weights[key])
    return engine


def drafted_by(engine: Engine) -> Drafted:
    """Return what a model with these weights generates with drafts."""
    model = DraftingModel(engine, SLOTS, LENGTH, DRAFTS)
    tokens = [answer.tokens for answer in generate(model, REQUESTS)]
    model.extend(READ)
    return Drafted(tokens, astuple(model.counts), model.draft(KNOWN, DRAFTS))


def _draft_on_both(_rank: int, name: str) -> Any:
    weights = learned_weights(name)
    on_cpu = engine_of(name, weights, CPU)
    plain = [answer.tokens for answer in generate(EngineModel(on_cpu, SLOTS, LENGTH), REQUESTS)]
    expected = drafted_by(on_cpu)
    with PretendedGpu():
        return plain, expected, drafted_by(engine_of(name, weights, GPU))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mimo", "further tokens", "delta nets, experts", "hybrid, further tokens"]
)
def test_drafts_and_answers_are_those_of_a_cpu(gpu_world: PretendedWorld, name: str) -> None:
    """Greedy and sampled answers in a running batch. Drafts are accepted."""
    ((plain, expected, found),) = gpu_world.run(1, _draft_on_both, name)
    assert found == expected
    assert found.tokens == plain
    _, drafted, accepted = found.counts
    assert drafted / 4 < accepted


def _copies(_rank: int, name: str) -> list[int]:
    """Return the copies from pageable memory of one draft, and of DRAFTS drafts."""
    found = []
    with PretendedGpu() as record:
        engine = engine_of(name, _Zeros(), GPU)
        for count in (1, DRAFTS):
            model = DraftingModel(engine, SLOTS, LENGTH, DRAFTS)
            model.extend(READ)
            record.clear()
            model.draft(KNOWN, count)
            found.append(record.unpinned.total())
    return found


class _Zeros(dict[str, Any]):
    """Weights that are zero."""

    def __missing__(self, key: str) -> Any:
        return torch.zeros(())


def test_further_drafts_copy_nothing_to_the_gpu(gpu_world: PretendedWorld) -> None:
    """Each copy from pageable memory would wait for the draft before."""
    ((of_one, of_several),) = gpu_world.run(1, _copies, "mimo")
    assert of_several == of_one
