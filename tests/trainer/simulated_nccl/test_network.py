"""The simulated network finds what NCCL would hang on or deliver wrongly."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaconv.model.layout import Layout
from megatron_lite.parallel import comm, grid
from megatron_lite.parallel.grid import make_grid
from tests.trainer.parallel.small import CPU, Case, train
from tests.trainer.simulated_nccl.groups import RANK, run_ranks
from tests.trainer.simulated_nccl.network import Mismatch, Stuck

ONE_MICROBATCH = Case("qwen3", pp=2, dp=4, steps=1)


def _both_send_first(rank: int) -> None:
    number, other = torch.ones(1), 1 - rank
    sent = comm.send(number, other, None, 0)
    comm.receive(torch.empty(1), other, None, 1).wait()
    sent.wait()


def test_two_ranks_that_both_send_first_on_one_communicator_get_stuck() -> None:
    with pytest.raises(Stuck, match="rank 0: receive"):
        run_ranks(2, _both_send_first)


def _in_another_order(rank: int) -> None:
    tags = (0, 1) if rank else (1, 0)
    for tag in tags:
        call = (comm.receive if rank else comm.send)(torch.ones(1), 1 - rank, None, tag)
        call.wait()


def test_messages_in_another_order_than_the_receives_are_found() -> None:
    with pytest.raises(Mismatch, match="send"):
        run_ranks(2, _in_another_order)


def _different_calls(rank: int) -> None:
    group: Any = dist.group.WORLD
    if rank:
        comm.largest(torch.ones(1), group)
    else:
        comm.all_reduce(torch.ones(1), group)


def test_different_collectives_are_found() -> None:
    with pytest.raises(Mismatch, match="all_reduce"):
        run_ranks(2, _different_calls)


def _crossed_groups(rank: int) -> None:
    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank else reversed(groups):
        comm.all_reduce(torch.ones(1), group)


def test_communicators_created_in_another_order_get_stuck() -> None:
    with pytest.raises(Stuck, match="creates the communicator"):
        run_ranks(2, _crossed_groups)


def test_a_schedule_gets_stuck_if_communicators_are_not_created_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grid, "_warm_up", lambda _: None)
    with pytest.raises(Stuck, match="creates the communicator"):
        run_ranks(8, train, ONE_MICROBATCH)


def _pass_by_two_ways(rank: int, backend: str) -> float:
    """Rank 0 sends to 1 and to 2, but rank 1 first waits for rank 2."""
    group = dist.new_group([0, 1, 2], backend=backend)
    number = torch.full((1,), float(rank))
    for sender, receiver in ((0, 1), (0, 2), (2, 1)):  # creates the communicators of pairs
        if rank == sender:
            comm.send(number, receiver, group, 0).wait()
        if rank == receiver:
            comm.receive(torch.empty(1), sender, group, 0).wait()
    if rank == 0:
        for work in [comm.send(number, other, group, 0) for other in (1, 2)]:
            work.wait()
        return 0.0
    if rank == 1:
        comm.receive(number, 2, group, 0).wait()
    comm.receive(number, 0, group, 0).wait()
    if rank == 2:
        comm.send(number, 1, group, 0).wait()
    return float(number)


def test_messages_of_one_communicator_wait_for_each_other() -> None:
    assert run_ranks(3, _pass_by_two_ways, grid.NCCL) == [0.0] * 3
    pairs = run_ranks(3, _pass_by_two_ways, grid.NCCL_OF_PAIRS, one_communicator=True)
    assert pairs == [0.0] * 3
    with pytest.raises(Stuck, match="rank 2: receive"):
        run_ranks(3, _pass_by_two_ways, grid.NCCL, one_communicator=True)


@pytest.mark.parametrize(
    ("backends", "expected"),
    [(["gloo", "nccl"], "nccl"), (["gloo", "nccl", "nccl2", "nccl-lazy"], "nccl-lazy")],
    ids=["torch 2.13", "torch 2.15"],
)
def test_messages_have_a_communicator_for_each_pair_of_ranks(
    monkeypatch: pytest.MonkeyPatch, backends: list[str], expected: str
) -> None:
    """Since torch 2.15, groups of the backend `nccl` have a single communicator, and messages wait for each other."""
    made: list[str | None] = []

    def new_group(ranks: list[int], timeout: Any = None, backend: str | None = None) -> None:
        made.append(backend)

    monkeypatch.setattr(dist.Backend, "backend_list", backends)
    monkeypatch.setattr(dist, "new_group", new_group)
    layout = Layout(1, 4, 2, stage_layers=(1,) * 8)
    channels = grid._make_channels([[0, 1, 2, 3]], layout, 0, torch.device("cuda", 0), None)
    assert made == [expected] * len(channels) == [expected] * 4


def _timeouts(_rank: int) -> list[timedelta | None]:
    layout = Layout(2, 2, 2, 2, stage_layers=(1,) * 4)
    made = make_grid(layout, 2, CPU, cp=2, experts=True, timeout=timedelta(minutes=21))
    groups = {id(group) for group in [*made.groups.values(), *made.channels.values()]}
    known = {id(group) for group in RANK.made} | {id(RANK.world)}
    assert groups <= known | {id(None)}
    return [group.timeout for group in RANK.made]


def test_every_group_has_the_timeout_that_was_asked() -> None:
    for timeouts in run_ranks(16, _timeouts):
        assert set(timeouts) == {timedelta(minutes=21)}
