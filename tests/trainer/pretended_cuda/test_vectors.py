"""Embedding models on pretended GPUs learn from queries what they learn on CPUs, and are evaluated as there."""

import pytest

from megatron_lite.settings.options import LoRA
from tests.trainer.parallel.small import FULL
from tests.trainer.parallel.small_vectors import VectorCase
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.steps import Scored, take_vector_steps
from tests.trainer.pretended_cuda.test_same_results import BF16, require_same

ADAPTERS = ("lora", LoRA(rank=2, alpha=4.0))
QUICK = [
    VectorCase("qwen3"),
    VectorCase("llama", dp=2, pooling="mean", options=(ADAPTERS,)),
]
GRID = [
    VectorCase("qwen3", options=(BF16,)),
    VectorCase("mixtral", pooling="mean"),
    VectorCase("gpt2", recompute=FULL),
    VectorCase("qwen3", tp=2, sequence_parallel=True),
    VectorCase("qwen3", pp=2, options=(ADAPTERS,)),
    VectorCase("gpt2", pp=2),
    VectorCase("qwen3", dp=2, distributed=True, zero=3),
    VectorCase("mixtral", dp=2, ep=2, distributed=True),
]


def _require_same(scored: Scored, case: VectorCase) -> None:
    in_bf16 = BF16 in case.options
    require_same(scored.steps, of_loss=1e-2 if in_bf16 else 1e-5, of_norm=5e-2 if in_bf16 else 1e-4)
    for found, expected in zip(scored.figures_on_gpu, scored.figures_on_cpu, strict=True):
        names = expected.keys() - ({"accuracy"} if in_bf16 else set())
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=5e-2 if in_bf16 else 1e-5), name
    assert not scored.unpinned


def _check(case: VectorCase, gpu_world: PretendedWorld) -> list[Scored]:
    found: list[Scored] = gpu_world.run(case.world, take_vector_steps, case)
    for scored in found:
        _require_same(scored, case)
    return found


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_steps_and_evaluations_are_those_of_cpus(
    case: VectorCase, gpu_world: PretendedWorld
) -> None:
    _check(case, gpu_world)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
def test_steps_and_evaluations_of_every_kind_are_those_of_cpus(
    case: VectorCase, gpu_world: PretendedWorld
) -> None:
    _check(case, gpu_world)


@pytest.mark.parametrize(("dp", "waits"), [(1, 1), (2, 2)])
def test_a_step_waits_once_and_ranks_once_more(
    dp: int, waits: int, gpu_world: PretendedWorld
) -> None:
    """Ranks wait for the numbers of each other's rows."""
    for scored in _check(VectorCase("qwen3", dp=dp), gpu_world):
        assert sum(scored.steps.waits.values()) == waits, scored.steps.waits
