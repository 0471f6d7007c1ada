"""Ranks that are gone, or at something else, while others wait for them."""

import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.loop.heartbeat import DEAD_S, Beat, Neighbour, at
from megatron_lite.parallel import comm
from tests.trainer.loop.launches import LLAMA, launch

BUSY, WAITING = {"waiting": False, "where": "read (data/batches.py:10)"}, {"waiting": True, "where": ""}


def heard(beats: list[tuple[float, Beat | None]], patience: float = 600) -> list[str | None]:
    neighbour = Neighbour(3, patience, 0.0)
    return [neighbour.heard(beat, now) for now, beat in beats]


def test_a_rank_without_a_beat_is_taken_for_dead() -> None:
    beat = Beat(1, 7, **BUSY)
    found = heard([(5, beat), (DEAD_S, beat), (6 + DEAD_S, beat)])
    assert found[:2] == [None, None]
    assert re.match("rank 3 has given no sign of life for 60 seconds", found[2] or "")
    assert heard([(5, None), (DEAD_S + 1, None)])[1] is not None  # one that never gave any


def test_a_rank_that_stays_at_a_step_while_others_wait_is_named_with_its_place() -> None:
    found = heard([(now, Beat(now, 11, **BUSY)) for now in range(5, 620, 5)])
    assert (
        found[-1]
        == "rank 3 has been at step 12 for 10 minutes, and the others wait for it: in read (data/batches.py:10)"
    )
    assert found[-4] is None


def test_a_rank_that_waits_itself_or_goes_on_is_not_to_blame() -> None:
    assert not any(heard([(now, Beat(now, 11, **WAITING)) for now in range(5, 2000, 5)]))
    assert not any(heard([(now, Beat(now, now // 100, **BUSY)) for now in range(5, 2000, 5)]))


def test_where_a_rank_waits_for_others_is_known_by_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, str]] = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: seen.append(at(sys._getframe())))
    comm.all_reduce(None, "group")  # type: ignore[arg-type]
    waiting, where = at(sys._getframe())
    assert [found for found, _ in seen] == [True]
    assert not waiting
    assert re.match(r"test_where_a_rank_waits\w* \(loop/test_heartbeat.py:\d+\)", where)


def _stop_at_a_step(victim: int, what: str, rank: int) -> None:
    from megatron_lite.engine import Engine
    from megatron_lite.loop import heartbeat

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
            *("hangs", 0.5, r"rank 1 has been at step 4 for 0.5 minutes, and the others wait for it: in train_step"),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_ranks_end_with_the_cause_when_one_is_gone_or_hangs(
    what: str, minutes: float, message: str, tmp_path: Path
) -> None:
    command = LLAMA.replace("timeout-minutes 1", f"timeout-minutes {minutes}")
    running = launch(tmp_path, 2, f"pretrain {command} --train-iters 100", partial(_stop_at_a_step, 1, what))
    running.processes[0].join(80)
    status = running.processes[0].exitcode
    running.kill()
    running.wait()
    assert status == 1, running.logs()
    said = re.findall(r"^megatron_lite: error: (.*)$", running.logs(), re.MULTILINE)
    assert len(said) == 1, running.logs()
    assert re.match(message, said[0])
