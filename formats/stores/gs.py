"""Google Cloud Storage by its XML API: the requests of S3 with a bearer token.

    Authorization: Bearer …               from google-auth: a service account, gcloud's login, the role of the machine
    x-goog-if-generation-match: 0         for S3's If-None-Match: *; a number for If-Match
    x-goog-hash: crc32c=…                 of a whole object, also of one that was uploaded in parts

The XML API allows no condition when an upload becomes an object. A completed upload therefore looks first, and may replace an
object that another program writes at the same moment. The claim and small files have conditions, so that of two runs of
megaconv exactly one wins.
"""

import logging
import os
from base64 import b64decode
from collections.abc import Mapping
from threading import Lock
from typing import Any

from formats.errors import CheckpointError
from formats.stores import s3_errors
from formats.stores.checksums import crc32c
from formats.stores.patience import Transient
from formats.stores.refusals import Advice
from formats.stores.s3 import unsigned_client
from formats.stores.s3_writing import WritableS3Bucket
from formats.stores.writing import ABSENT, Conflict, Held, Upload, is_same

_ENDPOINT = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_GENERATION = "generation "
_ACTIONS = {
    "ListBucket": "storage.objects.list",
    "GetObject": "storage.objects.get",
    "PutObject": "storage.objects.create",
    "DeleteObject": "storage.objects.delete",
    "AbortMultipartUpload": "storage.multipartUploads.abort",
    "ListMultipartUploadParts": "storage.multipartUploads.listParts",
    "ListBucketMultipartUploads": "storage.multipartUploads.list",
}
"""Google's permissions for S3's actions."""
_ADVICE = Advice(
    denied="ask the bucket's owner for this permission, or choose other credentials (GOOGLE_APPLICATION_CREDENTIALS)",
    unsigned="no credentials were found, so the request was not signed: log in with `gcloud auth application-default login`",
    bucket="check the name and the project",
    other="check the endpoint (STORAGE_EMULATOR_HOST)",
)
_log = logging.getLogger("megaconv")


class GoogleBucket(WritableS3Bucket):
    """A bucket (formats.stores.writing.WritableStore)."""

    scheme = "gs"
    advice = _ADVICE
    lists_checksums = False

    def __init__(self, bucket: str, *, requester_pays: bool = False) -> None:
        """requester_pays: let the project of the credentials pay for requests and traffic.

        Raises ImportError without boto3 and google-auth, CheckpointError for credentials that can't be used.
        """
        self._tokens = _Tokens(requester_pays=requester_pays)
        self.checksum = crc32c()
        super().__init__(bucket)
        self._checksums = False  # S3's; parts have an MD5

    def _connected(self) -> tuple[bool, Any]:
        endpoint = os.environ.get("STORAGE_EMULATOR_HOST") or _ENDPOINT
        client = unsigned_client(endpoint if "://" in endpoint else f"http://{endpoint}")
        client.meta.events.register("before-send.s3", self._authorized)
        return self._tokens.exist, client

    def _authorized(self, request: Any, **_: Any) -> None:
        """Give a request Google's headers."""
        for name, value in self._tokens.headers().items():
            request.headers[name] = value
        if request.method in ("GET", "HEAD"):
            return
        for name in ("If-None-Match", "If-Match"):
            word = request.headers.get(name)
            if word is not None:
                del request.headers[name]
                text = word.decode() if isinstance(word, bytes) else str(word)
                generation = "0" if text == ABSENT else text.removeprefix(_GENERATION)
                request.headers["x-goog-if-generation-match"] = generation

    def _named(self, action: str, key: str) -> str:
        return f"{_ACTIONS[action]} on {self._bucket}/{key}"

    def _failure(self, error: Exception, request: str) -> Transient | CheckpointError:
        if s3_errors.answer_of(error).status == 401 and self._tokens.exist:
            try:
                self._tokens.refresh()
            except (Transient, CheckpointError) as failure:
                return failure
            return Transient("401: the token was not accepted")
        return super()._failure(error, request)

    def put(self, key: str, content: bytes, *, only: str | None = None) -> str:
        condition = only
        if only not in (None, ABSENT):
            there = self._answer_to_head(key)
            if there is None or there["ETag"] != only:
                found = self.get(key)
                if found is not None and found.content == content:
                    return found.tag
                raise Conflict(self._named("PutObject", key))
            condition = _GENERATION + str(_headers(there)["x-goog-generation"])
        return super().put(key, content, only=condition)

    def complete(
        self, upload: Upload, parts: Mapping[int, Held], whole: Held, *, only: str | None
    ) -> Held:
        if only is not None:
            there = self.head(upload.key)
            is_ours = there is not None and is_same(there, whole)
            if is_ours and self.parts(upload) is None and there is not None:
                return there  # an earlier attempt, whose answer was lost
            is_expected = (
                there is None if only == ABSENT else there is not None and there.tag == only
            )
            if not is_expected:
                raise Conflict(upload.key)
        return super().complete(upload, parts, whole, only=None)

    def _crc_of(self, answer: Mapping[str, Any]) -> int | None:
        for word in str(_headers(answer).get("x-goog-hash", "")).split(","):
            kind, _, value = word.strip().partition("=")
            if kind == "crc32c":
                return int.from_bytes(b64decode(value), "big")
        return None


def _headers(answer: Mapping[str, Any]) -> Mapping[str, str]:
    found: Mapping[str, str] = answer["ResponseMetadata"]["HTTPHeaders"]
    return found


class _Tokens:
    """The bearer tokens of google-auth's default credentials. Without credentials, requests are not signed."""

    def __init__(self, *, requester_pays: bool) -> None:
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError
        from google.auth.transport.requests import Request

        self._lock = Lock()
        self._payer: dict[str, str] = {}
        # urllib3's transport ignores the proxies and the certificates of the environment.
        self._transport = Request()
        self._credentials: Any = None
        try:
            self._credentials, project = google.auth.default(scopes=[_SCOPE])
        except DefaultCredentialsError as error:
            if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
                raise _unusable(error) from None
            _log.warning("gs: no credentials were found; requests are not signed")
            return
        if requester_pays and project:
            self._payer = {"x-goog-user-project": project}

    @property
    def exist(self) -> bool:
        return self._credentials is not None

    def headers(self) -> dict[str, str]:
        """The headers of a request. Fetches a token if there is none, or if it expires soon."""
        if self._credentials is None:
            return {}
        with self._lock:
            if not self._credentials.valid:
                self._fetch()
            return {"Authorization": f"Bearer {self._credentials.token}", **self._payer}

    def refresh(self) -> None:
        """Fetch another token."""
        with self._lock:
            self._fetch()

    def _fetch(self) -> None:
        """Raises Transient if the endpoint of tokens can't be reached now, CheckpointError if it gives no token."""
        from google.auth.exceptions import GoogleAuthError, TransportError

        try:
            self._credentials.refresh(self._transport)
        except GoogleAuthError as error:
            if isinstance(error, TransportError) or error.retryable:
                raise Transient(f"{type(error).__name__} at the endpoint of tokens") from None
            raise _unusable(error) from None


def _unusable(error: Exception) -> CheckpointError:
    """The error for credentials that give no token. It holds no text of an answer, which may repeat a secret."""
    return CheckpointError(
        f"gs: {type(error).__name__}: the credentials can't be used; check GOOGLE_APPLICATION_CREDENTIALS, "
        "or log in with `gcloud auth application-default login`",
        code="store-refused",
    )
