"""Tensors that come next: their windows are fetched in their order, while memory has room, and none twice."""

import threading

import pytest

from formats.stores import windows
from formats.stores.windows import WINDOW, Windows


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The starts of the windows that were fetched, with memory for five windows."""
    monkeypatch.setattr(windows, "_SHARED", windows._Shared())
    monkeypatch.setattr(windows, "BUDGET", 5 * WINDOW)
    monkeypatch.setattr(windows, "KEPT_FREE", WINDOW)
    return []


def test_announced_windows_are_fetched_while_memory_has_room(fetched: list[int]) -> None:
    arrived = threading.Semaphore(0)

    def fill(start: int, out: memoryview) -> None:
        fetched.append(start)
        out[:1] = bytes([start // WINDOW])
        arrived.release()

    found = Windows(8 * WINDOW, fill)
    for number in range(8):
        found.announce((number * WINDOW, (number + 1) * WINDOW))
    for _ in range(4):
        assert arrived.acquire(timeout=30)
    assert sorted(fetched) == [number * WINDOW for number in range(4)]
    out = memoryview(bytearray(WINDOW))
    for number in range(8):
        found.read_into(number * WINDOW, out, (number * WINDOW, (number + 1) * WINDOW))
        assert out[0] == number
    assert sorted(fetched) == [number * WINDOW for number in range(8)]


def test_an_abandoned_object_leaves_the_memory_to_others(fetched: list[int]) -> None:
    arrived = threading.Semaphore(0)

    def fill(start: int, out: memoryview) -> None:
        fetched.append(start)
        arrived.release()

    def announce_all(found: Windows) -> None:
        for number in range(8):
            found.announce((number * WINDOW, (number + 1) * WINDOW))
        for _ in range(4):
            assert arrived.acquire(timeout=30)

    abandoned = Windows(8 * WINDOW, fill)
    announce_all(abandoned)
    abandoned.abandon()
    fetched.clear()
    announce_all(Windows(8 * WINDOW, fill))
    assert sorted(fetched) == [number * WINDOW for number in range(4)]
    abandoned.read_into(0, memoryview(bytearray(1)), None)
