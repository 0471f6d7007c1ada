"""Google Cloud Storage's XML API as a small server in this process: bearer tokens, generations, CRC-32C.

It refuses what Google refuses: S3's conditions and checksums, and any condition on a request of an upload in parts.
"""

import base64
import json
from pathlib import Path
from urllib.parse import urlsplit

from formats.stores.checksums import crc32c
from tests.stores.small_store import Answer, Handler, Object, Refused, SmallStore, answer_xml

SECRET = "marked-token-of-the-tests"


class SmallGoogle(SmallStore):
    """A bucket, and the place where tokens come from. `expired` makes it refuse the tokens that it has given."""

    def __init__(self, bucket: str) -> None:
        self.given = 0
        super().__init__(bucket, GoogleHandler)

    def expire(self) -> None:
        self.given += 1

    def account(self, directory: Path) -> Path:
        """The file of a service account of this server."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import rsa

        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        text = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        path = directory / "account.json"
        content = {
            "type": "service_account", "project_id": "tests", "client_email": "tests@example.com",
            "private_key_id": "1", "private_key": text.decode(), "token_uri": f"{self.url}/token",
        }  # fmt: skip
        path.write_text(json.dumps(content))
        return path


class GoogleHandler(Handler):
    server: SmallGoogle

    @property
    def is_for_token(self) -> bool:
        """True for a request to the endpoint of tokens, also if it comes as to a proxy."""
        return urlsplit(self.path).path == "/token"

    def action(self, key: str, query: dict[str, str]) -> str:
        return "token" if self.is_for_token else super().action(key, query)

    def require_signed(self) -> None:
        if self.is_for_token:
            return
        if self.headers.get("Authorization") != f"Bearer {SECRET}-{self.server.given}":
            raise Refused(401, "AuthenticationRequired")
        named = [name.lower() for name in self.headers]
        foreign = [name for name in named if name.startswith("x-amz-checksum")]
        if self.command not in ("GET", "HEAD"):
            foreign += [name for name in named if name in ("if-match", "if-none-match")]
        is_condition = "x-goog-if-generation-match" in named
        if foreign or (is_condition and "uploadId" in self.path):
            raise Refused(400, "NotImplemented")

    def place(self) -> tuple[str, str]:
        return (self.server.bucket, "") if self.is_for_token else super().place()

    def do_token(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        token = {
            "access_token": f"{SECRET}-{self.server.given}",
            "expires_in": 3600,
            "token_type": "Bearer",
        }
        return 200, {"Content-Type": "application/json"}, json.dumps(token).encode()

    def described(self, found: Object, key: str) -> dict[str, str]:
        word = crc32c().of(found.content).to_bytes(4, "big")
        return super().described(found, key) | {
            "x-goog-generation": str(found.generation),
            "x-goog-hash": f"crc32c={base64.b64encode(word).decode()}",
        }

    def require(self, key: str) -> None:
        wanted, there = self.headers.get("x-goog-if-generation-match"), self.server.objects.get(key)
        if wanted is not None and int(wanted) != (0 if there is None else there.generation):
            raise Refused(412, "PreconditionFailed")

    def do_complete(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        answer = super().do_complete(key, query, body)
        with self.server.lock:
            # Google's ETag of an object that was uploaded in parts is not made of MD5s.
            self.server.objects[key].tag = f'"-CJ{self.server.objects[key].generation}="'
        return answer if answer[0] != 200 else answer_xml("<CompleteMultipartUploadResult />")
