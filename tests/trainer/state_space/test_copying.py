"""Models with a state learn to copy a token from 12 positions before, which a model that sees one token can't."""

from math import log

import pytest
import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megaconv.model.fields import from_fields
from megaconv.model.layout import Layout
from megaconv.model.pattern import layer_fields
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions, OptimizerOptions

STEPS, WARMUP, LAST = 50, 5, 5
VOCAB, DISTANCE, ROWS, TOKENS = 4, 12, 64, 24
BEST_WITHOUT_MEMORY = log(VOCAB)
"""The entropy of a token for a model that sees only the token before it."""


def config(pattern: str) -> ModelConfig:
    sizes = {
        "hidden": 64, "vocab": VOCAB, "max_positions": TOKENS, "norm.epsilon": 1e-5, "positions.kind": "none", "attention.heads": 4,
        "attention.kv_heads": 2, "attention.head_dim": 16, "mlp.ffn": 256, "mlp.activation": "relu2", "mlp.gated": False,
        "mamba.heads": 8, "mamba.head_dim": 16, "mamba.groups": 2, "mamba.state": 16,
    }  # fmt: skip
    return from_fields("nemotron_h", {**sizes, **layer_fields(pattern, "the test")})


def rows(step: int) -> Tensor:
    """int64 [ROWS, TOKENS + 1]: DISTANCE random tokens, again and again."""
    generator = torch.Generator().manual_seed(step)
    period = torch.randint(VOCAB, (ROWS, DISTANCE), generator=generator)
    times = -(-(TOKENS + 1) // DISTANCE)
    return period.repeat(1, times)[:, : TOKENS + 1]


def losses(pattern: str) -> list[float]:
    """The loss of each step."""
    grid = make_grid(Layout(stage_layers=(len(pattern),)), 1, torch.device("cpu"))
    optimizer = OptimizerOptions(betas=(0.9, 0.95))
    engine = Engine(config(pattern), grid, ModelOptions(dtype="float32"), optimizer)
    init_weights(engine, std=0.3, seed=5)
    found = []
    for step in range(STEPS):
        tokens = rows(step)
        lr = 1e-2 * min(1.0, (step + 1) / WARMUP)
        batch = Microbatch(tokens[:, :-1], tokens[:, 1:])
        found.append(engine.train_step([batch], lr=lr, weight_decay=0.1).loss)
    engine.grid.close()
    return found


@pytest.mark.slow
def test_mamba_and_a_hybrid_copy_after_50_steps_and_mlps_of_the_same_size_do_not() -> None:
    mamba, hybrid, mlps = (losses(pattern) for pattern in ("MMMM", "M*M-", "----"))
    ends = [sum(each[-LAST:]) / LAST for each in (mamba, hybrid, mlps)]
    assert ends[2] > BEST_WITHOUT_MEMORY - 0.005
    for with_state, end in zip((mamba, hybrid), ends, strict=False):
        assert end < 0.95 * with_state[0]
        assert end < BEST_WITHOUT_MEMORY - 0.005
        assert end < ends[2] - 0.015
