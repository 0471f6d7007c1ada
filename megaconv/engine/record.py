"""megaconv.json: what an output held when it was written, and what of it is otherwise now.

"fingerprint"     of all weights; "optimizer_fingerprint" of the optimizer's tensors
"tensors"         the fingerprint of each, by canonical name
"shapes"          `bfloat16[32,131]`, by the same names
"files"           hashes (BLAKE3) of configuration, tokenizer and other small files, by their path below it
"quantized"       how weights are stored, where a conversion quantized them (`fp8-block`): fingerprints are of what is read
"adapters"        those that were merged into the weights: path, weight, hashes (SHA-256)
"version"         the Megatron iteration that all this is about: `iter_0000005`, `release`
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from blake3 import blake3

from formats import rank_files, torch_dist
from formats.ceilings import RECORD_BYTES, SIDECAR_BYTES
from formats.output import FileLayout, PlainFile
from formats.regular_files import read_json, read_small
from megaconv._version import __version__
from megaconv.engine.fingerprints import Fingerprint
from megaconv.engine.plan import OutputPlan
from megaconv.errors import CheckpointError, CorruptCheckpoint, UnsafeContent
from megaconv.hub import Place
from megaconv.model.beside import BESIDE
from megaconv.model.check import listing
from megaconv.model.ir import WEIGHT, Header, Key, TensorInfo

RECORD_NAME = "megaconv.json"
"""In every output."""

_MAPS = (".index.json", ".metadata", ".zarray", rank_files.TRACKER)
"""Ends of names of files that say where tensors lie, or which iteration is the last: whether they still say so, the
fingerprints of the tensors show."""


@dataclass(frozen=True)
class Record:
    """A megaconv.json that was read."""

    root: Path
    """The directory that it lies in."""
    fingerprint: str
    tensors: Mapping[str, str]
    shapes: Mapping[str, str] = field(default_factory=dict)
    """Empty in a record that has none."""
    files: Mapping[str, str] = field(default_factory=dict)
    saver: str = ""

    @property
    def is_comparable(self) -> bool:
        """Whether its hashes are of the tensors that a reader gets: those of a GGUF output are of its blocks."""
        return self.saver != "gguf"

    def changed_files(self) -> dict[str, str]:
        """Small file -> `changed` or `missing`. Raises UnsafeContent for a record that names files elsewhere."""
        found = {name: self._now(name) for name in self.files}
        return {name: kind for name, kind in found.items() if kind}

    def _now(self, name: str) -> str:
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts:
            raise UnsafeContent(
                f"{self.root / RECORD_NAME}: names the file {name!r:.200}, which is not below its directory"
            )
        if not (self.root / path).is_file():
            return "missing"
        try:
            content = read_small(self.root / path, SIDECAR_BYTES)
        except CheckpointError:
            return "changed"
        return "" if digest(content) == self.files[name] else "changed"

    def other_tensors(self, manifest: Mapping[Key, TensorInfo]) -> dict[str, str]:
        """Tensor -> how its name or shape is not what was recorded: `missing`, or both shapes.

        Optimizer state counts where the manifest has any, and what lies beside a language model too. Tensors that were not
        recorded may be there: of the original that completed an output (`--base`).
        """
        now = {str(key): described(info) for key, info in manifest.items()}
        slots = any(key.slot != WEIGHT for key in manifest)
        beside = any(key.name.startswith(BESIDE) for key in manifest)
        of_slots = (name for name in self.tensors if slots or " (" not in name)  # as Key spells those of a slot
        wanted = (name for name in of_slots if beside or not name.startswith(BESIDE))
        found = {name: self._other_shape(name, now.get(name)) for name in wanted}
        return {name: what for name, what in found.items() if what}

    def _other_shape(self, name: str, shape: str | None) -> str:
        if shape is None:
            return "missing"
        recorded = self.shapes.get(name, shape)
        return "" if shape == recorded else f"{shape}, recorded as {recorded}"


def digest(content: bytes) -> str:
    return str(blake3(content).hexdigest())


def described(info: TensorInfo) -> str:
    return f"{info.dtype}[{','.join(map(str, info.shape))}]"


def record_json(
    source_path: str,
    saver: str,
    header: Header,
    plan: OutputPlan,
    fingerprint: Fingerprint,
    adapters: Sequence[Mapping[str, Any]] = (),
    quantized: str | None = None,
) -> bytes:
    """What megaconv.json says. As long for one fingerprint as for any other.

    header: of what a reader of the output gets. adapters: that were merged into the weights. quantized: how they are stored.
    """
    record = {
        "megaconv": __version__,
        "source": {"path": source_path, "kind": header.source},
        **({"adapters": list(adapters)} if adapters else {}),
        "saver": saver,
        **({"quantized": quantized} if quantized else {}),
        "family": header.config.family,
        "fingerprint": fingerprint.weights,
        "optimizer_fingerprint": fingerprint.optimizer,
        "version": _version_of(plan),
        "files": {name: digest(content) for name, content in _small_files(plan.files)},
        "shapes": {str(key): described(info) for key, info in header.manifest.items()},
        "tensors": {str(key): fingerprint.tensors[key] for key in header.manifest},
    }
    return (json.dumps(record, indent=1) + "\n").encode()


def _small_files(files: Mapping[str, FileLayout]) -> Iterator[tuple[str, bytes]]:
    for name, layout in sorted(files.items()):
        if isinstance(layout, PlainFile) and not name.endswith(_MAPS):
            yield name, layout.content


def _version_of(plan: OutputPlan) -> str | None:
    """The directory of the one iteration of a Megatron output; None for others."""
    if rank_files.TRACKER not in plan.files:
        return None
    return next(name.partition("/")[0] for name in plan.files if rank_files.is_version(name.partition("/")[0]))


def find_record(place: Place) -> Record | None:
    """The record of what a loader opens at a place; None without one, or where it is about another iteration.

    It lies in the output's directory, also where the input is a file of it. Raises CorruptCheckpoint for one that can't be read.
    """
    if isinstance(place, str):
        return None
    path = place.parent if place.is_file() else place
    root = path.parent if rank_files.is_version(path.name) and not (path / RECORD_NAME).exists() else path
    if not (root / RECORD_NAME).exists():
        return None
    record, version = read_record(root)
    return record if version in (None, _opened_version(path)) else None


def read_record(root: Path) -> tuple[Record, str | None]:
    """The record in this directory, and the iteration that it is about. Raises CorruptCheckpoint for one that can't be read."""
    file = root / RECORD_NAME
    found = read_json(file, RECORD_BYTES)
    given: Mapping[str, Any] = found if isinstance(found, dict) else {}
    whole, version = given.get("fingerprint"), given.get("version")
    tables = [given.get(name, {}) for name in ("tensors", "shapes", "files")]
    texts = all(isinstance(table, dict) and all(isinstance(text, str) for text in table.values()) for table in tables)
    if not isinstance(whole, str) or "tensors" not in given or not texts or not isinstance(version, str | None):
        raise CorruptCheckpoint(f"{file}: expected fingerprint and tensors, which megaconv writes there")
    tensors, shapes, files = tables
    return Record(root, whole, tensors, shapes, files, saver=str(given.get("saver", ""))), version


def source_of(record: Record) -> Mapping[str, Any]:
    """What a record says its output was made of: `path`, `kind`, and `adapters` where any were merged."""
    found = read_json(record.root / RECORD_NAME, RECORD_BYTES)
    source = found.get("source") if isinstance(found, dict) else None
    adapters = found.get("adapters") if isinstance(found, dict) else None
    known = dict(source) if isinstance(source, dict) else {}
    return known | ({"adapters": adapters} if isinstance(adapters, list) else {})


def _opened_version(path: Path) -> str:
    """The name of the directory of the iteration that is opened at path."""
    found = path if (path / torch_dist.FORMAT_FILE).is_file() else rank_files.find_version(path)
    return "" if found is None else found.name


@dataclass
class SourceCheck:
    """What a source's record says, beside what is read of it."""

    record: Record | None = None
    unlike: frozenset[str] = frozenset()
    """Tensors that can't be compared: they were asked for in another dtype, or with another vocabulary."""
    notices: tuple[str, ...] = ()
    """What a user should know about the source's small files."""
    damaged: list[str] = field(default_factory=list)

    def expects(self, key: Key) -> str | None:
        """The recorded fingerprint of a tensor that is read as it was written."""
        if self.record is None or str(key) in self.unlike:
            return None
        return self.record.tensors.get(str(key))

    def found(self, key: Key, fingerprint: str) -> None:
        """May be called from any thread."""
        if self.expects(key) not in (None, fingerprint):
            self.damaged.append(str(key))

    def compare(self, fingerprint: Fingerprint) -> None:
        """Raises CorruptCheckpoint where a source isn't what it was when it was written."""
        for key, digest in fingerprint.tensors.items():
            self.found(key, digest)
        self.require_intact()

    def require_intact(self) -> None:
        """Raises CorruptCheckpoint naming tensors that are not what was recorded."""
        if self.record is not None and self.damaged:
            _refuse(
                self.record,
                f"{len(self.damaged)} tensors have other values than were written: {listing(sorted(self.damaged))}",
            )


def check_source(
    place: Place,
    written: Mapping[Key, TensorInfo],
    streamed: Mapping[Key, TensorInfo] | None = None,
    *,
    other_shapes: bool = False,
    altered: Collection[Key] = (),
) -> SourceCheck:
    """Look at the record of an opened source, if it has one. Raises CorruptCheckpoint where names or shapes are not as recorded.

    written: its manifest. streamed: in the dtypes that are asked for. other_shapes: the user has said what vocabulary it has.
    altered: tensors that something else is merged into.
    """
    record = find_record(place)
    if record is None or not record.is_comparable:
        return SourceCheck()
    differing = record.other_tensors(written)
    missing = {name: what for name, what in differing.items() if what == "missing" or not other_shapes}
    if missing:
        _refuse(
            record,
            f"{len(missing)} tensors are not as written: {listing([f'{name} {what}' for name, what in missing.items()])}",
        )
    cast = {str(key) for key, info in written.items() if streamed is not None and streamed.get(key) != info}
    cast |= {str(key) for key in altered}
    notices = [
        f"{name}: {kind} since the source was written (its {RECORD_NAME} says)"
        for name, kind in record.changed_files().items()
    ]
    return SourceCheck(record, frozenset(cast | differing.keys()), tuple(notices))


def _refuse(record: Record, what: str) -> None:
    raise CorruptCheckpoint(
        f"{record.root}: {what}. It was damaged or changed since ({RECORD_NAME}); --no-check-source takes it as it is",
        code="changed-since-written",
    )
