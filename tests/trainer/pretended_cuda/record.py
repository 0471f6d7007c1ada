"""The record of a pretended GPU: kernel launches, waits and copies, by the line of megatron_lite that causes them."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import megatron_lite

PACKAGE = str(Path(megatron_lite.__file__).parent)


@dataclass
class Record:
    """Counters of what happened since the last clear()."""

    launches: Counter[str] = field(default_factory=Counter)
    """The number of launches by kernel."""
    waits: Counter[str] = field(default_factory=Counter)
    """Times that the host waits for the device, by kind and place."""
    unpinned: Counter[str] = field(default_factory=Counter)
    """Copies between pageable memory and the device, by direction and place."""

    def copy(self) -> "Record":
        """Return the counters of this moment."""
        return Record(self.launches.copy(), self.waits.copy(), self.unpinned.copy())

    def clear(self) -> None:
        """Forget everything."""
        for counter in (self.launches, self.waits, self.unpinned):
            counter.clear()


def place() -> str:
    """Return file, line and function of the innermost frame in megatron_lite."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file[len(PACKAGE) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "outside megatron_lite"
