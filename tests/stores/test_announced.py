"""Tensors that come next: their windows are fetched in their order, while memory has room, and none twice."""

import threading
from typing import cast

import pytest

from formats.input_file import InputFile
from formats.stores import windows
from formats.stores.windows import WINDOW, Windows
from formats.tensor import FileTensor, announce_in_step


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


def test_tensors_that_are_read_in_step_are_each_fetched_ahead_once(fetched: list[int]) -> None:
    """One thread reads a block of either tensor in turn, and nothing was announced."""

    def fill(start: int, out: memoryview) -> None:
        fetched.append(start)

    found = Windows(8 * WINDOW, fill)
    out = memoryview(bytearray(WINDOW // 8))
    tensors = [(0, 4 * WINDOW), (4 * WINDOW, 8 * WINDOW)]
    for block in range(32):
        for tensor in tensors:
            found.read_into(tensor[0] + block * len(out), out, tensor)
    assert sorted(fetched) == [number * WINDOW for number in range(8)]
    assert not found._readers


class _File:
    """A file that notes what is announced."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.announced: list[tuple[int, int]] = []

    def announce(self, span: tuple[int, int]) -> None:
        self.announced.append(span)


def test_tensors_that_are_read_in_step_are_announced_in_shares() -> None:
    rows = 64 << 10
    file = _File(2 * rows << 10)
    large = FileTensor(cast(InputFile, file), 0, (rows, 1 << 10), "uint8")
    small = FileTensor(cast(InputFile, file), rows << 10, (rows // 2, 1 << 10), "uint8")
    announce_in_step([large, small])
    of_large, of_small = file.announced[::2], file.announced[1::2]
    assert [span[0] for span in of_large] == [0, *(span[1] for span in of_large[:-1])]
    assert of_large[-1][1] == of_small[0][0] == rows << 10
    assert of_small[-1][1] == 3 * rows // 2 << 10
    assert len(of_large) == len(of_small) == 3
    file.announced.clear()
    announce_in_step([large])
    assert file.announced == [(0, rows << 10)]


def test_a_reader_takes_shares_over_that_it_reaches_first(fetched: list[int]) -> None:
    """Memory has no room while the shares are announced; the reader fetches all windows itself, and none comes again."""

    def fill(start: int, out: memoryview) -> None:
        fetched.append(start)

    found = Windows(8 * WINDOW, fill)
    for number in range(16):
        windows._SHARED.announced.add(found, (number * WINDOW // 2, (number + 1) * WINDOW // 2))
    out = memoryview(bytearray(WINDOW))
    for number in range(8):
        found.read_into(number * WINDOW, out, (0, 8 * WINDOW))
    assert sorted(fetched) == [number * WINDOW for number in range(8)]
    assert not windows._SHARED.announced._reached
