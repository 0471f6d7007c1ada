"""Seals a checkpoint: writes its fingerprints (megaconv.json) if it has none, and signs all files (model.sig).

    DIR/megaconv.json    fingerprints of all tensors, hashes of small files: megaconv/engine/record.py
    DIR/model.sig        the signature of every file, megaconv.json among them: megaconv/signatures/bundle.py

Each file appears complete or not at all. The signature comes last, so a killed run leaves no signature of half a seal.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats import rank_files
from formats.ceilings import RECORD_BYTES, SIDECAR_BYTES, SIGNATURE_BYTES
from formats.opened import OpenedFiles
from formats.regular_files import read_small
from formats.renames import sync_directory
from formats.wording import listing
from megaconv.best_iteration import with_best
from megaconv.commands.model_card import published_record
from megaconv.commands.verification import verify
from megaconv.engine.fingerprints import fingerprint_source
from megaconv.engine.opening import open_source
from megaconv.engine.plan import default_workers
from megaconv.engine.record import (
    RECORD_NAME,
    digest,
    find_record,
    is_recorded,
    opened_version,
    sealed_record_json,
)
from megaconv.errors import (
    CorruptCheckpoint,
    ModelsDiffer,
    TargetExists,
    UnsupportedInput,
    UsageError,
)
from megaconv.hub import nothing_at, scheme_of
from megaconv.input import find_input
from megaconv.options import LoadOptions, SealOptions
from megaconv.signatures import keyless
from megaconv.signatures.bundle import SIGNATURE_NAME, parse_bundle
from megaconv.signatures.directory import covered_files, pieces_of, standard_method, state_of
from megaconv.signatures.keys import PrivateKey, private_key

_PARTIAL = ".megaconv-seal"
"""The file that is being written; a killed run may leave it."""
_SMALL = (".json", ".jinja", ".md", ".model", ".spm", ".tiktoken", ".txt", ".yaml", ".yml")
"""Suffixes of configuration, tokenizer and the like. Fingerprints tell what weight files hold."""


@dataclass(frozen=True, repr=False)
class Seal:
    """A sealed checkpoint."""

    path: str
    fingerprint: str | None
    """The fingerprint of all weights; None with `--files-only`."""
    tensors: int
    digest: str | None = None
    """SHA-256 over the digests of all files; None without a signature."""
    files: int = 0
    """Number of signed files."""
    signer: str | None = None
    """The key that signed, or `sigstore`."""

    def __repr__(self) -> str:
        how = f"signed by {self.signer}" if self.signer else "not signed"
        return f"<Seal: {self.path}, {self.tensors} tensors, {self.files} files, {how}>"

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return vars(self)


def seal(
    path: str | Path,
    options: SealOptions,
    load: LoadOptions | None = None,
    loader: str | None = None,
    workers: int = 0,
    advance: Callable[[int], None] = lambda count: None,
    expect: Callable[[int], None] = lambda total: None,
) -> Seal:
    """Seal a directory.

    Without a key and without sigstore, the seal has no signature. advance: called with the bytes of every block.
    expect: called with the number of bytes to read: of the tensors, then of the files to sign.
    Raises UsageError for options that contradict each other, TargetExists if there is a signature already, ModelsDiffer
    if the checkpoint differs from its own megaconv.json, and the errors of opening it.
    """
    _require_consistent(options)
    root = _directory(path)
    signature = root / SIGNATURE_NAME
    if signature.exists() and not options.overwrite:
        raise TargetExists(f"{signature}: is a signature already; pass --overwrite to replace it")
    key = None if options.key is None else private_key(options.key, options.key_password_file)
    (root / _PARTIAL).unlink(missing_ok=True)
    method = standard_method(signature, root)
    files = covered_files(root, method)
    threads = workers or default_workers(writing=False)
    made = _Made(None, None, 0)
    if not options.files_only:
        reading = _Reading(load or LoadOptions(), loader, threads, advance, expect)
        made = _record(root, files, reading)
    if key is None and not options.sigstore:
        if made.content is not None:
            _write(root, RECORD_NAME, made.content)
        return Seal(str(root), made.fingerprint, made.tensors)
    replaced = {} if made.content is None else {RECORD_NAME: made.content}
    kept = {name: file for name, file in files.items() if name not in replaced}
    pieces = list(pieces_of(kept, method))
    statement = state_of(
        root, method, pieces, threads, advance=advance, expect=expect, replaced=replaced
    )
    signed, signer = _sign(statement.to_bytes(), key, options)
    _require_readable(signature, signed, len(statement.digests))
    if made.content is not None:
        _write(root, RECORD_NAME, made.content)
    _write(root, SIGNATURE_NAME, signed)
    return Seal(
        str(root), made.fingerprint, made.tensors, statement.root, len(statement.digests), signer
    )


def _require_consistent(options: SealOptions) -> None:
    if options.key is not None and options.sigstore:
        raise UsageError("--key and --sigstore: a seal has one signature; leave one of them out")
    if options.key_password_file is not None and options.key is None:
        raise UsageError("--key-password-file: is for an encrypted --key; give both")
    if options.trust_config is not None and not options.sigstore:
        raise UsageError("--trust-config: is for --sigstore; leave it out")
    if options.files_only and options.key is None and not options.sigstore:
        raise UsageError("--files-only: leaves nothing but a signature; give --key or --sigstore")


def _directory(path: str | Path) -> Path:
    if isinstance(path, str) and scheme_of(path):
        raise UsageError(f"{path}: a seal is written into a directory; seal a local copy")
    root = Path(with_best(str(path)))
    if not root.exists():
        raise nothing_at(root)
    if not root.is_dir():
        raise UsageError(f"{path}: is not a directory; seal the directory that holds the file")
    return root


def _sign(payload: bytes, key: PrivateKey | None, options: SealOptions) -> tuple[bytes, str]:
    """(the signature's file, the signer)."""
    if key is None:
        return keyless.sign(payload, options.trust_config), "sigstore"
    return key.sign(payload), str(key.path)


def _require_readable(signature: Path, content: bytes, files: int) -> None:
    """Raises UnsupportedInput for a signature that `verify` would refuse. Nothing is written before."""
    if len(content) > SIGNATURE_BYTES:
        raise UnsupportedInput(
            f"{signature}: would have {len(content):,} bytes for {files:,} files, and may have {SIGNATURE_BYTES:,}; "
            "pack small files into archives"
        )
    try:
        parse_bundle(signature, content).statement()
    except CorruptCheckpoint as error:
        raise UnsupportedInput(
            f"{signature}: verify could not read it ({error.__cause__ or error}); rename files with many commas or colons"
        ) from error


@dataclass(frozen=True)
class _Reading:
    """The way to read a checkpoint's tensors."""

    load: LoadOptions
    loader: str | None
    workers: int
    advance: Callable[[int], None]
    expect: Callable[[int], None]


@dataclass(frozen=True)
class _Made:
    """A megaconv.json that is not written yet."""

    content: bytes | None
    fingerprint: str | None
    tensors: int


def _record(root: Path, files: Mapping[str, Path], reading: _Reading) -> _Made:
    """The record of a checkpoint: its own if it has one and is as written, a new one otherwise.

    files: those that the signature covers. Raises UsageError if the record is that of the run around the checkpoint.
    """
    record = find_record(root)
    if record is None:
        return _new_record(root, files, reading)
    if record.root != root:
        raise UsageError(
            f"{root}: belongs to the run with {record.file}; seal the run's directory, {record.root}"
        )
    found = verify(
        root, reading.load, reading.workers, reading.advance, reading.loader, reading.expect
    )
    if not found.same:
        names = [f"{name} ({what})" for name, what in found.differences.items()]
        raise ModelsDiffer(
            f"{root}: is not as its {RECORD_NAME} says, and a seal would confirm it: {listing(names)}"
        )
    content = published_record(read_small(record.root / RECORD_NAME, RECORD_BYTES))
    return _Made(content, record.fingerprint, len(record.tensors))


def _new_record(root: Path, files: Mapping[str, Path], reading: _Reading) -> _Made:
    opened = OpenedFiles()
    with opened:
        source = open_source(find_input(root, reading.loader, reading.load), reading.load)
        reading.expect(source.header.nbytes)
        found = fingerprint_source(source, reading.workers, reading.advance)
    opened.require_as_stored()
    version = opened_version(root) or None
    small = _small_files(files, version)
    content = sealed_record_json(root.resolve().name, source.header, found, small, version)
    return _Made(content, found.weights, len(found.tensors))


def _small_files(files: Mapping[str, Path], version: str | None) -> dict[str, str]:
    """Hashes of configuration, tokenizer and other small files. version: the iteration that the record describes."""
    found: dict[str, str] = {}
    for name, path in files.items():
        folder = name.partition("/")[0]
        is_other = "/" in name and rank_files.is_version(folder) and folder != version
        if is_other or not name.endswith(_SMALL) or not is_recorded(name):
            continue
        try:
            found[name] = digest(read_small(path, SIDECAR_BYTES))
        except CorruptCheckpoint:
            continue  # larger than any small file
    return found


def _write(root: Path, name: str, content: bytes) -> None:
    """Write a file so that it appears complete or not at all."""
    partial = root / _PARTIAL
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(root / name)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(root)
