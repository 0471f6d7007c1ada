"""Two ranks on pretended GPUs give the losses of two ranks on CPUs, in each kind of parallelism."""

import pytest

from tests.trainer.parallel.small import FULL, Case
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.steps import Steps, take_steps
from tests.trainer.pretended_cuda.test_same_results import BF16, DORA, PADDED, require_same

RING, GATHER, HEADS = (("context", how) for how in ("p2p", "all_gather", "a2a"))

QUICK = [
    Case("llama", tp=2, sequence_parallel=True, recompute=FULL),
    Case("further tokens, tied", pp=2, masked=False),
    Case("qwen3", cp=2, options=(BF16, RING)),
    Case("mixtral", dp=2, ep=2, distributed=True, kind="muon", options=(BF16,)),
    Case("llama", dp=2, distributed=True, zero=3, recompute=FULL),
    Case("llama", tp=2, sequence_parallel=True, options=(("lora", DORA),)),
]
GRID = [
    Case("qwen3", tp=2),
    Case("gpt2", tp=2, sequence_parallel=True),
    Case("qwen3", pp=2, vpp=2),
    Case("llama", pp=2),
    Case("deepseek_v3", pp=2, recompute=FULL),
    Case("qwen3", cp=2, options=(BF16, GATHER)),
    Case("qwen3", cp=2, options=(HEADS,)),
    Case("gemma3", cp=2, masked=False, options=(BF16, RING)),
    Case("gpt_oss", cp=2, masked=False, options=(BF16, GATHER)),
    Case("qwen3", dp=2),
    Case("qwen3", dp=2, distributed=True),
    Case("qwen3", dp=2, distributed=True, kind="muon"),
    Case("qwen3", dp=2, distributed=True, zero=2),
    Case("qwen3", dp=2, distributed=True, zero=3),
    Case("mixtral", dp=2, ep=2, distributed=True, zero=3, options=(BF16,)),
    Case("qwen3", tp=2, kind="muon"),
    Case("mixtral", tp=2, sequence_parallel=True, options=(BF16,)),
    Case("mixtral", tp=2, ep=2, sequence_parallel=True, options=(BF16,)),
    Case("mixtral", dp=2, ep=2, options=(("dispatcher", "allgather"),)),
    Case("further tokens", pp=2),
    Case("qwen3", tp=2, pp=2, dp=2, sequence_parallel=True, distributed=True),
]


def check(world: PretendedWorld, case: Case) -> list[Steps]:
    in_bf16 = BF16 in case.options
    of_loss, of_norm = (1e-2, 5e-2) if in_bf16 else (1e-5, 1e-4)
    ranks: list[Steps] = world.run(case.world, take_steps, case)
    for steps in ranks:
        require_same(steps, of_loss=of_loss, of_norm=of_norm)
        assert not steps.unpinned
    return ranks


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_two_ranks_train_as_on_cpus(gpu_world: PretendedWorld, case: Case) -> None:
    check(gpu_world, case)


OF_PADDED_EXPERTS = [
    Case("mixtral", dp=2, ep=2, recompute=FULL, options=(BF16, PADDED)),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            Case("deepseek_v3", tp=2, ep=2, sequence_parallel=True, options=(BF16, PADDED)),
            Case("mixtral", tp=2, sequence_parallel=True, options=(BF16, PADDED)),
            Case("mixtral", dp=2, ep=2, options=(BF16, PADDED, ("dispatcher", "allgather"))),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_PADDED_EXPERTS, ids=str)
def test_ranks_with_padded_experts_wait_once_a_step(gpu_world: PretendedWorld, case: Case) -> None:
    """They exchange tokens, but no numbers of rows. The one wait is for the gradient norm."""
    for steps in check(gpu_world, case):
        assert sum(steps.waits.values()) == 1, steps.waits


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
def test_each_layout_trains_as_on_cpus(gpu_world: PretendedWorld, case: Case) -> None:
    check(gpu_world, case)
