"""Kernel launches of a training step at the shapes of an 8B Llama and of a mixture. Tensors have shapes, but no elements."""

from collections import Counter
from typing import Any

import pytest
import torch

from megaconv.model.fields import from_fields
from megaconv.model.layout import Layout
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import Balancing, ModelOptions, OptimizerOptions, Recompute
from tests.trainer.pretended_cuda.device import GPU, PretendedGpu
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld

LLAMA_8B: dict[str, Any] = {
    "hidden": 4096, "attention.heads": 32, "attention.kv_heads": 8, "attention.head_dim": 128, "mlp.ffn": 14336,
    "vocab": 128256, "max_positions": 8192, "norm.epsilon": 1e-5, "positions.theta": 5e5,
}  # fmt: skip
EXPERTS = {
    "layers.mlp": "experts",
    "experts.count": 8,
    "experts.per_token": 2,
    "experts.ffn": 14336,
}
MAMBA = {
    "layers.mixer": "mamba", "layers.mlp": "none", "positions.kind": "none", "mamba.heads": 128, "mamba.head_dim": 64,
    "mamba.groups": 8, "mamba.state": 128,
}  # fmt: skip
DELTA_NET = {
    "layers.mixer": "linear", "linear.key_heads": 16, "linear.value_heads": 32, "linear.key_dim": 128, "linear.value_dim": 128,
    "linear.conv": 4, "attention.qk_norm": True, "attention.output_gate": True, "norm.zero_centered": True,
}  # fmt: skip
MODELS = {
    "llama": LLAMA_8B,
    "mixtral": LLAMA_8B | EXPERTS,
    "mamba2": LLAMA_8B | MAMBA,
    "qwen3_5": LLAMA_8B | DELTA_NET,
}
DROPPING = Balancing(capacity_factor=1.25)
PADDED = Balancing(capacity_factor=1.25, pads=True)
SEQUENCE = 8192


def _launches(
    _rank: int,
    layers: int,
    recompute: Recompute,
    model: str = "llama",
    balance: Balancing = DROPPING,
) -> tuple[Counter[str], Counter[str]]:
    """Return the launches and the waits of a step with one sequence."""
    config = from_fields(model, {"layers.count": layers, **MODELS[model]})
    options = ModelOptions(dtype="bfloat16", recompute=recompute, balance=balance)
    with PretendedGpu(shapes_only=True) as record:
        grid = make_grid(Layout(stage_layers=(layers,)), 1, GPU)
        engine = Engine(config, grid, options, OptimizerOptions())
        tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64, device=GPU)
        record.clear()
        engine.train_step([Microbatch(tokens, tokens)], lr=1e-4)
        return Counter(record.launches), Counter(record.waits)


BUDGETS = {
    "kept": (Recompute(), 47),
    "selective": (Recompute("selective"), 51),
    "full": (Recompute("full"), 64),
}


@pytest.mark.parametrize(
    ("recompute", "budget"),
    [
        pytest.param(*budget, id=name, marks=[] if name == "kept" else [pytest.mark.slow])
        for name, budget in BUDGETS.items()
    ],
)
def test_a_layer_of_an_8b_model_has_few_launches(
    gpu_world: PretendedWorld, recompute: Recompute, budget: int
) -> None:
    """Forward, backward and update of one layer more. The gradient norm is one operation for all parameters."""
    one, two = (gpu_world.run(1, _launches, layers, recompute)[0][0] for layers in (1, 2))
    of_layer = two - one
    assert sum(of_layer.values()) <= budget, of_layer
    times = 2 if recompute.granularity == "full" else 1
    assert of_layer["_scaled_dot_product_flash_attention"] == times
    assert two["_foreach_norm"] == 1
    assert two["_fused_adamw_"] <= 3, "one for each group of parameters"


@pytest.mark.parametrize(
    ("balance", "recompute", "budget", "waits"),
    [
        pytest.param(PADDED, Recompute(), 118, 0, id="padded"),
        pytest.param(PADDED, Recompute("full"), 179, 0, id="padded, full", marks=pytest.mark.slow),
        pytest.param(DROPPING, Recompute(), 100, 1, id="not padded", marks=pytest.mark.slow),
    ],
)
def test_a_layer_of_experts_has_few_launches_and_no_wait_if_they_are_padded(
    gpu_world: PretendedWorld, balance: Balancing, recompute: Recompute, budget: int, waits: int
) -> None:
    """Padding takes 18 launches more, and no time of the host."""
    (one, waits_of_one), (two, waits_of_two) = (
        gpu_world.run(1, _launches, layers, recompute, "mixtral", balance)[0] for layers in (1, 2)
    )
    of_layer = two - one
    assert sum(of_layer.values()) <= budget, of_layer
    assert of_layer["_grouped_mm"] == (8 if recompute.granularity else 6)
    assert sum(waits_of_two.values()) - sum(waits_of_one.values()) == waits


@pytest.mark.slow
@pytest.mark.parametrize(("model", "budget"), [("mamba2", 1265), ("qwen3_5", 3000)])
def test_launches_of_a_scan_in_torch(gpu_world: PretendedWorld, model: str, budget: int) -> None:
    """States pass through 128 chunks one after the other: forward, once more for the backward pass, and back."""
    one, two = (gpu_world.run(1, _launches, layers, Recompute(), model)[0][0] for layers in (1, 2))
    assert sum((two - one).values()) <= budget
