"""Keys, signatures and sealed checkpoints for tests."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from megaconv.signatures.keys import private_key


@dataclass(frozen=True)
class Keys:
    """The files of a key pair."""

    private: Path
    public: Path


def write_keys(folder: Path, curve: ec.EllipticCurve | None = None, secret: bytes = b"") -> Keys:
    """A new key pair in PEM. secret: the password of the private key, empty for none."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    lock = serialization.BestAvailableEncryption(secret) if secret else serialization.NoEncryption()
    folder.mkdir(parents=True, exist_ok=True)
    keys = Keys(folder / "key.pem", folder / "public.pem")
    keys.private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
    )
    keys.public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return keys


def statement_in(signature: Path) -> Any:
    """The statement of a signature's file."""
    bundle = json.loads(signature.read_bytes())
    return json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))


def sign_again(signature: Path, keys: Keys, change: Callable[[Any], Any]) -> None:
    """Change the statement of a signature, and sign it with the same key: what a hostile signer can do."""
    changed = change(statement_in(signature))
    signature.write_bytes(private_key(keys.private).sign(json.dumps(changed).encode()))
