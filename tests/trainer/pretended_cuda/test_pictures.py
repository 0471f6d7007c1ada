"""Training on images on a pretended GPU gives the results of a CPU, and they add no waits."""

from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_lite.models.pictures import Pictures, in_order
from tests.trainer.parallel.small import FULL, Case
from tests.trainer.pretended_cuda.device import GPU, PretendedGpu
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


def _every_second_row(device: torch.device) -> Tensor:
    """The vectors of every second sequence, of images that several sequences have."""
    torch.manual_seed(3)
    places, vectors = torch.rand(4, 8) < 0.5, torch.rand(6, 3)
    places, vectors = places.to(device), vectors.to(device)
    rows = in_order(places) % 6
    return Pictures(places, vectors, rows=rows).of(slice(1, None, 2)).spread().vectors


def _on_both(_rank: int) -> tuple[Tensor, Tensor, int]:
    """(vectors of a CPU, of a GPU, number of times that it was waited for)."""
    on_cpu = _every_second_row(torch.device("cpu"))
    with PretendedGpu() as now:
        on_gpu = _every_second_row(GPU)
        waits = sum(now.waits.values())
        return on_cpu, on_gpu.cpu(), waits


def test_images_of_some_sequences_are_taken_without_a_wait(gpu_world: PretendedWorld) -> None:
    ((expected, found, waits),) = gpu_world.run(1, _on_both)
    assert torch.equal(found, expected)
    assert not waits
