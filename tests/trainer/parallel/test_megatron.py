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
from megatron_lite.engine import Engine, StepReport
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions, OptimizerOptions
from tests.trainer.parallel.core_oracle import BETAS, CLIP, EPS, WEIGHT_DECAY, train_with_core
from tests.transformers_oracle import VARIANTS, VOCAB, create

pytestmark = pytest.mark.oracle
STEPS, LR = 10, 1e-3


MODELS = {"llama, tied": "llama, tied, rope scaling of llama 3", "qwen3": "qwen3", "gpt2": "gpt2"}


def test_ten_steps_are_those_of_megatron_core(tmp_path: Path) -> None:
    tokens = torch.randint(VOCAB, (STEPS, 4, 2, 33), generator=torch.Generator().manual_seed(8))
    for model, variant in MODELS.items():
        create(VARIANTS[variant], tmp_path / model)
        # Not padded: in Megatron padding takes part in the softmax.
        unpadded: dict[str, Any] = {"saver": "core", "transformer_impl": "local", "vocab_divisor": 1}
        megaconv.convert(tmp_path / model, tmp_path / f"{model}, core", **unpadded)
    checkpoints = [tmp_path / f"{model}, core" for model in MODELS]
    for checkpoint, expected in zip(checkpoints, train_with_core(checkpoints, tokens, LR, tmp_path), strict=True):
        for step, (report, (loss, norm)) in enumerate(zip(train(checkpoint, tokens), expected, strict=True)):
            assert report.loss == pytest.approx(loss, rel=1e-5), f"{checkpoint.name}, step {step}"
            assert report.grad_norm == pytest.approx(norm, rel=1e-4), f"{checkpoint.name}, step {step}"


def train(directory: Path, tokens: torch.Tensor) -> Iterator[StepReport]:
    """The same with ours."""
    checkpoint = open_checkpoint(directory)
    grid = make_grid(Layout(stage_layers=(checkpoint.config.layer_count,)), 1, torch.device("cpu"))
    optimizer = OptimizerOptions(betas=BETAS, eps=EPS, clip_grad=CLIP)
    engine = Engine(checkpoint.config, grid, ModelOptions(dtype="float32"), optimizer)
    load_weights(engine, checkpoint.tensors)
    for step in tokens:
        yield engine.train_step([Microbatch(batch[:, :-1], batch[:, 1:]) for batch in step], LR, WEIGHT_DECAY)
