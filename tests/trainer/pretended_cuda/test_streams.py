"""The pretended GPU finds work of two streams, or of a stream and the host, that is not ordered."""

from collections.abc import Callable

import pytest
import torch

from megaconv.model.layout import Layout
from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import make_grid
from tests.trainer.pretended_cuda.collectives import through_gloo
from tests.trainer.pretended_cuda.device import GPU, PretendedGpu
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.streams import StreamRace


def _use_without_wait(_rank: int) -> None:
    x, side = torch.ones(4, device=GPU), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)


def _free_without_record(_rank: int) -> None:
    x, side = torch.ones(4, device=GPU), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    del x


def _change_pinned_memory_early(_rank: int) -> None:
    numbers = torch.ones(4, pin_memory=True)
    x = numbers.to(GPU, non_blocking=True)
    numbers.fill_(2)
    x.tolist()


@pytest.mark.parametrize(
    "use", [_use_without_wait, _free_without_record, _change_pinned_memory_early]
)
def test_a_use_without_order_is_found(
    gpu_world: PretendedWorld, use: Callable[[int], None]
) -> None:
    assert gpu_world.run(1, _raises, use) == [True]


def _raises(rank: int, use: Callable[[int], None]) -> bool:
    try:
        with PretendedGpu():
            use(rank)
    except StreamRace:
        return True
    return False


def _use_in_order(_rank: int) -> None:
    with PretendedGpu():
        x, side = torch.ones(4, device=GPU), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
            done = torch.cuda.Event()
            done.record()
        x.record_stream(side)
        del x
        done.wait()
        assert y.tolist() == [2.0] * 4


def _read_early(_rank: int) -> None:
    with PretendedGpu():
        pinned = torch.zeros(4, pin_memory=True)
        pinned.copy_(torch.ones(4, device=GPU), non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        assert pinned.isnan().all(), "the copy has not happened yet"
        done.synchronize()
        assert pinned.tolist() == [1.0] * 4


@pytest.mark.parametrize("use", [_use_in_order, _read_early])
def test_order_is_known(gpu_world: PretendedWorld, use: Callable[[int], None]) -> None:
    gpu_world.run(1, use)


def _sum(rank: int, *, early: bool) -> list[float] | None:
    try:
        with PretendedGpu(), through_gloo():
            grid = make_grid(Layout(stage_layers=(1,)), 2, GPU)
            x = torch.full((2,), float(rank + 1), device=GPU)
            call = comm.all_reduce(x, grid.group("replicas"), later=True)
            found = x * 2 if early else None
            comm.wait(call)
            found = x * 2
            grid.close()
            values: list[float] = found.tolist()
            return values
    except StreamRace:
        return None


def _sum_early(rank: int) -> list[float] | None:
    return _sum(rank, early=True)


def _sum_in_order(rank: int) -> list[float] | None:
    return _sum(rank, early=False)


def test_a_collective_owns_its_tensor_until_wait(gpu_world: PretendedWorld) -> None:
    assert gpu_world.run(2, _sum_in_order) == [[6.0, 6.0]] * 2
    assert gpu_world.run(2, _sum_early) == [None, None]
