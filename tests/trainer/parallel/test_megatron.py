"""Ten steps of training are those of Megatron core: its own model, optimizer, clipping and schedule, from the same files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.checkpoint import open_checkpoint
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.options import Balancing, ModelOptions, OptimizerOptions
from tests.trainer.parallel.core_oracle import BETAS, CLIP, EPS, WEIGHT_DECAY, train_with_core
from tests.transformers_oracle import MIXTURES, VARIANTS, VOCAB, create

pytestmark = pytest.mark.oracle
STEPS, LR = 10, 1e-3


MODELS = {
    "llama, tied": VARIANTS["llama, tied, rope scaling of llama 3"],
    "qwen3": VARIANTS["qwen3"],
    "gpt2": VARIANTS["gpt2"],
    "mixtral": MIXTURES["mixtral"],
    "deepseek_v3": MIXTURES["deepseek_v3"],
}
BIAS_RATE = 1e-3
"""Core moves the biases of experts by this much in each step where nobody says otherwise (moe_router_bias_update_rate)."""


@pytest.mark.slow
def test_ten_steps_are_those_of_megatron_core(tmp_path: Path) -> None:
    tokens = torch.randint(VOCAB, (STEPS, 4, 2, 33), generator=torch.Generator().manual_seed(8))
    for model, variant in MODELS.items():
        create(variant, tmp_path / model)
        # Not padded: in Megatron padding takes part in the softmax.
        unpadded: dict[str, Any] = {
            "saver": "core",
            "transformer_impl": "local",
            "make_vocab_size_divisible_by": 1,
        }
        megaconv.convert(tmp_path / model, tmp_path / f"{model}, core", **unpadded)
    checkpoints = [tmp_path / f"{model}, core" for model in MODELS]
    for checkpoint, expected in zip(
        checkpoints, train_with_core(checkpoints, tokens, LR, tmp_path), strict=True
    ):
        for step, (report, (loss, norm)) in enumerate(
            zip(train(checkpoint, tokens), expected, strict=True)
        ):
            assert report.loss == pytest.approx(loss, rel=1e-5), f"{checkpoint.name}, step {step}"
            assert report.grad_norm == pytest.approx(norm, rel=1e-4), (
                f"{checkpoint.name}, step {step}"
            )
    # What a comparison that leaves the biases of experts alone would find: another model, from the first other choice on.
    still = list(train(checkpoints[-1], tokens, bias_rate=0.0))
    assert (
        max(abs(report.loss / loss - 1) for report, (loss, _) in zip(still, expected, strict=True))
        > 2e-5
    )


def train(
    directory: Path, tokens: torch.Tensor, bias_rate: float = BIAS_RATE
) -> Iterator[StepReport]:
    """The same with ours."""
    checkpoint = open_checkpoint(directory)
    grid = make_grid(
        Layout(stage_layers=(checkpoint.config.layer_count,)), 1, torch.device("cpu"), experts=True
    )
    optimizer = OptimizerOptions(betas=BETAS, eps=EPS, clip_grad=CLIP)
    options = ModelOptions(dtype="float32", balance=Balancing(bias_rate=bias_rate))
    engine = Engine(checkpoint.config, grid, options, optimizer)
    load_weights(engine, checkpoint.tensors)
    for step in tokens:
        yield engine.train_step(
            [Microbatch(batch[:, :-1], batch[:, 1:]) for batch in step], LR, WEIGHT_DECAY
        )
