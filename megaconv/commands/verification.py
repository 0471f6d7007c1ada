"""Reads a checkpoint back against the fingerprints that were recorded when it was written: `megaconv.verify(path)`."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaconv.engine.conversion import RECORD_NAME, open_source
from megaconv.engine.fingerprints import Fingerprint, fingerprint_source
from megaconv.engine.plan import default_workers
from megaconv.errors import CorruptCheckpoint
from megaconv.hub import Place, resolve
from megaconv.options import LoadOptions


@dataclass(frozen=True)
class Verification:
    """What a checkpoint holds now, beside what was written."""

    path: str
    recorded: str
    found: str
    tensors: int
    differences: Mapping[str, str] = field(default_factory=dict)
    """Tensor -> `changed`, `missing` (recorded only) or `added` (found only)."""

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

    Raises CorruptCheckpoint where no fingerprints were recorded, and whatever opening the checkpoint raises.
    """
    recorded, tensors = _read_record(resolve(str(path)))
    _, source = open_source(path, loader, options)
    found = fingerprint_source(source, workers or default_workers(writing=False), advance)
    return Verification(str(path), recorded, found.weights, len(tensors), _differences(tensors, found))


def _read_record(place: Place) -> tuple[str, dict[str, str]]:
    """(fingerprint of the weights, of each tensor). They lie in the output's directory, also where the input is a file of it."""
    if isinstance(place, str):
        raise CorruptCheckpoint(
            f"{place}: nothing can lie beside a URI to verify it against; megaconv diff compares with another checkpoint",
            code="no-fingerprints",
        )
    path = place.parent if place.is_file() else place
    file = path / RECORD_NAME
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptCheckpoint(
            f"{path}: has no {RECORD_NAME}, so that nothing is known to verify it against; "
            "megaconv writes one into every output, and megaconv diff compares with another checkpoint",
            code="no-fingerprints",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{file}: is not a readable JSON file ({error})") from error
    whole, tensors = (record.get(key) if isinstance(record, dict) else None for key in ("fingerprint", "tensors"))
    if not isinstance(whole, str) or not isinstance(tensors, dict):
        raise CorruptCheckpoint(f"{file}: expected fingerprint and tensors, which megaconv writes there")
    return whole, tensors


def _differences(recorded: Mapping[str, str], found: Fingerprint) -> dict[str, str]:
    now = {str(key): digest for key, digest in found.tensors.items()}
    changed = {name: "changed" for name, digest in recorded.items() if name in now and now[name] != digest}
    missing = dict.fromkeys((name for name in recorded if name not in now), "missing")
    return changed | missing | dict.fromkeys((name for name in now if name not in recorded), "added")
