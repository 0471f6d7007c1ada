"""Threads that end soon when what started them does."""

import time

import pytest

from megaconv.threads import thread_pool


def test_an_interrupt_prevents_tasks_that_have_not_begun() -> None:
    """Wherever it comes: here after tasks were handed in, and before anybody waits for them."""
    begun = []

    def work(number: int) -> None:
        begun.append(number)
        time.sleep(0.05)

    def interrupted() -> None:
        for number in range(50):
            pool.submit(work, number)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), thread_pool(2) as pool:
        interrupted()
    assert len(begun) < 10
