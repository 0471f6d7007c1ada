"""The signature that `verify` requires: by a public key, or by an identity of sigstore."""

from collections.abc import Callable
from pathlib import Path

from formats.rank_files import directory_with
from megaconv.errors import CorruptCheckpoint, UsageError
from megaconv.hub import Place
from megaconv.options import SealOptions
from megaconv.signatures.bundle import SIGNATURE_NAME
from megaconv.signatures.checking import Signed, Verifier, check_signature
from megaconv.signatures.keyless import Identity
from megaconv.signatures.keys import public_key


def check_seal(
    path: str | Path,
    place: Place,
    options: SealOptions,
    workers: int,
    advance: Callable[[int], None],
    expect: Callable[[int], None],
) -> Signed | None:
    """The correct signature of a checkpoint; None if the options require none.

    path: the checkpoint as the user gave it. place: where it is. Raises CorruptCheckpoint (`not-signed`), UsageError for
    options that don't go together, and the errors of `check_signature`.
    """
    verifier = _verifier(options)
    if verifier is None:
        return None
    if not Path(path).exists() or isinstance(place, str):
        raise UsageError(f"{path}: a signature covers all files of a directory; download it first")
    root = directory_with(SIGNATURE_NAME, place)
    signature = options.signature or root / SIGNATURE_NAME
    if not signature.exists():
        raise CorruptCheckpoint(
            f"{signature}: no such file, so that the checkpoint is not signed; pass --signature FILE if it lies elsewhere",
            code="not-signed",
        )
    return check_signature(root, signature, verifier, workers, advance, expect)


def has_signature(place: Place) -> bool:
    """True if there is a signature beside a checkpoint's files."""
    if isinstance(place, str):
        return False
    return (directory_with(SIGNATURE_NAME, place) / SIGNATURE_NAME).exists()


def _verifier(options: SealOptions) -> Verifier | None:
    given = (options.identity, options.identity_provider)
    if options.public_key is not None:
        if any(given) or options.trust_config is not None:
            raise UsageError(
                "--public-key: a signature is checked with a key or with --identity; leave one of them out"
            )
        return public_key(options.public_key)
    if options.identity is not None and options.identity_provider is not None:
        return Identity(options.identity, options.identity_provider, options.trust_config)
    if any(given):
        raise UsageError("--identity and --identity-provider: give both")
    if options.signature is not None or options.trust_config is not None:
        raise UsageError(
            "--signature and --trust-config: need --public-key or --identity; nothing else checks a signature"
        )
    return None
