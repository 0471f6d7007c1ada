"""Decisions of a user and of a plan about an output in a store, before the first byte."""

from dataclasses import dataclass
from pathlib import Path

from formats.stores.part_sizes import PART_BYTES, part_bytes

CONNECTIONS = 16
"""Parts that are sent at the same time."""


@dataclass(frozen=True)
class Waiting:
    """The places for parts that wait, decided before the first byte."""

    part_bytes: int
    """Size of the largest part."""
    open_bytes: int
    """The largest sum of the parts that are incomplete at the same time."""
    open_parts: int
    """The largest number of them."""
    memory_bytes: int
    """Bytes of parts that memory may hold."""

    @property
    def connections(self) -> int:
        """Parts that are sent at the same time."""
        return max(1, min(CONNECTIONS, self.memory_bytes // max(1, self.part_bytes)))

    @property
    def is_spooled(self) -> bool:
        return self.open_bytes + _LEAST_SENT * self.part_bytes > self.memory_bytes

    @property
    def spool_parts(self) -> int:
        return self.open_parts + self.connections if self.is_spooled else 0

    @property
    def spool_bytes(self) -> int:
        """Size of the spool; 0 if all parts wait in memory."""
        return self.spool_parts * self.part_bytes


_LEAST_SENT = 2
"""Places beyond those of incomplete parts, so that parts are sent while others grow."""
MEMORY_BYTES = 168 << 20
"""Memory for parts, if a quarter of --max-memory is less."""
NOTHING = Waiting(PART_BYTES, 0, 0, MEMORY_BYTES)


def growing_file_alone(most_bytes: int) -> Waiting:
    """The places of an output of which one file has parts, and grows at its end. most_bytes: its largest possible size."""
    step = part_bytes(most_bytes)
    return Waiting(step, step, 1, max(MEMORY_BYTES, 3 * step))


@dataclass(frozen=True)
class Terms:
    """The decisions of a user about an output in a store."""

    version: str
    """The version of the program, for the claim."""
    overwrite: bool = False
    take_over: bool = False
    """Take over the claim of a run on another host, which may live."""
    spool: Path | None = None
    """The directory of the spool; None: the system's temporary directory."""
    most_spool_bytes: int = 16 << 30
