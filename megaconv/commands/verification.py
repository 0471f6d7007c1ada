"""Compares a checkpoint with the fingerprints that were recorded when it was written, and with its signature."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from formats.opened import OpenedFiles
from formats.wording import listing
from megaconv.commands.signed import check_seal, has_signature
from megaconv.engine.fingerprints import Fingerprint, fingerprint_source
from megaconv.engine.opening import open_source
from megaconv.engine.plan import default_workers
from megaconv.engine.record import RECORD_NAME, Record, find_record, has_record
from megaconv.engine.source_check import as_stored, changed_descriptions
from megaconv.errors import CheckpointError, CorruptCheckpoint, ModelsDiffer
from megaconv.families import has_text_only
from megaconv.families.parts.own_names import OWN_NAMES
from megaconv.hub import Place, nothing_at, resolve
from megaconv.input import input_at
from megaconv.model.beside import BESIDE
from megaconv.model.ir import Key, Source, TensorInfo
from megaconv.options import LoadOptions, SealOptions
from megaconv.signatures.checking import Signed


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of comparing a checkpoint with its record."""

    path: str
    recorded: str
    found: str
    tensors: int
    differences: Mapping[str, str] = field(default_factory=dict)
    """Difference by tensor or small file: `changed`, `missing` or `added`, or both shapes.

    `missing` is only recorded; `added` is only found, and used only for tensors.
    """
    files: int = 0
    """Number of small files that were compared: configuration, tokenizer and the like."""
    signed: Signed | None = None
    """The signature, if one was required; it is correct."""
    is_recorded: bool = True
    """False if the checkpoint has no fingerprints, but a correct signature."""
    has_unchecked_signature: bool = False
    """True if the checkpoint has a signature, and none was required."""

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
            "signature": None if self.signed is None else vars(self.signed),
        }


def verify(
    path: str | Path,
    options: LoadOptions | None = None,
    workers: int = 0,
    advance: Callable[[int], None] = lambda count: None,
    loader: str | None = None,
    expect: Callable[[int], None] = lambda total: None,
    seal: SealOptions | None = None,
) -> Verification:
    """Compare all of a checkpoint with its record, and first with its signature if `seal` requires one.

    advance: called with the bytes of every block. loader: a loader's name; None: the loader that recognises the input.
    expect: called with the number of bytes to read: of the signed files, then of the tensors.
    Raises CorruptCheckpoint if no fingerprints were recorded, ModelsDiffer if a changed file prevents opening, and the
    errors of opening the checkpoint and of `check_seal`.
    """
    options = options or LoadOptions()
    place = resolve(path, cache=options.cache)
    threads = workers or default_workers(writing=False)
    signed = check_seal(path, place, seal or SealOptions(), threads, advance, expect)
    if signed is not None and isinstance(place, Path) and not has_record(place):
        return Verification(str(path), "", "", 0, signed=signed, is_recorded=False)
    record = _need_record(place)
    options = _as_recorded(options, place, record)
    changed = record.changed_files()
    opened = OpenedFiles()
    with opened:
        try:
            stored = as_stored(place, record)
            source = _source(path, place, loader, options) if stored is None else stored.source
        except CheckpointError as error:
            if not changed:
                raise
            files = listing([f"{name} ({kind})" for name, kind in changed.items()])
            raise ModelsDiffer(
                f"{path}: is not as written: {files}; and it can't be opened: {error}"
            ) from error
        compared = _without_original(record, source)
        expect(sum(info.nbytes for info in compared.values()))
        found = fingerprint_source(source, threads, advance, compared)
    opened.require_as_stored()
    changed |= changed_descriptions(record, stored)
    if not record.has_intact_provenance:
        changed[f"{RECORD_NAME}: provenance"] = "changed"
    return Verification(
        path=str(path),
        recorded=record.fingerprint,
        found=found.weights,
        tensors=len(record.tensors),
        differences=_differences(record, source, found) | changed,
        files=len(record.files),
        signed=signed,
        has_unchecked_signature=signed is None and has_signature(place),
    )


def _as_recorded(options: LoadOptions, place: Place, record: Record) -> LoadOptions:
    """The options that open the part of the model that the record describes."""
    is_whole = any(name.startswith(BESIDE) for name in record.tensors)
    is_language_model = not is_whole and record.family != OWN_NAMES
    if isinstance(place, Path) and is_language_model and has_text_only(place):
        # With --base, a language model was put back into its multimodal original.
        return replace(options, text_only=True)
    return options


def _without_original(record: Record, source: Source) -> Mapping[Key, TensorInfo]:
    """The tensors of a source without layers for multi-token prediction that --base brought, which have no fingerprints."""
    manifest = source.header.manifest
    if not record.has_original:
        return manifest
    return {
        key: info
        for key, info in manifest.items()
        if str(key) in record.tensors or not key.name.startswith("mtp.")
    }


def _source(path: str | Path, place: Place, loader: str | None, options: LoadOptions) -> Source:
    given = input_at(path, place, loader, options)
    return open_source(given, replace(options, own_names=True))


def _need_record(place: Place) -> Record:
    if isinstance(place, str):
        raise CorruptCheckpoint(
            f"{place}: a URI has no record beside it to verify it against; megaconv diff compares with another checkpoint",
            code="no-fingerprints",
        )
    if not place.exists():
        raise nothing_at(place)
    record = find_record(place)
    if record is not None:
        return record
    path = place.parent if place.is_file() else place
    if (path / RECORD_NAME).exists():
        raise CorruptCheckpoint(
            f"{path / RECORD_NAME}: describes another iteration than the tracker names, so there are no fingerprints to "
            "compare with; `megaconv diff A B` compares two checkpoints",
            code="no-fingerprints",
        )
    raise CorruptCheckpoint(
        f"{path}: has no {RECORD_NAME} with fingerprints to compare with. megaconv writes one into every output; "
        "`megaconv seal DIR` writes one for any other checkpoint, and `megaconv diff A B` compares two checkpoints",
        code="no-fingerprints",
    )


def _differences(record: Record, source: Source, found: Fingerprint) -> dict[str, str]:
    """Difference by tensor: `changed`, `missing` or `added`, or both shapes."""
    others = record.other_tensors(source.header.manifest)
    # _changed_values lists the missing tensors.
    shapes = {name: what for name, what in others.items() if what != "missing"}
    return _changed_values(record.tensors, found) | shapes


def _changed_values(recorded: Mapping[str, str], found: Fingerprint) -> dict[str, str]:
    """Difference by tensor: `changed`, `missing` or `added`."""
    now = {str(key): digest for key, digest in found.tensors.items()}
    both = [name for name in recorded if name in now]
    changed = [name for name in both if now[name] != recorded[name]]
    missing = [name for name in recorded if name not in now]
    added = [name for name in now if name not in recorded]
    return {
        **dict.fromkeys(changed, "changed"),
        **dict.fromkeys(missing, "missing"),
        **dict.fromkeys(added, "added"),
    }
