"""The resources of a directory: which files a signature covers, and their hashes."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from blake3 import blake3

from formats.errors import CorruptCheckpoint, UnsafeContent, UnsupportedInput
from formats.regular_files import open_regular
from megaconv.errors import UsageError
from megaconv.signatures.bundle import SIGNATURE_NAME
from megaconv.signatures.statement import SHARDS, Method, Statement
from megaconv.threads import thread_pool

GIT_PATHS = (".git", ".gitattributes", ".github", ".gitignore")
"""The paths that model signing never covers, because git and the Hub change them."""
_READ = 1 << 20
_HASHERS: Mapping[str, Callable[[], Any]] = {
    "sha256": hashlib.sha256,
    "blake2b": hashlib.blake2b,
    "blake2": hashlib.blake2b,
    "blake3": blake3,
}


@dataclass(frozen=True)
class Piece:
    """A file, or a shard of one."""

    name: str
    """The name of the resource."""
    path: Path
    start: int
    size: int


def standard_method(signature: Path, root: Path) -> Method:
    """The method of a new signature: SHA-256 of each file. signature: its file, which it can't cover."""
    ignored = {*GIT_PATHS, SIGNATURE_NAME, path_of_signature(signature, root)}
    return Method(ignore_paths=tuple(sorted(ignored)))


def path_of_signature(signature: Path, root: Path) -> str:
    """The signature's path below the model's directory; its usual name if it lies elsewhere.

    If it is a link, this is the path of the link. The file that it leads to is one of the model's files.
    """
    place = signature.parent.resolve() / signature.name
    try:
        return place.relative_to(root.resolve()).as_posix()
    except ValueError:
        return SIGNATURE_NAME


def state_of(
    root: Path,
    method: Method,
    pieces: Sequence[Piece],
    workers: int,
    *,
    advance: Callable[[int], None] = lambda count: None,
    expect: Callable[[int], None] = lambda total: None,
    replaced: Mapping[str, bytes] | None = None,
) -> Statement:
    """The statement about a directory as it is now. Reads all pieces.

    pieces: those of the files that the method covers. advance: called with the bytes of each block.
    expect: called with the number of bytes to read, before the first block.
    replaced: content by name, for files that are about to be written and are not among the pieces.
    Raises CorruptCheckpoint for a file that can't be read.
    """
    new = replaced or {}
    expect(sum(piece.size for piece in pieces))
    names = [piece.name for piece in pieces]
    with thread_pool(workers) as pool:
        hashes = pool.map(lambda piece: _hash(piece, method, advance), pieces)
        found = dict(zip(names, hashes, strict=True))
    for name, content in new.items():
        hasher = _HASHERS[method.hash_type]()
        hasher.update(content)
        found[name] = hasher.hexdigest()
    ordered = sorted(found, key=_order_of_shards if method.name == SHARDS else PurePosixPath)
    return Statement(root.resolve().name, method, {name: found[name] for name in ordered})


def _order_of_shards(name: str) -> tuple[PurePosixPath, int]:
    """The order of shards `PATH:START:END` in a statement: that of paths, part by part, then that of places."""
    path, start, _ = name.rsplit(":", maxsplit=2)
    return PurePosixPath(path), int(start)


def covered_files(root: Path, method: Method) -> dict[str, Path]:
    """The files that a signature covers, by name. Raises UnsupportedInput or UnsafeContent for links."""
    ignored = {PurePosixPath(each) for each in (*method.ignore_paths, *GIT_PATHS)}
    found: dict[str, Path] = {}
    for path in _walk(root, ignored):
        name = path.relative_to(root).as_posix()
        _require_text(path, name)
        if path.is_symlink():
            _require_permitted_link(path, root, method)
        found[name] = path
    return found


def _walk(root: Path, ignored: set[PurePosixPath]) -> Iterator[Path]:
    """All files and all links below a directory, but those in `ignored`."""
    for folder, directories, names in os.walk(root, onerror=_refuse_unreadable):
        below = Path(folder).relative_to(root)
        links = [name for name in directories if (Path(folder) / name).is_symlink()]
        directories[:] = [
            name
            for name in sorted(directories)
            if name not in links and not _is_ignored(below / name, ignored)
        ]
        for name in sorted([*names, *links]):
            if not _is_ignored(below / name, ignored):
                yield Path(folder) / name


def _refuse_unreadable(error: OSError) -> None:
    raise CorruptCheckpoint(f"{error.filename}: can't be read: {error.strerror}") from error


def _is_ignored(name: Path, ignored: set[PurePosixPath]) -> bool:
    path = PurePosixPath(name.as_posix())
    return path in ignored or any(parent in ignored for parent in path.parents)


def _require_text(path: Path, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{path.parent}: has a file whose name is not UTF-8; rename it") from error


def _require_permitted_link(path: Path, root: Path, method: Method) -> None:
    if not method.allow_symlinks or not path.is_file():
        raise UnsupportedInput(
            f"{path}: is a link, which a signature doesn't cover; put the file itself there"
        )
    # The Hub's own cache keeps its files in `blobs`, beside the snapshots.
    real = path.resolve()
    if not real.is_relative_to(root.resolve()) and real.parent.name != "blobs":
        raise UnsafeContent(f"{path}: is a link to {real}, outside of the model's directory")


def pieces_of(files: Mapping[str, Path], method: Method) -> Iterator[Piece]:
    """The resources of files, by their names.

    A shard may be of one byte, so that there are as many as the files have bytes: the caller must know when to stop.
    Raises CorruptCheckpoint for special files.
    """
    for name, path in files.items():
        descriptor = open_regular(path)
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
        if method.name != SHARDS or method.shard_size is None:
            yield Piece(name, path, 0, size)
            continue
        for start in range(0, size, method.shard_size):
            end = min(start + method.shard_size, size)
            yield Piece(f"{name}:{start}:{end}", path, start, end - start)


def _hash(piece: Piece, method: Method, advance: Callable[[int], None]) -> str:
    hasher = _HASHERS[method.hash_type]()
    place, end = piece.start, piece.start + piece.size
    is_whole = method.name != SHARDS
    descriptor = open_regular(piece.path)
    try:
        # A file may have grown since its size was read: a whole file is read to its end.
        while is_whole or place < end:
            wanted = _READ if is_whole else min(_READ, end - place)
            block = os.pread(descriptor, wanted, place)
            if not block:
                break
            hasher.update(block)
            place += len(block)
            advance(len(block))
    except OSError as error:
        raise CorruptCheckpoint(f"{piece.path}: can't be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return str(hasher.hexdigest())
