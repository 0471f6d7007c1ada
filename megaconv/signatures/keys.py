"""Keys that sign and verify: ECDSA on the curves P-256, P-384 and P-521, in PEM. Needs the package cryptography."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from formats.errors import CorruptCheckpoint
from formats.regular_files import read_small
from megaconv.errors import ModelsDiffer, UsageError
from megaconv.extras import install
from megaconv.signatures.bundle import Bundle, bundle_json, pae
from megaconv.signatures.statement import corrupt

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

_KEY_BYTES = 64 << 10
"""A key's file; a P-521 key has less than 400 bytes."""


@dataclass(frozen=True)
class PublicKey:
    """A key that verifies."""

    path: Path
    key: "ec.EllipticCurvePublicKey"

    @property
    def hint(self) -> str:
        """SHA-256 of the key in PEM, which names the key in a bundle."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        pem = self.key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return hashlib.sha256(pem).hexdigest()

    def verify(self, bundle: Bundle) -> None:
        """Raises ModelsDiffer (`wrong-signature`) unless this key made the signature for the payload."""
        from cryptography.exceptions import InvalidSignature

        if bundle.has_certificate:
            raise corrupt(bundle.path, "is signed with a certificate, not with a key")
        if bundle.hint not in (None, self.hint):
            raise ModelsDiffer(
                f"{bundle.path}: was signed with another key ({bundle.hint:.16}…) than {self.path} ({self.hint:.16}…)",
                code="wrong-signature",
            )
        try:
            self.key.verify(bundle.signature, pae(bundle.payload), _algorithm(self.key))
        except InvalidSignature as error:
            raise ModelsDiffer(
                f"{bundle.path}: the signature is not one of {self.path} for this statement; don't use the model",
                code="wrong-signature",
            ) from error


@dataclass(frozen=True)
class PrivateKey:
    """A key that signs."""

    path: Path
    key: "ec.EllipticCurvePrivateKey"

    def sign(self, payload: bytes) -> bytes:
        """The bundle with the signature for a statement."""
        public = PublicKey(self.path, self.key.public_key())
        signature = self.key.sign(pae(payload), _algorithm(public.key))
        return bundle_json(payload, signature, public.hint)


def public_key(path: Path) -> PublicKey:
    """Read a public key in PEM. Raises UsageError (`unusable-key`)."""
    require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    content = _read(path)
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        what = "is not a public key in PEM (-----BEGIN PUBLIC KEY-----)"
        if b"PRIVATE KEY-----" in content:
            what = (
                "is a private key, which `seal --key` takes; give the public key that belongs to it"
            )
        raise _unusable(path, what) from error
    return PublicKey(path, _of_known_curve(path, key))


def private_key(path: Path, password: Path | None = None) -> PrivateKey:
    """Read a private key in PEM. password: the file with the password of an encrypted key.

    Raises UsageError (`unusable-key`).
    """
    require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    secret = None if password is None else _read(password).rstrip(b"\r\n")
    try:
        key = serialization.load_pem_private_key(_read(path), secret)
    except TypeError as error:
        needed = "is encrypted: pass --key-password-file" if secret is None else "is not encrypted"
        raise _unusable(path, needed) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        expected = "expected -----BEGIN PRIVATE KEY----- or -----BEGIN EC PRIVATE KEY-----"
        wrong = "" if secret is None else ", or the password is wrong"
        raise _unusable(path, f"is not a private key in PEM{wrong}; {expected}") from error
    _of_known_curve(path, key.public_key())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return PrivateKey(path, key)


def require_cryptography() -> None:
    """Raises UsageError if the package cryptography isn't installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise UsageError(f"signatures need cryptography ({error}); {install('sign')}") from error


def _read(path: Path) -> bytes:
    try:
        return read_small(path, _KEY_BYTES)
    except CorruptCheckpoint as error:
        raise UsageError(str(error), code="unusable-key") from error


def _of_known_curve(path: Path, key: object) -> "ec.EllipticCurvePublicKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise _unusable(path, f"is not an elliptic-curve key; expected ECDSA on {_CURVES}")
    if key.curve.name not in _HASHES:
        raise _unusable(path, f"is on the curve {key.curve.name}; expected {_CURVES}")
    return key


def _unusable(path: Path, what: str) -> UsageError:
    return UsageError(f"{path}: {what}", code="unusable-key")


_CURVES = "P-256, P-384 or P-521"
_HASHES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""The hash of each curve, by cryptography's names."""


def _algorithm(key: "ec.EllipticCurvePublicKey") -> "ec.ECDSA":
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.ECDSA(getattr(hashes, _HASHES[key.curve.name])())
