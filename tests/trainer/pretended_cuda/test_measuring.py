"""Layers, experts and channels are measured on a pretended GPU as on a CPU."""

from typing import Any

import pytest
import torch

from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.forward import channel_scores, expert_scores, influence
from megatron_lite.forward.rows import batches
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions
from tests.trainer.parallel.small import MODELS
from tests.trainer.pretended_cuda.device import GPU, PretendedGpu
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.test_uses import CPU

ROWS = [tuple(range(7, 19)), (9, 50, 3)]
Measured = tuple[list[float], dict[str, list[int]], dict[str, list[float]]]
"""The change by each layer, the tokens of each expert, and the scores of experts and channels by name."""


def measured(model: str, device: torch.device) -> Measured:
    config = MODELS[model]
    grid = make_grid(Layout(stage_layers=(config.layer_count,)), 1, device, experts=True)
    options = ModelOptions(dtype="float32", trains=False, vocab_divisor=4)
    engine = Engine(config, grid, options, None)
    init_weights(engine, std=0.3, seed=5)
    passes = [batch.to(device) for batch in batches(config, ROWS, 2)]
    layers = influence.measure(engine, passes, 1).layers
    experts = expert_scores.measure(engine, passes).layers
    tokens = {layer: list(found.tokens) for layer, found in experts.items()}
    fields = ["hidden", "mlp.ffn", "experts.ffn", "experts.shared_ffn"]
    if all(kind.heads is None for kind in config.layers):
        fields.append("attention.heads")
    channels = channel_scores.measure(engine, passes, fields)
    scores = {layer: found.scores for layer, found in experts.items()}
    scores |= {place: found.tolist() for place, found in channels.scores.items()}
    return list(layers), tokens, scores


def _on_both(_rank: int, model: str) -> Any:
    on_cpu = measured(model, CPU)
    with PretendedGpu():
        return on_cpu, measured(model, GPU)


@pytest.mark.parametrize(
    "model",
    ["further tokens", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama4", "gpt_oss", "gemma4"))],
)  # fmt: skip
def test_layers_experts_and_channels_are_measured_as_on_a_cpu(
    gpu_world: PretendedWorld, model: str
) -> None:
    ((layers, tokens, scores), found) = gpu_world.run(1, _on_both, model)[0]
    assert found[0] == pytest.approx(layers, rel=1e-4, abs=1e-6)
    assert found[1] == tokens
    for name, expected in scores.items():
        assert found[2][name] == pytest.approx(expected, rel=1e-4, abs=1e-6)
