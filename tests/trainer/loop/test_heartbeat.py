"""Ranks that are gone, or at something else, while others wait for them."""

import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite.parallel import comm
from megatron_lite.processes.blame import Beat, blamed
from megatron_lite.processes.calls import Calls
from megatron_lite.processes.heartbeat import DEAD_S, Neighbour, OwnProgress, place_of
from tests.trainer.loop.launches import LLAMA, launch


def heard(beats: list[tuple[float, int | None]]) -> list[str | None]:
    neighbour = Neighbour(3, 0.0)
    return [neighbour.heard(count, now) for now, count in beats]


def test_a_rank_without_a_beat_is_taken_for_dead() -> None:
    found = heard([(5, 1), (DEAD_S, 1), (6 + DEAD_S, 1)])
    assert found[:2] == [None, None]
    assert re.match("rank 3 has given no sign of life for 60 seconds", found[2] or "")
    assert heard([(5, None), (DEAD_S + 1, None)])[1] is not None  # one that never gave any


def test_time_without_progress_begins_anew_with_each_step_and_call() -> None:
    progress = OwnProgress(0.0)
    seen = [(10, 0, {}), (20, 0, {"1": (1, 0)}), (50, 0, {"1": (1, 0)}), (60, 0, {"1": (1, 1)})]
    assert [progress.still_s(steps, calls, now) for now, steps, calls in seen] == [0, 0, 30, 0]
    assert progress.still_s(1, {"1": (1, 1)}, 70) == 0


def beat(still_s: float, **calls: tuple[int, int]) -> Beat:
    """Keys are groups, or `m0_1` for the messages of the group `stages` from rank 0 to rank 1."""
    keys = {f"stages {key[1]}>{key[3]}" if key[0] == "m" else key: at for key, at in calls.items()}
    return Beat(1, 11, still_s, "read (data/batches.py:10)", keys)


def test_the_rank_that_others_wait_for_is_to_blame() -> None:
    waiting = beat(601, world=(8, 8))
    assert blamed([waiting, beat(700, world=(7, 7)), waiting], 600) == 1
    assert blamed([beat(601, world=(7, 7)), waiting, waiting], 600) == 0


def test_the_rank_furthest_behind_is_to_blame_and_not_one_that_waits_for_it() -> None:
    """Rank 0 waits for rank 1 in a tensor group, rank 1 for rank 2 in a message that rank 2 has not sent."""
    beats = [beat(650, tp=(5, 5)), beat(640, tp=(4, 4), m2_1=(3, 3)), beat(700, m2_1=(2, 0))]
    assert blamed(beats, 600) == 2


def test_a_message_that_is_requested_early_is_no_wait() -> None:
    """Rank 1 has requested its next message and computes; rank 0, which is to send it, waits for rank 1's gradient."""
    beats = [beat(650, m0_1=(1, 0), m1_0=(1, 1)), beat(700, m0_1=(2, 1))]
    assert blamed(beats, 600) == 1


def test_a_collective_that_ends_later_is_no_wait() -> None:
    """A bucket's sum under way doesn't block rank 0: rank 1 waits for it elsewhere."""
    beats = [beat(700, dp=(3, 2), tp=(4, 4)), beat(650, dp=(2, 2), tp=(5, 5))]
    assert blamed(beats, 600) == 0


def test_no_rank_is_blamed_before_a_rank_has_waited_for_long() -> None:
    long_read = [beat(2000, world=(7, 7)), beat(2000, world=(7, 7))]
    assert blamed(long_read, 600) is None
    just_come = [beat(100, world=(8, 8)), beat(2000, world=(7, 7))]
    assert blamed(just_come, 600) is None
    moving = [beat(700, world=(8, 8)), beat(3, world=(7, 7))]
    assert blamed(moving, 600) is None


def test_the_name_of_a_group_is_not_taken_for_a_rank() -> None:
    """torch names groups by numbers. Rank 1 is not in group 1, and rank 0 waits for rank 2 there."""
    beats = [beat(650, **{"1": (5, 5)}), beat(700), beat(650, **{"1": (4, 4)})]
    assert blamed(beats, 600) == 2


def test_no_rank_is_blamed_if_all_wait_for_each_other() -> None:
    assert blamed([beat(700, a=(2, 2), b=(1, 1)), beat(700, a=(1, 1), b=(2, 2))], 600) is None


def test_collectives_are_counted_as_they_begin_and_as_they_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls()
    monkeypatch.setattr(comm, "CALLS", calls)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
    group: Any = SimpleNamespace(group_name="4")
    comm.all_reduce(torch.zeros(1), group)
    assert calls.counts() == {"4": (1, 1)}
    first = comm.all_reduce(torch.zeros(1), group, later=True)
    second = comm.all_reduce(torch.zeros(1), group, later=True)
    assert calls.counts() == {"4": (3, 1)}
    comm.wait(second)
    comm.wait(first)
    assert calls.counts() == {"4": (3, 3)}


def test_the_place_of_a_rank_is_its_innermost_call() -> None:
    where = place_of(sys._getframe())
    assert re.fullmatch(r"test_the_place_of\w* \(loop/test_heartbeat.py:\d+\)", where)


def _stop_at_a_step(victim: int, what: str, rank: int) -> None:
    from megatron_lite.engine import Engine
    from megatron_lite.processes import heartbeat

    heartbeat.BEAT_S, heartbeat.DEAD_S, heartbeat.GRACE_S = 0.5, 15.0, 1.0
    whole = Engine.train_step

    def train_step(self: Engine, *arguments: Any) -> Any:
        if self.step == 3 and rank == victim:
            if what == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)
        return whole(self, *arguments)

    Engine.train_step = train_step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("what", "minutes", "message"),
    [
        ("stops", 5, "rank 1 has given no sign of life for 15 seconds"),
        pytest.param(
            *(
                "hangs",
                0.5,
                r"rank 1 has been at step 4 for 0.5 minutes, and the others wait for it: in train_step",
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_ranks_end_with_the_cause_when_one_is_gone_or_hangs(
    what: str, minutes: float, message: str, tmp_path: Path
) -> None:
    command = LLAMA.replace("timeout-minutes 1", f"timeout-minutes {minutes}")
    running = launch(
        tmp_path, 2, f"pretrain {command} --train-iters 100", partial(_stop_at_a_step, 1, what)
    )
    running.processes[0].join(80)
    status = running.processes[0].exitcode
    running.kill()
    running.wait()
    assert status == 1, running.logs()
    said = re.findall(r"^megatron-lite: error: (.*)$", running.logs(), re.MULTILINE)
    assert len(said) == 1, running.logs()
    assert re.match(message, said[0])
