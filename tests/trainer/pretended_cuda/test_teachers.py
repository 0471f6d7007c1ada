"""A student on pretended GPUs learns from its teacher what it learns on CPUs."""

from functools import partial

import pytest

from tests.trainer.parallel.small import FULL, Case
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.steps import Steps, take_steps
from tests.trainer.pretended_cuda.test_same_results import BF16, PLAIN_LORA, require_same

TAKE = partial(take_steps, taught=True)
QUICK = [
    Case("qwen3", options=(BF16, ("loss_rows", 8))),
    Case("qwen3", tp=2, sequence_parallel=True),
]
GRID = [
    Case("gpt2", recompute=FULL),
    Case("qwen3", pp=2, options=(("lora", PLAIN_LORA),)),
    Case("qwen3", cp=2, options=(BF16,)),
    Case("qwen3", dp=2, distributed=True, zero=3),
    Case("qwen3", tp=2, pp=2, vpp=2, sequence_parallel=True),
]


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in GRID)],
    ids=str,
)
def test_a_student_learns_as_on_a_cpu(gpu_world: PretendedWorld, case: Case) -> None:
    """A step waits for the device once: the teacher's passes add no wait."""
    in_bf16 = BF16 in case.options
    ranks: list[Steps] = gpu_world.run(case.world, TAKE, case)
    for steps in ranks:
        require_same(steps, of_loss=1e-2 if in_bf16 else 1e-5, of_norm=5e-2 if in_bf16 else 1e-4)
        assert sum(steps.waits.values()) == 1, steps.waits
