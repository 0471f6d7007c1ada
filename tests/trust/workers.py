"""Shares cases out over worker processes, each with a folder of its own, and hands their results over as they come."""

import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from tests.trust import server
from tests.trust.attacks import ATTACKS
from tests.trust.bench import Bench
from tests.trust.checkpoints import Checkpoint
from tests.trust.judging import Failure


class Task(NamedTuple):
    attack: str
    number: int


@dataclass(frozen=True)
class Result:
    """The result of one case."""

    attack: str
    number: int
    seconds: float
    peak_bytes: int
    """The bytes of the largest process that this worker has judged so far."""
    promise: str = ""
    """The promise that was broken, "harness" where the attack itself went wrong, "" where all is well."""
    text: str = ""


def work(
    tasks: Sequence[Task],
    root: Path,
    checkpoints: Mapping[str, Checkpoint],
    *,
    seed: int,
    jobs: int,
    keep: bool,
) -> Iterator[Result]:
    """Tasks are taken in order by whoever is free. Raises RuntimeError when a worker dies."""
    taken = get_context("fork").Value("q", 0)
    reading, writing = os.pipe()
    workers = []
    for number in range(jobs):
        process = os.fork()
        if not process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(reading)
            _serve(tasks, taken, writing, Bench(root, seed, number, checkpoints), keep)
        workers.append(process)
    os.close(writing)
    try:
        with os.fdopen(reading, encoding="utf-8") as results:
            for line in results:
                yield Result(**json.loads(line))
    except BaseException:
        for process in workers:
            os.kill(process, signal.SIGKILL)
        raise
    finally:
        statuses = [os.waitpid(process, 0)[1] for process in workers]
    if any(statuses):
        raise RuntimeError(f"workers of the harness ended with status {statuses}")


def _serve(tasks: Sequence[Task], taken: Any, writing: int, bench: Bench, keep: bool) -> None:
    """Ends this process."""
    status = 1
    try:
        while True:
            with taken.get_lock():
                index = taken.value
                taken.value += 1
            if index >= len(tasks):
                break
            result = _attempt(bench, tasks[index])
            os.write(writing, json.dumps(asdict(result)).encode() + b"\n")
        if not keep:
            shutil.rmtree(bench.folder, ignore_errors=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _attempt(bench: Bench, task: Task) -> Result:
    started = time.monotonic()
    promise = text = ""
    try:
        ATTACKS[task.attack].run(bench, task.number)
    except Failure as failure:
        promise, text = failure.promise, failure.text
    except Exception:
        promise, text = "harness", traceback.format_exc()
    return Result(*task, time.monotonic() - started, server.largest_peak(), promise, text[-2000:])
