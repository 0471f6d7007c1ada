"""Compares a directory with its signature: first the signature with the key, then every file with the statement."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megaconv.errors import ModelsDiffer, UnsupportedInput
from megaconv.signatures.bundle import SIGNATURE_NAME, Bundle, read_bundle
from megaconv.signatures.directory import (
    GIT_PATHS,
    Piece,
    covered_files,
    path_of_signature,
    pieces_of,
    state_of,
)
from megaconv.signatures.statement import SINGLE_FILE, Method, Statement

_LISTED = 5
"""Names in a message."""


class Verifier(Protocol):
    """A key, or an identity of sigstore."""

    def verify(self, bundle: Bundle) -> None:
        """Raises ModelsDiffer (`wrong-signature`) unless it signed the bundle's payload."""


@dataclass(frozen=True)
class Signed:
    """A directory that is as it was signed."""

    signature: str
    """The signature's file."""
    root: str
    """SHA-256 over the digests of all files: the digest of the seal."""
    resources: int
    """Number of files, or of shards of files."""
    left_out: tuple[str, ...]
    """Paths that the signature doesn't cover, beyond those of git and the signature itself.

    The signer left them out; or they are empty files, of which the method `shards` has no shard.
    """


def check_signature(
    root: Path,
    signature: Path,
    verifier: Verifier,
    workers: int,
    advance: Callable[[int], None] = lambda count: None,
    expect: Callable[[int], None] = lambda total: None,
) -> Signed:
    """Verify a signature, then compare every file of the directory with it.

    Raises CorruptCheckpoint (`corrupt-signature`), ModelsDiffer (`wrong-signature`, `changed-since-signed`), and
    UnsafeContent for links out of the directory.
    """
    bundle = read_bundle(signature)
    verifier.verify(bundle)
    statement = bundle.statement()
    if set(statement.digests) == {SINGLE_FILE}:
        raise UnsupportedInput(
            f"{signature}: signs a single file; megaconv verifies the files of a directory"
        )
    method = _all_but(statement.method, signature, root)
    files = covered_files(root, method)
    pieces = _signed_pieces(root, statement, pieces_of(files, method))
    now = state_of(root, method, pieces, workers, advance=advance, expect=expect)
    changed = [name for name, digest in now.digests.items() if digest != statement.digests[name]]
    _require_none(root, dict.fromkeys(changed, "changed"))
    usual = {*GIT_PATHS, SIGNATURE_NAME, path_of_signature(signature, root)}
    ignored = (each for each in statement.method.ignore_paths if each not in usual)
    signed = {piece.path for piece in pieces}
    empty = (name for name, path in files.items() if path not in signed)
    return Signed(
        str(signature), statement.root, len(statement.digests), left_out=(*ignored, *empty)
    )


def _all_but(method: Method, signature: Path, root: Path) -> Method:
    """The method, without the signature's own file."""
    ignored = (*method.ignore_paths, SIGNATURE_NAME, path_of_signature(signature, root))
    return Method(method.name, method.hash_type, method.allow_symlinks, ignored, method.shard_size)


def _signed_pieces(root: Path, signed: Statement, pieces: Iterator[Piece]) -> list[Piece]:
    """The pieces, which are those that were signed. Raises ModelsDiffer for added and missing ones.

    Takes a few more pieces than were signed at most, since a signer can ask for shards of one byte.
    """
    missing = set(signed.digests)
    found: list[Piece] = []
    added: list[str] = []
    for piece in pieces:
        if piece.name in missing:
            missing.remove(piece.name)
            found.append(piece)
            continue
        added.append(piece.name)
        if len(added) > len(signed.digests) + _LISTED:
            missing.clear()  # the pieces that follow may be among them
            break
    _require_none(root, dict.fromkeys(added, "added") | dict.fromkeys(missing, "missing"))
    return found


def _require_none(root: Path, differences: Mapping[str, str]) -> None:
    """Raises ModelsDiffer for names that are changed, missing or added."""
    if not differences:
        return
    listed = [f"{name} ({what})" for name, what in sorted(differences.items())[:_LISTED]]
    more = f" and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
    raise ModelsDiffer(
        f"{root}: is not as it was signed: {', '.join(listed)}{more}",
        code="changed-since-signed",
    )
