"""Compares a directory with its signature: first the signature with the key, then every file with the statement."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megaconv.errors import ModelsDiffer, UnsupportedInput
from megaconv.signatures.bundle import SIGNATURE_NAME, Bundle, read_bundle
from megaconv.signatures.directory import GIT_PATHS, covered_files, state_of
from megaconv.signatures.statement import FILES, SINGLE_FILE, Method, Statement

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
    """Paths that the signer left out, beyond those of git and the signature itself."""


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
    names = covered_files(root, _all_but(statement.method, signature, root))
    _require_same(root, signature, statement, dict.fromkeys(names, ""))
    now = state_of(
        root,
        _all_but(statement.method, signature, root),
        workers,
        advance=advance,
        expect=expect,
    )
    _require_same(root, signature, statement, now.digests)
    usual = {*GIT_PATHS, SIGNATURE_NAME, _below(signature, root)}
    left_out = tuple(each for each in statement.method.ignore_paths if each not in usual)
    return Signed(str(signature), statement.root, len(statement.digests), left_out)


def _all_but(method: Method, signature: Path, root: Path) -> Method:
    """The method, without the signature's own file."""
    ignored = (*method.ignore_paths, SIGNATURE_NAME, _below(signature, root))
    return Method(method.name, method.hash_type, method.allow_symlinks, ignored, method.shard_size)


def _below(signature: Path, root: Path) -> str:
    """The signature's path below the model's directory; its own name if it lies elsewhere."""
    try:
        return signature.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        return SIGNATURE_NAME


def _require_same(root: Path, signature: Path, signed: Statement, now: dict[str, str]) -> None:
    """Raises ModelsDiffer for files that are changed, missing or added. Empty digests in `now` are not compared."""
    if set(signed.digests) == {SINGLE_FILE}:
        raise UnsupportedInput(
            f"{signature}: signs a single file; megaconv verifies the files of a directory"
        )
    if signed.method.name != FILES and "" in now.values():
        return  # names of files say nothing about shards
    found = {
        name: "changed"
        for name, digest in signed.digests.items()
        if now.get(name, digest) not in (digest, "")
    }
    found |= {name: "missing" for name in signed.digests if name not in now}
    found |= {name: "added" for name in now if name not in signed.digests}
    if found:
        listed = [f"{name} ({what})" for name, what in sorted(found.items())[:_LISTED]]
        more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        raise ModelsDiffer(
            f"{root}: is not as it was signed: {', '.join(listed)}{more}",
            code="changed-since-signed",
        )
