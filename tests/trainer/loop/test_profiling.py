"""Profiles, garbage that is collected at set times, and bits that a GPU is made to give twice."""

import gc
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megaconv.errors import UsageError
from megatron_lite.loop.garbage import Garbage
from megatron_lite.loop.profiling import Profile, make_profile
from megatron_lite.processes.launch import SAME_BITS, force_same_bits
from megatron_lite.settings.config import Logging, Training
from tests.trainer.loop.launches import LLAMA, train


class Recording:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def start(self) -> None:
        self.heard.append("start")

    def stop(self) -> None:
        self.heard.append("stop")


def heard_after(first: int, last: int, iterations: range) -> list[tuple[int, str]]:
    recording, found = Recording(), []
    profile = Profile(first, last, recording)
    for iteration in iterations:
        profile.after(iteration)
        found += [(iteration, word) for word in recording.heard]
        recording.heard.clear()
    profile.end()
    return [*found, *((-1, word) for word in recording.heard)]


def test_the_steps_that_megatron_would_profile_are_profiled() -> None:
    assert heard_after(2, 4, range(8)) == [(2, "start"), (4, "stop")]
    # The run resumes between the two steps.
    assert heard_after(2, 4, range(3, 8)) == [(3, "start"), (4, "stop")]
    # The run ends before the last step.
    assert heard_after(2, 9, range(4)) == [(2, "start"), (-1, "stop")]
    assert heard_after(2, 4, range(5, 8)) == []


def test_marks_for_nsys_need_a_gpu() -> None:
    with pytest.raises(UsageError, match="needs --use-pytorch-profiler"):
        make_profile(Logging(profile=True), None, 0, torch.device("cpu"))


def test_garbage_is_collected_at_set_times_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))
    garbage = Garbage(Training(manual_gc=True, manual_gc_interval=3))
    try:
        garbage.start()
        assert not gc.isenabled()
        for iteration in range(1, 7):
            garbage.after(iteration)
        assert collected == [2, 2, 2]
        with garbage.evaluation():
            assert collected == [2, 2, 2, 2]
        assert collected == [2, 2, 2, 2, 0]
    finally:
        garbage.end()
    assert gc.isenabled()


def test_without_manual_gc_python_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda *_: pytest.fail("collected"))
    garbage = Garbage(replace(Training(), manual_gc_interval=1))
    garbage.start()
    garbage.after(1)
    with garbage.evaluation():
        pass
    assert gc.isenabled()


def test_a_gpu_is_made_to_give_the_same_bits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SAME_BITS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    try:
        force_same_bits()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["NCCL_ALGO"] == "Tree"
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_run_writes_a_trace_of_each_chosen_rank(tmp_path: Path) -> None:
    flags = (
        "--bf16 --grad-reduce-in-bf16 --profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2 --profile-ranks 1 "
        "--manual-gc --manual-gc-interval 2 --deterministic-mode --train-iters 3 --save ckpt"
    )
    train(tmp_path, 2, f"pretrain {LLAMA} {flags}")
    (trace,) = (tmp_path / "ckpt/profile").iterdir()
    assert trace.name == "rank-1.steps-2-2.json"
    events = json.loads(trace.read_text())["traceEvents"]
    assert any("addmm" in event["name"] or "mm" in event["name"] for event in events)
