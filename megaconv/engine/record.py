"""megaconv.json: the record of what an output held when it was written.

"fingerprint"     of all weights; "optimizer_fingerprint" of the optimizer's tensors
"tensors"         the fingerprint of each tensor, by canonical name
"shapes"          `bfloat16[32,131]`, by the same names
"files"           hashes (BLAKE3) of configuration, tokenizer and other small files, by their path below the output
"descriptions"    hashes of a weight file's description of the model beside its tensors, by path: the metadata of GGUF
"quantized"       how weights are stored, if a conversion quantized them (`fp8-block`): fingerprints are of dequantized
values
"adapters"        adapters in the weights, merged by this conversion or an earlier one: path, weight, hashes (SHA-256)
"provenance"      inputs, version and options of the conversion (engine/lineage.py); "provenance_hash" is its BLAKE3
"version"         the Megatron iteration that the record describes: `iter_0000005`, `release`
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from blake3 import blake3

from formats import rank_files, torch_dist
from formats.ceilings import RECORD_BYTES, SIDECAR_BYTES
from formats.gguf import GgufLayout
from formats.output import FileLayout, PlainFile, whole_content
from formats.regular_files import read_json, read_small
from megaconv._version import __version__
from megaconv.engine.fingerprints import Fingerprint
from megaconv.engine.plan import OutputPlan
from megaconv.errors import CheckpointError, CorruptCheckpoint, UnsafeContent
from megaconv.hub import Place
from megaconv.model.beside import BESIDE
from megaconv.model.ir import WEIGHT, Header, Key, TensorInfo

RECORD_NAME = "megaconv.json"
"""The record's file name, in every output."""

_MAPS = (".index.json", ".metadata", ".zarray", rank_files.TRACKER)
"""Suffixes of files that say where tensors lie, or which iteration is the last.

Their hashes aren't recorded: if such a file changes, the fingerprints of the tensors show it.
"""


@dataclass(frozen=True)
class Record:
    """The content of a megaconv.json."""

    root: Path
    """The directory with the megaconv.json."""
    fingerprint: str
    tensors: Mapping[str, str]
    shapes: Mapping[str, str] = field(default_factory=dict)
    """Shapes by canonical name; empty for a record without shapes."""
    files: Mapping[str, str] = field(default_factory=dict)
    descriptions: Mapping[str, str] = field(default_factory=dict)
    saver: str = ""
    family: str = ""
    provenance: Mapping[str, Any] | None = None
    """The inputs that the output was made from (engine/lineage.py); None in a record without it."""
    provenance_hash: str | None = None

    @property
    def file(self) -> Path:
        """The megaconv.json."""
        return self.root / RECORD_NAME

    @property
    def has_intact_provenance(self) -> bool:
        """True if the provenance is the one that was written, or none was."""
        now = None if self.provenance is None else digest(canonical(self.provenance))
        return now == self.provenance_hash

    @property
    def has_original(self) -> bool:
        """True if the output was completed by an original (--base), whose tensors have no fingerprints."""
        inputs = [] if self.provenance is None else self.provenance.get("inputs", [])
        return any(isinstance(each, Mapping) and each.get("as") == "original" for each in inputs)

    def changed_files(self) -> dict[str, str]:
        """Small files that are `changed` or `missing`.

        Raises UnsafeContent for a record that names files outside its directory.
        """
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
        """Tensors whose name or shape differs from the record, each with `missing` or both shapes.

        Optimizer state is compared if the manifest has any; so are the parts beside a language model. Further tensors
        may be there: those of the original that completed an output (`--base`).
        """
        now = {str(key): described(info) for key, info in manifest.items()}
        slots = any(key.slot != WEIGHT for key in manifest)
        beside = any(key.name.startswith(BESIDE) for key in manifest)
        # Key spells the names of optimizer slots with a " (".
        of_slots = (name for name in self.tensors if slots or " (" not in name)
        wanted = (name for name in of_slots if beside or not name.startswith(BESIDE))
        found = {name: self._other_shape(name, now.get(name)) for name in wanted}
        return {name: what for name, what in found.items() if what}

    def differs_in_dtype_alone(self, name: str, info: TensorInfo) -> bool:
        """True if a tensor has the recorded sizes."""
        recorded = self.shapes.get(name, "")
        return recorded.partition("[")[2] == described(info).partition("[")[2]

    def _other_shape(self, name: str, shape: str | None) -> str:
        if shape is None:
            return "missing"
        recorded = self.shapes.get(name, shape)
        return "" if shape == recorded else f"{shape}, recorded as {recorded}"


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and without spaces, of which hashes are made."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def with_provenance(provenance: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keys of a record for its provenance."""
    if provenance is None:
        return {}
    return {"provenance": provenance, "provenance_hash": digest(canonical(provenance))}


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
    provenance: Mapping[str, Any] | None = None,
) -> bytes:
    """The content of megaconv.json. Its length doesn't depend on the fingerprint.

    header: the header that a reader of the output gets. adapters: adapters merged into the weights. quantized: how the
    weights are stored. provenance: of what the output is made.
    """
    of_the_conversion: dict[str, Any] = {"saver": saver}
    if adapters:
        of_the_conversion["adapters"] = list(adapters)
    if quantized:
        of_the_conversion["quantized"] = quantized
    of_the_conversion |= with_provenance(provenance)
    of_the_conversion |= _descriptions(plan.files)
    files = {name: digest(content) for name, content in _small_files(plan.files)}
    return _to_json(source_path, header, fingerprint, files, _version_of(plan), of_the_conversion)


def sealed_record_json(
    name: str,
    header: Header,
    fingerprint: Fingerprint,
    files: Mapping[str, str],
    version: str | None,
) -> bytes:
    """The content of megaconv.json for a checkpoint that something else wrote.

    name: of the checkpoint's directory. files: hashes of small files, by path. version: the iteration's directory.
    """
    return _to_json(name, header, fingerprint, files, version, {"saver": ""})


def _to_json(
    source_path: str,
    header: Header,
    fingerprint: Fingerprint,
    files: Mapping[str, str],
    version: str | None,
    of_the_conversion: Mapping[str, Any],
) -> bytes:
    """A record. of_the_conversion: the saver, and further keys that only an output of a conversion has."""
    record = {
        "megaconv": __version__,
        "source": {"path": source_path, "kind": header.source},
        **of_the_conversion,
        "family": header.config.family,
        "fingerprint": fingerprint.weights,
        "optimizer_fingerprint": fingerprint.optimizer,
        "version": version,
        "files": dict(sorted(files.items())),
        "shapes": {str(key): described(info) for key, info in header.manifest.items()},
        "tensors": {str(key): fingerprint.tensors[key] for key in header.manifest},
    }
    return (json.dumps(record, indent=1) + "\n").encode()


def is_recorded(name: str) -> bool:
    """True if a record has the hash of a small file. name: its path below the output."""
    return name != RECORD_NAME and not name.endswith(_MAPS)


def _small_files(files: Mapping[str, FileLayout]) -> Iterator[tuple[str, bytes]]:
    for name, layout in sorted(files.items()):
        if isinstance(layout, PlainFile):
            if not name.endswith(_MAPS):
                yield name, layout.content
        elif PurePosixPath(name).name == torch_dist.COMMON_FILE and not layout.records:
            # It has learning rates and counts of samples, which no fingerprint of a tensor covers.
            yield name, whole_content(layout)


def _descriptions(files: Mapping[str, FileLayout]) -> dict[str, dict[str, str]]:
    """Hashes of the descriptions in weight files. Fingerprints of tensors can't show a change of a description."""
    found = {
        name: digest(layout.description)
        for name, layout in files.items()
        if isinstance(layout, GgufLayout)
    }
    return {"descriptions": found} if found else {}


def _version_of(plan: OutputPlan) -> str | None:
    """The directory name of the one iteration of a Megatron output; None for other outputs."""
    if rank_files.TRACKER not in plan.files:
        return None
    return next(
        name.partition("/")[0]
        for name in plan.files
        if rank_files.is_version(name.partition("/")[0])
    )


def find_record(place: Place) -> Record | None:
    """The record of the input that a loader opens at a place; None if there is none, or it describes another iteration.

    The record is in the output's directory, even if the input is a file in it. Raises CorruptCheckpoint for a damaged
    record.
    """
    if isinstance(place, str) or not has_record(place):
        return None
    path = place.parent if place.is_file() else place
    record, version = read_record(rank_files.directory_with(RECORD_NAME, path))
    return record if version in (None, opened_version(path)) else None


def has_record(place: Path) -> bool:
    """True if a megaconv.json belongs to a place, of this iteration or another one."""
    return (rank_files.directory_with(RECORD_NAME, place) / RECORD_NAME).exists()


def read_record(root: Path) -> tuple[Record, str | None]:
    """The record in this directory, and the iteration that it describes.

    Raises CorruptCheckpoint for a damaged record.
    """
    file = root / RECORD_NAME
    found = read_json(file, RECORD_BYTES)
    given: Mapping[str, Any] = found if isinstance(found, dict) else {}
    whole, version = given.get("fingerprint"), given.get("version")
    tables = [given.get(name, {}) for name in ("tensors", "shapes", "files", "descriptions")]
    has_texts = isinstance(version, str | None) and all(map(_holds_texts, tables))
    if not isinstance(whole, str) or "tensors" not in given or not has_texts:
        raise CorruptCheckpoint(
            f"{file}: expected fingerprint and tensors, which megaconv writes there"
        )
    tensors, shapes, files, descriptions = tables
    record = Record(
        root,
        whole,
        tensors,
        shapes,
        files,
        descriptions,
        saver=str(given.get("saver", "")),
        family=str(given.get("family", "")),
        provenance=given.get("provenance"),
        provenance_hash=given.get("provenance_hash"),
    )
    return record, version


def _holds_texts(table: Any) -> bool:
    return isinstance(table, dict) and all(isinstance(text, str) for text in table.values())


def source_of(record: Record) -> Mapping[str, Any]:
    """The source that a record names: `path`, `kind`, and `adapters` if any were merged."""
    found = read_json(record.root / RECORD_NAME, RECORD_BYTES)
    source = found.get("source") if isinstance(found, dict) else None
    adapters = found.get("adapters") if isinstance(found, dict) else None
    known = dict(source) if isinstance(source, dict) else {}
    return known | ({"adapters": adapters} if isinstance(adapters, list) else {})


def opened_version(path: Path) -> str:
    """The directory name of the iteration that is opened at path; empty if there is none."""
    found = path if (path / torch_dist.FORMAT_FILE).is_file() else rank_files.find_version(path)
    return "" if found is None else found.name
