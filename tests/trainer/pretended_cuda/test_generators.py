"""Random numbers on a pretended GPU: generators have a state of their own, and dropout restores it."""

import pytest
import torch

from megatron_lite.models.rng import ATTENTION, At, Seed
from megatron_lite.parallel.tensor import TensorGroup
from tests.trainer.pretended_cuda.device import GPU, PretendedGpu
from tests.trainer.pretended_cuda.generators import WrongGenerator
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld

ALONE, PLACE = TensorGroup(), At(3, ATTENTION)


def _states(_rank: int) -> None:
    with PretendedGpu():
        generator = torch.Generator(GPU).manual_seed(5)
        state = generator.get_state()
        first = torch.rand(7, device=GPU, generator=generator).cpu()
        generator.set_state(state)
        again = torch.rand(7, device=GPU, generator=generator).cpu()
        assert torch.equal(first, again)
        assert torch.equal(first, torch.rand(7, generator=torch.Generator().manual_seed(5)))
        with pytest.raises(WrongGenerator):
            torch.rand(7, device=GPU, generator=torch.Generator())


def _default_generators(_rank: int) -> None:
    with PretendedGpu():
        torch.manual_seed(9)
        of_cpu, of_gpu = torch.get_rng_state(), torch.cuda.get_rng_state(GPU)
        drawn = torch.rand(3, device=GPU).cpu()
        assert torch.equal(torch.get_rng_state(), of_cpu), "the CPU's generator is another one"
        assert not torch.equal(torch.cuda.get_rng_state(GPU), of_gpu)
        torch.cuda.set_rng_state(of_gpu, GPU)
        assert torch.equal(drawn, torch.rand(3, device=GPU).cpu())
        assert torch.equal(drawn, torch.rand(3)), "torch.manual_seed sets both"


def _dropout(_rank: int) -> None:
    x = torch.ones(6, 2, 4)
    expected = Seed(1, 2).drop(x, 0.5, PLACE, ALONE)
    with PretendedGpu():
        of_cpu, of_gpu = torch.get_rng_state(), torch.cuda.get_rng_state(GPU)
        found = Seed(1, 2).drop(x.to(GPU), 0.5, PLACE, ALONE)
        with Seed(1, 2).for_attention(PLACE, ALONE, GPU):
            torch.rand(3, device=GPU)
        assert torch.equal(found.cpu(), expected)
        assert torch.equal(torch.get_rng_state(), of_cpu)
        assert torch.equal(torch.cuda.get_rng_state(GPU), of_gpu)


@pytest.mark.parametrize("check", [_states, _default_generators, _dropout])
def test_generators(gpu_world: PretendedWorld, check: object) -> None:
    gpu_world.run(1, check)  # type: ignore[arg-type]
