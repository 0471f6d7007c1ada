"""Threads that end soon after the code that started them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def thread_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of `workers` threads. If the body raises (Ctrl-C included), tasks that haven't begun are cancelled.

    A plain executor would still run every task that it has accepted. That includes all tasks of an Executor.map whose
    caller was interrupted before the call returned.
    """
    pool = ThreadPoolExecutor(workers)
    try:
        yield pool
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
