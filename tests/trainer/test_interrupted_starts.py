"""Ctrl-C while a command starts: modules such as torch take seconds to import, and users press it in this time."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import pytest

from megatron_lite.data import text_pipeline
from megatron_lite.processes.interrupts import delayed_interrupts
from tests.trainer.loop.launches import LLAMA

ROOT = Path(__file__).parents[2]
INTERRUPTED_AT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from megatron_lite.cli import main
main(sys.argv[2:])
"""
"""Sends Ctrl-C when the module of the first argument is imported."""
PRETRAIN = f"pretrain {LLAMA} --train-iters 1"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("megatron_lite.settings", PRETRAIN),
        ("torch", PRETRAIN),
        ("numpy.linalg", PRETRAIN),
        ("torch", "generate --load model text"),
        ("torch", "score --load model --input tokens.jsonl"),
        ("megatron_lite.planning", "plan --load model"),
        ("megatron_lite.data.recipes", "data split --input texts.jsonl --output parts"),
    ],
)
def test_ctrl_c_while_a_command_starts_ends_it_with_one_line(
    module: str, words: str, tmp_path: Path
) -> None:
    """torch ignores an interrupted import of numpy, which made the run fail later without a part of numpy."""
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT, module, *words.split()], capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=False, timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert ended.stderr == "megatron-lite: interrupted\n"
    assert ended.returncode == 130
    assert not list(tmp_path.iterdir())


def blocked_signals(*_: object) -> set[int]:
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def test_a_worker_of_preprocess_never_receives_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrived while the worker imported its modules, and the worker printed a stack trace."""
    monkeypatch.setattr(text_pipeline, "encode", blocked_signals)
    nothing: Any = None
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found: Any = text_pipeline._submit(pool, nothing, nothing)
        assert signal.SIGINT in found.result()
    assert signal.SIGINT not in blocked_signals()


class Stopped(Exception):
    """Raised by a handler of a signal."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_waits_until_a_worker_has_started(number: signal.Signals) -> None:
    """A worker that was half started printed a stack trace, or was never told to end."""
    started = []

    class Pool:
        def submit(self, *_: object) -> None:
            os.kill(os.getpid(), number)
            started.append(True)

    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(number, stop)
    pool, nothing = Pool(), None
    try:
        with pytest.raises(Stopped):
            text_pipeline._submit(cast("Any", pool), cast("Any", nothing), cast("Any", nothing))
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)
    assert started


def test_workers_start_in_a_thread_too() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(_blocked_in_the_block).result() == {signal.SIGINT}


def _blocked_in_the_block() -> set[int]:
    with delayed_interrupts():
        return blocked_signals()
