"""Writes headers as soon as their bytes are known, for an output in a store: a part with a header can't be sent before.

A zip's local header holds the CRC-32 of the record behind it, and a directory those of all records.
"""

from collections.abc import Callable, Mapping, Sequence
from threading import Lock

from formats.output import Piece
from megaconv.engine.parts import PartPlan
from megaconv.engine.plan import OutputPlan
from megaconv.engine.runs import Run, total, zeros

Where = tuple[str, str]
"""A file and a record in it."""


class EarlyHeaders:
    """The headers that wait for records. Any thread may use it."""

    def __init__(
        self, plan: OutputPlan, parts: PartPlan, write: Callable[[str, int, bytes], None]
    ) -> None:
        """write: called with (file, offset, bytes)."""
        self._plan, self._parts, self._write = plan, parts, write
        self._lock = Lock()
        self._left: dict[Where, int] = {}
        """Bytes of each incomplete record that are not written yet."""
        self._runs: dict[Where, list[Run]] = {}
        self._checksums: dict[str, dict[str, int]] = {name: {} for name in plan.files}
        self._waiting: dict[Where, list[Piece]] = {}
        for name, layout in plan.files.items():
            for record, (_, nbytes) in layout.records.items():
                if nbytes:  # headers of empty records are known at once
                    self._left[name, record] = nbytes
        for name, of_file in parts.files.items():
            for piece in of_file.pieces:
                for record in piece.needs:
                    self._waiting.setdefault((name, record), []).append(piece)

    def begin(self) -> None:
        """Write the files without tensors, and headers of records that stay zero."""
        for name, layout in self._plan.files.items():
            if name not in self._parts.files:
                for offset, data in layout.headers({}):
                    self._write(name, offset, data)
        for file, record, offset, nbytes in self._plan.zeros:
            self.enter({(file, record): [zeros(offset, nbytes)]})

    def enter(self, runs: Mapping[Where, Sequence[Run]]) -> None:
        """Note ranges that were written."""
        for where, stretch in runs.items():
            with self._lock:
                if where not in self._left:
                    continue
                self._runs.setdefault(where, []).extend(stretch)
                self._left[where] -= sum(run.nbytes for run in stretch)
                is_complete = self._left[where] <= 0
                if is_complete:
                    del self._left[where]
            if is_complete:
                self._complete(*where)

    def _complete(self, name: str, record: str) -> None:
        """Write the pieces whose last record this is."""
        layout = self._plan.files[name]
        nbytes = layout.records[record].nbytes
        found = self._runs.pop((name, record), [])
        crc = total(found, nbytes, layout.needs_checksums, f"{name}: {record}")
        with self._lock:
            known = self._checksums[name]
            known[record] = crc
            ready = [
                piece
                for piece in self._waiting.pop((name, record), ())
                if all(need in known for need in piece.needs)
            ]
        for piece in ready:
            self._write(name, piece.offset, piece.content(known))
