"""Threads that end soon when what started them does."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def thread_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """As many threads. Where the body ends by an exception, Ctrl-C among them, what hasn't begun by then is never begun.

    An executor by itself then still does everything that it was given: of Executor.map all, where its caller was interrupted
    before that returned.
    """
    pool = ThreadPoolExecutor(workers)
    try:
        yield pool
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
