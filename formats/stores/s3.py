"""Buckets of S3, and of every store that speaks its protocol (R2, MinIO, Ceph, GCS with HMAC keys), read with boto3.

    GET /bucket?list-type=2&prefix=run/            the objects, 1,000 a request
    GET /bucket/key   Range: bytes=0-8388607   If-Match: "<ETag of the listing>"
    206, Content-Range: bytes 0-8388607/4976698672

boto3 finds credentials, region, endpoint and proxies as it does everywhere: environment, profile, single sign-on, web
identity, instance metadata. Requests are repeated by `patience.py` and not by boto3, which repeats no broken body.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import cache, partial
from http.client import HTTPResponse
from threading import Lock
from typing import Any

from formats.errors import CheckpointError
from formats.partial_files import RemoteState
from formats.stores import s3_errors
from formats.stores.objects import Listed, Listing, replaced, require_few
from formats.stores.patience import Transient
from formats.stores.refusals import Place
from formats.stores.requests import Requests
from formats.stores.windows import CONNECTIONS

_TIMEOUT_SECONDS = 20
"""For a connection, for the first byte of an answer, and between two bytes."""
_PIECE_BYTES = 256 << 10
_CHECKSUM = "x-amz-checksum-crc32"
_log = logging.getLogger("megaconv")


class S3Bucket:
    """A bucket (formats.stores.objects.Store)."""

    scheme = "s3"
    advice = s3_errors.OF_S3

    def __init__(self, bucket: str, *, requester_pays: bool = False) -> None:
        """bucket: its name. requester_pays: agree to pay for requests and traffic.

        Raises ImportError without boto3, and CheckpointError for a configuration that boto3 can't use.
        """
        self.uri = f"{self.scheme}://{bucket}"
        self._bucket = bucket
        self._extra = {"RequestPayer": "requester"} if requester_pays else {}
        self._requests = Requests(s3_errors.answer_of, self._failure)
        self._signed, self._client = self._connected()

    def _connected(self) -> tuple[bool, Any]:
        """(True if requests are signed, boto3's client)."""
        return _client()

    def _named(self, action: str, key: str) -> str:
        """The name of a request in messages."""
        return f"s3:{action} on {self._bucket}/{key}"

    def listing(self, prefix: str, *, deep: bool = True) -> Listing:
        found, wanted = Listing([], []), {"Delimiter": "/"} if not deep else {}
        token: dict[str, str] = {}
        while True:
            page = self._page({"Prefix": prefix, **wanted, **token})
            for each in page.get("Contents", ()):
                found.objects.append(Listed(each["Key"], int(each["Size"]), str(each["ETag"])))
            found.folders.extend(each["Prefix"] for each in page.get("CommonPrefixes", ()))
            require_few(found, f"{self.uri}/{prefix}")
            following = page.get("NextContinuationToken")
            if not page.get("IsTruncated"):
                return found
            if not following or following == token.get("ContinuationToken"):
                raise CheckpointError(
                    f"{self.uri}/{prefix}: the store's listing doesn't end; is the endpoint one of S3?",
                    code="store-unreachable",
                )
            token = {"ContinuationToken": following}

    def _page(self, asked: dict[str, str]) -> Any:
        place = {"Bucket": self._bucket, **asked, **self._extra}
        request = self._named("ListBucket", asked["Prefix"])
        return self._requests.needed(request, partial(self._client.list_objects_v2, **place))

    def request(self, key: str) -> str:
        return self._named("GetObject", key)

    def fetch(self, key: str, state: RemoteState, start: int, out: memoryview) -> Iterator[int]:
        wanted = f"bytes={start}-{start + len(out) - 1}"
        try:
            answer = self._client.get_object(
                Bucket=self._bucket, Key=key, Range=wanted, IfMatch=state.tag, **self._extra
            )
        except Exception as error:  # boto's errors have no common class
            answer = s3_errors.answer_of(error)
            if answer.is_absent or answer.is_condition:
                raise replaced(state) from None
            raise self._failure(error, self.request(key)) from None
        body = answer["Body"]
        try:
            _require_range(answer, state, start, len(out))
            yield from _pieces(body, out)
        finally:
            # The connection can be used again only if the body was read to its end.
            body.close()

    def require_unchanged(self, states: Sequence[RemoteState]) -> None:
        names = [state.uri.removeprefix(f"{self.uri}/") for state in states]
        prefix = _common_prefix(names)
        now = {each.key: each for each in self.listing(prefix).objects}
        for name, state in zip(names, states, strict=True):
            if name not in now or (now[name].size, now[name].tag) != (state.size, state.tag):
                raise replaced(state)

    def _failure(self, error: Exception, request: str) -> Transient | CheckpointError:
        """The failure to repeat, or the error if repeating can't help."""
        place = Place(self.endpoint, self.advice, signed=self._signed)
        return s3_errors.failure(error, request, place)

    @property
    def endpoint(self) -> str:
        """The store's address, for messages."""
        return s3_errors.shown_endpoint(str(self._client.meta.endpoint_url))


def _common_prefix(names: Sequence[str]) -> str:
    """The longest prefix of names that ends with a slash; the name if there is only one."""
    if len(names) == 1:
        return names[0]
    first, last = min(names), max(names)
    common = next((n for n, each in enumerate(first) if last[n : n + 1] != each), len(first))
    return first[: first.rfind("/", 0, common) + 1]


def _require_range(answer: Any, state: RemoteState, start: int, count: int) -> None:
    """Check that an answer holds the range that was asked for, of the object that was listed."""
    content_range = str(answer.get("ContentRange", ""))
    if answer.get("ETag") != state.tag:
        raise replaced(state)
    status = answer["ResponseMetadata"]["HTTPStatusCode"]
    encoding = answer.get("ContentEncoding") or "identity"
    expected = f"bytes {start}-{start + count - 1}/{state.size}"
    if status != 206 or content_range != expected or encoding not in ("identity", "aws-chunked"):
        found = f"status {status}, {content_range or 'no Content-Range'}, encoding {encoding}"
        raise CheckpointError(
            f"{state.uri}: the store answered a request for {expected} with {found}; is a proxy in between?",
            code="store-unreachable",
        )


def _pieces(body: Any, out: memoryview) -> Iterator[int]:
    """Fill a buffer from a body. Yields the sizes of the pieces. Raises Transient if it breaks off."""
    done = 0
    below = _answer_below(body)
    read = body.readinto if below is None else below.readinto
    while done < len(out):
        try:
            count = read(out[done : done + _PIECE_BYTES])
        except Exception as error:  # urllib3's, http.client's and botocore's errors differ
            raise Transient(f"a broken body: {type(error).__name__}") from error
        if not count:
            raise Transient(f"a body that ended after {done} of {len(out)} bytes")
        done += count
        yield count
    if below is not None and below.isclosed():
        body._raw_stream.release_conn()


def _answer_below(body: Any) -> Any:
    """http.client's answer below a body of botocore, which reads into a buffer; None for a body of another library.

    urllib3 would first read into memory of its own.
    """
    answer = getattr(getattr(body, "_raw_stream", None), "_fp", None)
    return answer if isinstance(answer, HTTPResponse) else None


_making = Lock()
"""boto3's sessions must not be used by several threads at the same time."""


def unsigned_client(endpoint: str) -> Any:
    """boto3's client for another store that speaks S3's protocol. Its requests aren't signed."""
    from botocore import UNSIGNED
    from botocore.config import Config

    paths = {"addressing_style": "path"}
    config = Config(**_settings(), signature_version=UNSIGNED, s3=paths)
    with _making:
        place = {"region_name": "auto", "endpoint_url": endpoint}
        return _session().create_client("s3", **place, config=config)


def _session() -> Any:
    """A new session of botocore, which finds credentials and settings as boto3 does."""
    import botocore.session

    session = botocore.session.get_session()
    descriptions = _descriptions(session.get_config_variable("data_path"))
    session.register_component("data_loader", descriptions)
    return session


@cache
def _descriptions(paths: str | None) -> Any:
    """botocore's descriptions of services. Parsing them takes most of the time to make a client."""
    from botocore.loaders import create_loader

    return create_loader(paths)


def _settings() -> dict[str, Any]:
    """The settings of a client."""
    return {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": _TIMEOUT_SECONDS,
        "read_timeout": _TIMEOUT_SECONDS,
        "max_pool_connections": 2 * CONNECTIONS,
        "response_checksum_validation": "when_required",
        "request_checksum_calculation": "when_required",
    }


def _client() -> tuple[bool, Any]:
    """(True if requests are signed, boto3's client). Without any credentials, requests go out unsigned."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    settings = _settings()
    try:
        with _making:
            session = _session()
            signed = session.get_credentials() is not None
            if not signed:
                _log.warning("s3: no credentials were found; requests are not signed")
                settings["signature_version"] = UNSIGNED
            client = session.create_client("s3", config=Config(**settings))
            client.meta.events.register("before-sign.s3.UploadPart", _rely_on_tls)
            return signed, client
    except (BotoCoreError, ValueError) as error:
        raise s3_errors.of_configuration(error) from error


def _rely_on_tls(request: Any, **_: Any) -> None:
    """Tell botocore that a part has a checksum.

    Through TLS, botocore then signs no SHA-256 of the part. It knows that by itself only of checksums that it computes.
    """
    if _CHECKSUM in request.headers:
        known = request.context.get("checksum", {})
        given = {"in": "header", "name": _CHECKSUM}
        request.context["checksum"] = {**known, "request_algorithm": given}
