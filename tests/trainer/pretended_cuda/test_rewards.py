"""Reward models on pretended GPUs learn from pairs of answers what they learn on CPUs, and are evaluated as there."""

import pytest

from megatron_lite.objectives.score_loss import FIGURES
from megatron_lite.settings.options import LoRA
from tests.trainer.parallel.small import FULL
from tests.trainer.parallel.small_rewards import RewardCase
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.steps import MICROBATCHES, Scored, take_scored_steps
from tests.trainer.pretended_cuda.test_same_results import BF16, LAYERS, require_same

ADAPTERS = ("lora", LoRA(rank=2, alpha=4.0, dropout=0.2))
ADAPTERS_ALONE = ("lora", LoRA(rank=2, alpha=4.0))
RING, GATHER, HEADS = (("context", how) for how in ("p2p", "all_gather", "a2a"))

QUICK = [
    RewardCase("qwen3"),
    RewardCase("llama", options=(ADAPTERS,)),
    RewardCase("qwen3", tp=2, sequence_parallel=True),
    RewardCase("qwen3", pp=2, options=(ADAPTERS_ALONE,)),
]
GRID = [
    RewardCase("qwen3", center=0.0, margins=False),
    RewardCase("qwen3", recompute=FULL, options=(BF16,)),
    RewardCase("qwen3", kind="muon"),
    RewardCase("gpt2"),
    RewardCase("gemma3"),
    RewardCase("mixtral"),
    RewardCase("mixtral", options=(BF16, ADAPTERS_ALONE)),
    RewardCase("qwen3", tp=2),
    RewardCase("qwen3", tp=2, sequence_parallel=True, options=(ADAPTERS,)),
    RewardCase("qwen3", tp=2, options=(BF16, ADAPTERS)),
    RewardCase("qwen3", pp=2),
    RewardCase("gpt2", pp=2, recompute=FULL),
    RewardCase("qwen3", pp=2, vpp=2),
    RewardCase("qwen3", cp=2, options=(BF16, RING)),
    RewardCase("qwen3", cp=2, options=(BF16, GATHER)),
    RewardCase("qwen3", cp=2, options=(HEADS, ADAPTERS_ALONE)),
    RewardCase("qwen3", dp=2, distributed=True),
    RewardCase("qwen3", dp=2, distributed=True, zero=3),
    RewardCase("qwen3", dp=2, distributed=True, options=(ADAPTERS,)),
    RewardCase("mixtral", dp=2, ep=2, distributed=True),
    RewardCase("qwen3", tp=2, pp=2, dp=2, sequence_parallel=True, distributed=True),
]


def _require_same(scored: Scored, case: RewardCase) -> None:
    in_bf16, by_muon = BF16 in case.options, case.kind == "muon"
    of_loss = 1e-2 if in_bf16 else 1e-4 if by_muon else 1e-5
    require_same(scored.steps, of_loss=of_loss, of_norm=5e-2 if in_bf16 or by_muon else 1e-4)
    # Scores near 0 are sums of larger numbers.
    of_figures = 5e-2 if in_bf16 else 2e-3 if by_muon else 5e-5
    for found, expected in zip(scored.figures_on_gpu, scored.figures_on_cpu, strict=True):
        assert set(FIGURES) <= set(expected)
        # A pair whose scores are equal but for rounding changes the accuracy.
        names = set(expected) - ({"score_accuracy"} if in_bf16 else set())
        for name in names:
            near = pytest.approx(expected[name], rel=of_figures, abs=of_figures)
            assert found[name] == near, name
    assert not scored.unpinned


def _require_few_waits(scored: Scored, case: RewardCase) -> None:
    """One wait for a step and for an evaluation, and one for each layer of experts and microbatch."""
    of_experts = LAYERS * MICROBATCHES if case.model == "mixtral" else 0
    assert sum(scored.steps.waits.values()) == 1 + of_experts, scored.steps.waits
    assert sum(scored.waits.values()) == 1 + of_experts, scored.waits


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in GRID)],
    ids=str,
)
def test_a_reward_model_learns_as_on_a_cpu(gpu_world: PretendedWorld, case: RewardCase) -> None:
    """Loss, gradients and figures are those of a CPU, and no step or evaluation copies pageable memory."""
    ranks: list[Scored] = gpu_world.run(case.world, take_scored_steps, case)
    for scored in ranks:
        _require_same(scored, case)
        if case.world == 1:
            _require_few_waits(scored, case)
