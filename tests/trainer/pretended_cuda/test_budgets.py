"""Budgets of a training step on a GPU: how often the host waits for the device, and copies from pageable memory."""

import pytest

from tests.trainer.parallel.small import Case
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.steps import MICROBATCHES, take_steps
from tests.trainer.pretended_cuda.test_same_results import BALANCED, BF16, FURTHER

LAYERS = 4
DENSE = {name: FURTHER[name] for name in ("full recomputation", "selective recomputation")}
EXPERTS = {
    "plain": FURTHER["experts in bf16"],
    "recomputed and balanced": FURTHER["experts, recomputed and balanced"],
    "gathered": Case("mixtral", options=(BF16, BALANCED, ("dispatcher", "allgather"))),
}


@pytest.mark.parametrize("case", DENSE.values(), ids=DENSE)
def test_a_dense_model_waits_once_a_step(gpu_world: PretendedWorld, case: Case) -> None:
    (steps,) = gpu_world.run(1, take_steps, case)
    assert sum(steps.waits.values()) == 1, steps.waits
    assert not steps.unpinned


@pytest.mark.parametrize("case", EXPERTS.values(), ids=EXPERTS)
def test_experts_add_one_wait_for_each_layer_and_microbatch(
    gpu_world: PretendedWorld, case: Case
) -> None:
    (steps,) = gpu_world.run(1, take_steps, case)
    assert sum(steps.waits.values()) == 1 + LAYERS * MICROBATCHES, steps.waits
    assert not steps.unpinned
