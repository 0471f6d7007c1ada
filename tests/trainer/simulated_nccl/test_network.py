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
