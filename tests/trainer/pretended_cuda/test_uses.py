"""Further uses of a pretended GPU: preferences, generation, and saves. They give the results of a CPU."""

from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from megaconv.model.layout import Layout
from megatron_lite.checkpoint.rank_state import rank_snapshot
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.inference.batching import Answer, generate
from megatron_lite.inference.beams import BeamSettings
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions
from tests.trainer.parallel import test_preference as preference
from tests.trainer.parallel.small import MODELS, Case, make_engine, own_batches
from tests.trainer.pretended_cuda.collectives import through_gloo
from tests.trainer.pretended_cuda.device import GPU, PretendedGpu
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld

CPU = torch.device("cpu")
STEPS = 2


def prefer(device: torch.device) -> tuple[list[list[float]], list[float]]:
    engine = preference.make(preference.Case(), device)
    known = preference.references(engine, 0).cpu()
    reports = [
        engine.train_step(preference.own(engine, 0, known), preference.LR) for _ in range(STEPS)
    ]
    engine.finish()
    return known.tolist(), [report.loss for report in reports]


def _prefer_on_both(_rank: int) -> Any:
    on_cpu = prefer(CPU)
    with PretendedGpu():
        return on_cpu, prefer(GPU)


def test_preferences_are_learned_as_on_a_cpu(gpu_world: PretendedWorld) -> None:
    ((known, losses), (found, found_losses)) = gpu_world.run(1, _prefer_on_both)[0]
    for row, expected in zip(found, known, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    assert found_losses == pytest.approx(losses, rel=1e-5)


LENGTH, SLOTS = 32, 2
PROMPTS = ((5, 9, 30), (11, 12, 13, 14, 15, 16))
REQUESTS = [
    *(Request(prompt, 3 + number, Sampling(0)) for number, prompt in enumerate(PROMPTS)),
    Request(PROMPTS[0], 3, Sampling(0.8, top_k=20, top_p=0.9, seed=3), log_probs=2),
    Request(PROMPTS[1], 3, beams=BeamSettings(2)),
]


Generated = tuple[list[Answer], list[Answer], list[Tensor]]
"""The answers in one running batch, the answers one by one, and scores of the prompts."""


def generated(rank: int, model: str, device: torch.device, tp: int = 1) -> Generated | None:
    """Return what is generated; None on ranks that follow."""
    config = MODELS[model]
    layout = Layout(tp, stage_layers=(config.layer_count,))
    grid = make_grid(layout, 1, device, experts=config.experts.count > 0)
    options = ModelOptions(dtype="float32", trains=False, vocab_divisor=4)
    engine = Engine(config, grid, options, None)
    init_weights(engine, std=0.3, seed=5)
    engine_model = EngineModel(engine, SLOTS, LENGTH)
    if rank:
        engine_model.follow()
        return None
    together = generate(engine_model, REQUESTS)
    alone = [generate(engine_model, [request])[0] for request in REQUESTS]
    scores = [scored.log_probs for scored in engine_model.score(PROMPTS, 2)]
    engine_model.close()
    return together, alone, scores


def _generate_on_both(rank: int, model: str, tp: int = 1) -> Any:
    on_cpu = generated(rank, model, CPU, tp)
    with PretendedGpu(), through_gloo():
        return on_cpu, generated(rank, model, GPU, tp)


def require_same_tokens(on_cpu: Generated, on_gpu: Generated) -> None:
    for expected, found in zip(on_cpu[:2], on_gpu[:2], strict=True):
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
        beams = [[beam.tokens for beam in answers[-1].beams] for answers in (found, expected)]
        assert beams[0] == beams[1] != []
    for expected_scores, scores in zip(on_cpu[2], on_gpu[2], strict=True):
        torch.testing.assert_close(scores, expected_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=[] if model == "deepseek_v3" else [pytest.mark.slow])
        for model in ("deepseek_v3", "gemma3", "gpt2", "gpt_oss", "llama", "mixtral")
    ],
)
def test_generated_tokens_are_those_of_a_cpu(gpu_world: PretendedWorld, model: str) -> None:
    """Tokens are generated one by one and in a running batch. Sampling works too, because tokens are drawn on the
    CPU."""
    ((on_cpu, on_gpu),) = gpu_world.run(1, _generate_on_both, model)
    require_same_tokens(on_cpu, on_gpu)


@pytest.mark.slow
def test_two_ranks_generate_as_two_cpus(gpu_world: PretendedWorld) -> None:
    (found, _) = gpu_world.run(2, _generate_on_both, "qwen3", 2)
    require_same_tokens(*found)


class Copies(NamedTuple):
    """Copies from pageable memory, for which the host waits, while texts are generated."""

    after_layers: int
    """Those between a pass's layers and its head."""
    of_beams: int
    """Those that move the caches of beams in a pass."""


def _copies(_rank: int) -> Copies:
    config = MODELS["llama"]
    late: Counter[str] = Counter()
    with PretendedGpu() as record:
        grid = make_grid(Layout(stage_layers=(config.layer_count,)), 1, GPU)
        engine = Engine(config, grid, ModelOptions(dtype="float32", trains=False), None)
        init_weights(engine, std=0.3, seed=5)
        model = EngineModel(engine, SLOTS, LENGTH)
        compute = engine.last_stage

        def last_stage(*given: Any) -> Any:
            found = compute(*given)
            assert found is not None
            chunk, hidden = found
            before = Counter(record.unpinned)

            def logits(payload: Any) -> Tensor:
                late.update(record.unpinned - before)
                made: Tensor = chunk.logits(payload)
                return made

            return SimpleNamespace(logits=logits), hidden

        with mock.patch.object(engine, "last_stage", last_stage):
            generate(model, REQUESTS)
        record.clear()
        model.cache.copy([0, 1], [1, 0], 5)
    return Copies(late.total(), record.unpinned.total())


def test_a_pass_of_generation_does_not_wait_between_its_layers_and_its_head(
    gpu_world: PretendedWorld,
) -> None:
    (found,) = gpu_world.run(1, _copies)
    assert found.after_layers == 0
    assert found.of_beams <= 2


def _save_and_train(_rank: int, root: Path, asynchronous: bool) -> dict[str, torch.Tensor]:
    """Save after the first step, and train on. Returns the weights of the first step."""
    case = Case("llama")
    with PretendedGpu():
        engine = make_engine(case, device=GPU)
        batches = [batch.to(GPU) for batch in own_batches(case, 0, engine)]
        saver = Saver(root, "torch", 0, None, {}, asynchronous=asynchronous)
        engine.train_step(batches, lr=1e-3)
        engine.finish()
        weights = {name: tensor.cpu().clone() for _, name, tensor in engine.parameters()}
        common = {"iteration": 1, "args": Namespace()}
        saver.save(rank_snapshot(engine, common, with_optimizer=False, impl="local"))
        engine.train_step(batches, lr=1e-3)
        saver.finish()
        engine.finish()
    return weights


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_has_the_weights_of_its_step(
    gpu_world: PretendedWorld, tmp_path: Path, asynchronous: bool
) -> None:
    """An asynchronous save waits for its copies to pinned memory. Until then that memory holds NaN."""
    (weights,) = gpu_world.run(1, _save_and_train, tmp_path, asynchronous)
    file = tmp_path / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    model = torch.load(file, weights_only=False)["model"]
    saved = {name: tensor for name, tensor in model.items() if isinstance(tensor, torch.Tensor)}
    checked = set(saved) & set(weights)
    assert len(checked) > 10
    for name in checked:
        assert torch.equal(saved[name], weights[name]), name
