"""Reads a checkpoint back against the fingerprints that were recorded when it was written: `megaconv.verify(path)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from formats.opened import OpenedFiles
from megaconv.engine.fingerprints import Fingerprint, fingerprint_source
from megaconv.engine.plan import default_workers
from megaconv.engine.preparation import open_source
from megaconv.engine.record import RECORD_NAME, Record, find_record
from megaconv.errors import CheckpointError, CorruptCheckpoint, ModelsDiffer
from megaconv.families import sees_or_hears
from megaconv.hub import Place, nothing_at, resolve
from megaconv.model.beside import BESIDE
from megaconv.model.check import listing
from megaconv.options import LoadOptions


@dataclass(frozen=True, repr=False)
class Verification:
    """What a checkpoint holds now, beside what was written."""

    path: str
    recorded: str
    found: str
    tensors: int
    differences: Mapping[str, str] = field(default_factory=dict)
    """Tensor, or small file -> `changed`, `missing` (recorded only) or, of tensors, `added` (found only), or both shapes."""
    files: int = 0
    """Small files that were compared: configuration, tokenizer and the like."""

    def __repr__(self) -> str:
        what = "as written" if self.same else f"{len(self.differences)} differences"
        return f"<Verification: {self.path}, {self.tensors} tensors and {self.files} other files, {what}>"

    @property
    def same(self) -> bool:
        return self.found == self.recorded and not self.differences

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "same": self.same,
            "recorded": self.recorded,
            "found": self.found,
            "tensors": self.tensors,
            "files": self.files,
            "differences": dict(self.differences),
        }


def verify(
    path: str | Path,
    options: LoadOptions | None = None,
    workers: int = 0,
    advance: Callable[[int], None] = lambda count: None,
    loader: str | None = None,
) -> Verification:
    """Reads all of a checkpoint. advance is called with the bytes of every block. loader: None: the one that recognises it.

    Raises CorruptCheckpoint where no fingerprints were recorded, ModelsDiffer where a changed file lets nothing be opened, and
    whatever opening the checkpoint raises.
    """
    place = resolve(path)
    record = _need_record(place)
    changed = record.changed_files()
    alone = not any(name.startswith(BESIDE) for name in record.tensors)
    if (
        isinstance(place, Path) and alone and sees_or_hears(place)
    ):  # the record is of what was put back into the original
        options = replace(options or LoadOptions(), text_only=True)
    opened = OpenedFiles()
    with opened:
        try:
            _, source = open_source(path, loader, options)
        except CheckpointError as error:
            if not changed:
                raise
            files = listing([f"{name} ({kind})" for name, kind in changed.items()])
            raise ModelsDiffer(f"{path}: is not as written: {files}; and it can't be opened: {error}") from error
        found = fingerprint_source(source, workers or default_workers(writing=False), advance)
    opened.require_as_stored()
    shapes = {name: what for name, what in record.other_tensors(source.header.manifest).items() if what != "missing"}
    differences = _differences(record.tensors, found) | shapes | changed
    return Verification(
        str(path), record.fingerprint, found.weights, len(record.tensors), differences, len(record.files)
    )


def _need_record(place: Place) -> Record:
    if isinstance(place, str):
        raise CorruptCheckpoint(
            f"{place}: a URI has no record beside it to verify it against; megaconv diff compares with another checkpoint",
            code="no-fingerprints",
        )
    if not place.exists():
        raise nothing_at(place)
    record = find_record(place)
    if record is not None and not record.is_comparable:
        raise CorruptCheckpoint(
            f"{place}: fingerprints of an output of --saver {record.saver} are of what is stored, which is not what is read from it",
            code="no-fingerprints",
        )
    if record is not None:
        return record
    path = place.parent if place.is_file() else place
    if (path / RECORD_NAME).exists():
        raise CorruptCheckpoint(
            f"{path / RECORD_NAME}: is about another iteration than the one that the tracker names, of which nothing is known to "
            "verify it against; megaconv diff compares with another checkpoint",
            code="no-fingerprints",
        )
    raise CorruptCheckpoint(
        f"{path}: has no {RECORD_NAME}, so that nothing is known to verify it against; "
        "megaconv writes one into every output, and megaconv diff compares with another checkpoint",
        code="no-fingerprints",
    )


def _differences(recorded: Mapping[str, str], found: Fingerprint) -> dict[str, str]:
    now = {str(key): digest for key, digest in found.tensors.items()}
    changed = {name: "changed" for name, digest in recorded.items() if name in now and now[name] != digest}
    missing = dict.fromkeys((name for name in recorded if name not in now), "missing")
    return changed | missing | dict.fromkeys((name for name in now if name not in recorded), "added")
