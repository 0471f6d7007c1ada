"""Training on images on a pretended GPU gives the results of a CPU, and they add no waits."""

from functools import partial

import pytest

from tests.trainer.parallel.small import FULL, Case
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.steps import take_steps
from tests.trainer.pretended_cuda.test_same_results import BF16, require_same


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3"),
        Case("mimo", pp=2),
        pytest.param(Case("qwen3", recompute=FULL, options=(BF16,)), marks=pytest.mark.slow),
        pytest.param(Case("qwen3", tp=2, sequence_parallel=True), marks=pytest.mark.slow),
        pytest.param(Case("qwen3", cp=2, options=(BF16,)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_images_are_trained_as_on_a_cpu(gpu_world: PretendedWorld, case: Case) -> None:
    in_bf16 = BF16 in case.options
    for steps in gpu_world.run(case.world, partial(take_steps, images=True), case):
        require_same(steps, of_loss=1e-2 if in_bf16 else 1e-5, of_norm=5e-2 if in_bf16 else 1e-4)
        assert sum(steps.waits.values()) <= 1, steps.waits
