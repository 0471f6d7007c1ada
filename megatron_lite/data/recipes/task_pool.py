"""Processes for datatrove's tasks, which notice that one of them is killed. datatrove's own pool waits for ever then.

`watched_pools` gives datatrove's local executor this pool in place of its own. A task arrives pickled by dill, as in datatrove's
pool, so it may hold functions without a name.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from megaconv.errors import CheckpointError
from megatron_lite.data.packages import package
from megatron_lite.data.text_pipeline import start_worker
from megatron_lite.processes.interrupts import delayed_interrupts

KILLED = "a worker process was killed, perhaps for want of memory"


class TaskPool:
    """Processes that start with the first task and end with the block."""

    def __init__(self, workers: int, start_method: str, advice: str) -> None:
        """advice: what to do after a process was killed."""
        self._advice = advice
        self._others = set(multiprocessing.active_children())
        context = multiprocessing.get_context(start_method)
        key = bytes(package("multiprocess", "data").current_process().authkey)
        self._pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(key,))

    def __enter__(self) -> "TaskPool":
        return self

    def imap_unordered(self, function: Callable[[int], Any], tasks: Iterable[int]) -> Iterator[Any]:
        """Yield the results as tasks end. Raises CheckpointError for a killed process, and the first error of a task."""
        pickled = package("dill", "data").dumps(function)
        with delayed_interrupts():
            futures = [self._pool.submit(_call, pickled, task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise CheckpointError(f"{KILLED}; {self._advice}") from None

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for process in set(multiprocessing.active_children()) - self._others:
                process.terminate()  # a task may take hours
        with delayed_interrupts():
            self._pool.shutdown(cancel_futures=True)


def _start(key: bytes) -> None:
    """Set up a worker. key: lets it reach the queues and counters of datatrove's manager."""
    start_worker()
    package("multiprocess", "data").current_process().authkey = key


def _call(pickled: bytes, task: int) -> Any:
    return package("dill", "data").loads(pickled)(task)


class _Context:
    """Stands for a context of the package multiprocess."""

    def __init__(self, start_method: str) -> None:
        self._start_method = start_method

    def Pool(self, workers: int) -> TaskPool:  # noqa: N802  # the name in multiprocess
        return TaskPool(workers, self._start_method, "give fewer workers, and run it again")


class _Multiprocess:
    """Stands for the package multiprocess in datatrove's local executor, which takes a manager and a pool from it."""

    get_context = _Context

    def __init__(self, real: Any) -> None:
        self.Manager = real.Manager


@contextmanager
def watched_pools() -> Iterator[None]:
    """Let datatrove's local executors run their tasks in a TaskPool."""
    local = package("datatrove.executor.local", "data")
    real = local.multiprocess
    local.multiprocess = _Multiprocess(real)
    try:
        yield
    finally:
        local.multiprocess = real
