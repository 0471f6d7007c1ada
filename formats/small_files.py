"""A small file that is read whole: one on the disk, or one whose content is at hand."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.ceilings import SIDECAR_BYTES
from formats.errors import CorruptCheckpoint
from formats.regular_files import parse_json, read_json, read_small


@dataclass(frozen=True)
class SmallFile:
    """A file of a tokenizer, or another small one beside a model."""

    where: str
    """Its path for messages."""
    given: Path | bytes

    @classmethod
    def of(cls, name: str, given: Path | bytes) -> "SmallFile":
        """A file of this name: its path, or its content."""
        return cls(str(given) if isinstance(given, Path) else name, given)

    def content(self) -> bytes:
        """All bytes. Raises CorruptCheckpoint for a file that is too large."""
        return (
            self.given if isinstance(self.given, bytes) else read_small(self.given, SIDECAR_BYTES)
        )

    def json(self) -> Any:
        """The value of a JSON file. Raises CorruptCheckpoint."""
        if isinstance(self.given, Path):
            return read_json(self.given, SIDECAR_BYTES)
        try:
            return parse_json(self.given)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(
                f"{self.where}: is not a readable JSON file ({error})"
            ) from error
