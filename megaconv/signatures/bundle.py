"""The file of a signature: a sigstore bundle with a DSSE envelope, in JSON.

    {"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
     "verificationMaterial": {"publicKey": {"hint": HASH}, "tlogEntries": []},
     "dsseEnvelope": {
       "payload": BASE64, "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": BASE64, "keyid": ""}]}}

HASH is SHA-256 over the public key in PEM, in hexadecimal. The signature is over the `pae` of the payload. A bundle of
sigstore has a `certificate` instead of the public key, and entries of the transparency log.
"""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.ceilings import SIGNATURE_BYTES
from formats.errors import CheckpointError, CorruptCheckpoint
from formats.regular_files import parse_json, read_small
from megaconv.signatures.statement import Statement, corrupt, parse_statement

SIGNATURE_NAME = "model.sig"
"""The file name of a signature in the model's directory."""
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
_MOST_VALUES = 20_000
"""JSON values of a bundle. The statement in it is a single text."""


@dataclass(frozen=True)
class Bundle:
    """A signature's file, read but not verified."""

    path: Path
    content: bytes
    """The whole file."""
    payload: bytes
    """The statement, as it was signed."""
    signature: bytes
    hint: str | None
    """SHA-256 of the key that signed, if the bundle says it."""
    has_certificate: bool
    """True if a certificate verifies the signature, False if a key does."""

    def statement(self) -> Statement:
        """The statement. Raises CorruptCheckpoint (`corrupt-signature`)."""
        return parse_statement(self.payload, self.path)


def pae(payload: bytes) -> bytes:
    """The bytes that are signed: DSSE's pre-authentication encoding of a payload."""
    return f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} ".encode() + payload


def bundle_json(payload: bytes, signature: bytes, hint: str) -> bytes:
    """The file of a key's signature. hint: SHA-256 of the public key in PEM."""
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
    }
    value = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": envelope,
    }
    return json.dumps(value).encode()


def read_bundle(path: Path) -> Bundle:
    """Read a signature's file. Verifies nothing.

    Raises CorruptCheckpoint (`corrupt-signature`) for a file that isn't a bundle of this kind.
    """
    try:
        content = read_small(path, SIGNATURE_BYTES)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(str(error), code="corrupt-signature") from error
    return parse_bundle(path, content)


def parse_bundle(path: Path, content: bytes) -> Bundle:
    """The bundle in the content of a signature's file. path: for messages.

    Raises CorruptCheckpoint (`corrupt-signature`).
    """
    try:
        return _bundle(path, content, parse_json(content, most_values=_MOST_VALUES))
    except CheckpointError:
        raise
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise corrupt(path, f"is not a readable sigstore bundle ({error})") from error


def _bundle(path: Path, content: bytes, value: Any) -> Bundle:
    """Raises ValueError, KeyError, TypeError or AttributeError for another structure."""
    media, envelope = value["mediaType"], value["dsseEnvelope"]
    if media != MEDIA_TYPE:
        raise ValueError(f"its mediaType is {media!r:.100}, expected {MEDIA_TYPE}")
    if envelope["payloadType"] != PAYLOAD_TYPE:
        raise ValueError(
            f"its payloadType is {envelope['payloadType']!r:.100}, expected {PAYLOAD_TYPE}"
        )
    if len(envelope["signatures"]) != 1:
        raise ValueError(f"it has {len(envelope['signatures'])} signatures, expected one")
    material = value["verificationMaterial"]
    key = material.get("publicKey") or {}
    hint = key.get("hint")
    if hint is not None and not isinstance(hint, str):
        raise ValueError("its key hint is not a text")
    return Bundle(
        path=path,
        content=content,
        payload=_decoded(envelope["payload"]),
        signature=_decoded(envelope["signatures"][0]["sig"]),
        hint=hint or None,
        has_certificate="certificate" in material or "x509CertificateChain" in material,
    )


def _decoded(text: Any) -> bytes:
    return base64.b64decode(text.encode("ascii"), validate=True)
