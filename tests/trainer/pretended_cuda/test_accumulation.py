"""Gradients of matrices are added to their float32 sums inside the products."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_lite.products import accumulating
from megatron_lite.settings.options import Recompute
from tests.trainer.parallel.small import FULL, SELECTIVE, Case
from tests.trainer.pretended_cuda.device import GPU, PretendedGpu
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.steps import MICROBATCHES, Steps, take_steps
from tests.trainer.pretended_cuda.test_same_results import BF16, LAYERS

DENSE = Case("qwen3", options=(BF16,))
EXPERTS = Case("mixtral", options=(BF16,))
MATRICES = 4
"""Matrices of a dense layer."""


def both(world: PretendedWorld, case: Case) -> tuple[Steps, Steps]:
    """Return the steps with and without additions inside the products."""
    (fused,) = world.run(1, take_steps, case)
    (plain,) = world.run(1, take_steps, replace(case, fuses=False))
    return fused, plain


def added(steps: Steps) -> int:
    """Return how often gradients were added to a sum, or replaced it, by an operation of their own."""
    return steps.launches.get("add_", 0) + steps.launches.get("copy_", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute",
    [pytest.param(each, marks=pytest.mark.slow) for each in (Recompute(), FULL)] + [SELECTIVE],
    ids=["kept", "full", "selective"],
)
def test_no_matrix_of_a_layer_is_added_by_itself(
    gpu_world: PretendedWorld, recompute: Recompute
) -> None:
    """bf16 products that are not rounded: the norms differ from rounded ones by less than bf16's precision."""
    fused, plain = both(gpu_world, replace(DENSE, recompute=recompute))
    assert added(plain) - added(fused) == MATRICES * LAYERS * MICROBATCHES
    for (loss, norm), (other_loss, other_norm) in zip(fused.on_gpu, plain.on_gpu, strict=True):
        assert loss == pytest.approx(other_loss, rel=2**-8)
        assert norm == pytest.approx(other_norm, rel=2**-7)


def test_all_experts_of_a_layer_are_added_at_once(gpu_world: PretendedWorld) -> None:
    """Two matrices of four experts: two additions in place of eight. The attention's matrices need none."""
    fused, plain = both(gpu_world, EXPERTS)
    assert added(plain) - added(fused) == (2 * 4 - 2 + 2) * LAYERS * MICROBATCHES
    for (loss, norm), (other_loss, other_norm) in zip(fused.on_gpu, plain.on_gpu, strict=True):
        assert loss == pytest.approx(other_loss, rel=2**-8)
        assert norm == pytest.approx(other_norm, rel=2**-7)


def _apex(x: Tensor, grad: Tensor, total: Tensor) -> None:
    """A stand-in with the arithmetic and the requirements of apex's function."""
    assert x.is_contiguous()
    assert grad.is_contiguous()
    assert total.is_contiguous()
    assert x.dtype == grad.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    total += grad.float().t() @ x.float()


def _add_by_apex(_rank: int) -> list[list[float]]:
    """Return sums by apex, by plain products, and the launches of a sum by apex."""
    module, function = accumulating.APEX
    installed = mock.patch.dict(sys.modules, {module: SimpleNamespace(**{function: _apex})})
    found = []
    with installed, mock.patch.object(accumulating, "_has_wide_addmm", return_value=False):
        with PretendedGpu():
            grad, x = (torch.randn(6, 4, device=GPU, dtype=torch.bfloat16) for _ in range(2))
            total = torch.full((4, 4), torch.nan, device=GPU)
            accumulating.add_product(total, grad.t(), x, replaces=True)
            accumulating.add_product(total, grad.t(), x)
            expected = 2 * (grad.float().t() @ x.float())
            found = [total.flatten().tolist(), expected.flatten().tolist()]
        accumulating.apex_kernel.cache_clear()
    return found


def test_apex_adds_if_torch_is_too_old(gpu_world: PretendedWorld) -> None:
    ((found, expected),) = gpu_world.run(1, _add_by_apex)
    assert found == pytest.approx(expected, rel=1e-5)
