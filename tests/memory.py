"""The anonymous memory that this process takes while a test runs."""

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERVAL_S = 0.002


@dataclass
class Growth:
    """Bytes above those at the start."""

    most: int = 0


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel doesn't tell anonymous memory")


@contextmanager
def growth() -> Iterator[Growth]:
    """Sample the memory until the end of the block. Freed memory of earlier tests goes back to the system first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    begin, found, over = anonymous_bytes(), Growth(), threading.Event()

    def watch() -> None:
        while not over.is_set():
            found.most = max(found.most, anonymous_bytes() - begin)
            time.sleep(INTERVAL_S)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
