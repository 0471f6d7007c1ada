"""Containers of Azure's Blob Storage, read and written with azure-storage-blob.

    PUT /container/key?comp=block&blockid=…          a block; nobody can see it. Content-MD5 is compared
    PUT /container/key?comp=blocklist                makes the object visible; If-None-Match: * if there must be none

A block's id holds the run's upload, the part's number and the part's CRC-32. The CRC-32 of the whole object is in its
metadata, which appear with it. Azure can't remove blocks: a commit of the same object drops them, or a week without one.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from formats.errors import CheckpointError
from formats.partial_files import RemoteState
from formats.stores import refusals
from formats.stores.checksums import CRC32
from formats.stores.objects import Listed, Listing, replaced, require_few
from formats.stores.patience import Transient
from formats.stores.refusals import NO_ANSWER, Advice, Answer, Place, answer_with
from formats.stores.requests import Refused, Requests
from formats.stores.windows import CONNECTIONS
from formats.stores.writing import (
    ABSENT,
    Conflict,
    Held,
    Small,
    Upload,
    as_sent,
    is_same,
    require_same,
)

_TIMEOUT_SECONDS = 20
_MOST_BYTES = 64 << 20
"""Most bytes of one request. For a longer range the client would make several requests, with headers of their own."""
_WRONG_TLS = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
"""Words of OpenSSL's errors that repeating doesn't change."""
_SUM = "megaconv_crc32"
_FOLDER = "hdi_isfolder"
_BLOCK = re.compile(r"megaconv-([0-9a-f]{32})-(\d{5})-([0-9a-f]{8})")
_ADVICE = Advice(
    denied="ask the container's owner for this permission, or choose other credentials (AZURE_*, `az login`)",
    unsigned="no credentials were found, so the request was not signed: set AZURE_STORAGE_CONNECTION_STRING, or install "
    "azure-identity and log in with `az login`",
    bucket="check the name of the container and the account",
    other="check the account and the container",
)
_log = logging.getLogger("megaconv")


class AzureContainer:
    """A container (formats.stores.writing.WritableStore)."""

    checksum = CRC32
    lists_checksums = True

    def __init__(self, container: str, account: str, uri: str) -> None:
        """account: the host of the account; empty to take the one of the environment. uri: of the container.

        Raises ImportError without azure-storage-blob, CheckpointError for settings that can't be used.
        """
        self.uri, self._container = uri, container
        self._requests = Requests(_answer_of, self._failure)
        self._signed, self._client = _client(container, account)

    @property
    def endpoint(self) -> str:
        """The store's address, for messages."""
        return f"{self._client.scheme}://{self._client.primary_hostname}"

    # Reading.

    def listing(self, prefix: str, *, deep: bool = True) -> Listing:
        def listed() -> Listing:
            found = Listing([], [])
            asked = self._client.list_blobs if deep else self._client.walk_blobs
            pages = asked(name_starts_with=prefix, include=["metadata"])
            for each in pages:
                if not hasattr(each, "size"):
                    found.folders.append(each.name)
                elif not (each.metadata or {}).get(_FOLDER):
                    found.objects.append(Listed(each.name, int(each.size), _tag(each.etag)))
                require_few(found, f"{self.uri}/{prefix}")
            return found

        return self._requests.needed(self._named("list", prefix), listed)

    def request(self, key: str) -> str:
        return self._named("read", key)

    def fetch(self, key: str, state: RemoteState, start: int, out: memoryview) -> Iterator[int]:
        out, noted = out[:_MOST_BYTES], dict[str, str]()
        try:
            download = self._blob(key).download_blob(
                offset=start,
                length=len(out),
                raw_response_hook=_noting(noted),
                **_condition(state.tag),
            )
            content = download.readall()
        except Exception as error:  # azure's, requests' and urllib3's errors have no common class
            answer = _answer_of(error)
            if answer.is_absent or answer.is_condition:
                raise replaced(state) from None
            raise self._failure(error, self.request(key)) from None
        if _tag(noted.get("etag", "")) != state.tag:
            raise replaced(state)
        expected = f"bytes {start}-{start + len(out) - 1}/{state.size}"
        if len(content) != len(out) or noted.get("content-range") != expected:
            raise CheckpointError(
                f"{state.uri}: the store answered a request for {expected} with {len(content)} bytes; is a proxy in between?",
                code="store-unreachable",
            )
        out[:] = content
        yield len(content)

    def require_unchanged(self, states: Sequence[RemoteState]) -> None:
        def look(state: RemoteState) -> None:
            now = self.head(state.uri.removeprefix(f"{self.uri}/"))
            if now is None or (now.size, now.tag) != (state.size, state.tag):
                raise replaced(state)

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(look, states))

    # Whole objects.

    def put(self, key: str, content: bytes, *, only: str | None = None) -> str:
        request, crc = self._named("write", key), f"{CRC32.of(content):08x}"

        def put() -> str:
            answer = self._blob(key).upload_blob(
                content, overwrite=only != ABSENT, validate_content=True, metadata={_SUM: crc}, **_condition(only)
            )  # fmt: skip
            return _tag(answer["etag"])

        try:
            return self._requests.made(request, put)
        except Refused as refused:
            answer = refused.answer
            if only is None or not (answer.is_condition or answer.is_absent):
                raise refused.error from None
            there = self.get(key)
            if there is None or there.content != content:
                raise Conflict(request) from None
            return there.tag

    def get(self, key: str) -> Small | None:
        noted: dict[str, str] = {}

        def get() -> Small:
            download = self._blob(key).download_blob(raw_response_hook=_noting(noted))
            content, state = download.readall(), download.properties
            require_same(CRC32.of(content), _crc_of(state))
            age = parsedate_to_datetime(noted["date"]) - state.last_modified
            return Small(content, _tag(state.etag), max(0.0, age.total_seconds()))

        return self._requests.found(self.request(key), get)

    def head(self, key: str) -> Held | None:
        def head() -> Held:
            state = self._blob(key).get_blob_properties()
            return Held(int(state.size), _tag(state.etag), _crc_of(state))

        return self._requests.found(self.request(key), head)

    def delete(self, key: str) -> None:
        self._requests.found(self._named("delete", key), lambda: self._blob(key).delete_blob())

    # Objects in parts.

    def begin_upload(self, key: str) -> str:
        return uuid4().hex

    def put_part(self, upload: Upload, number: int, content: bytes | bytearray, crc: int) -> str:
        block = f"megaconv-{upload.identity}-{number:05}-{crc:08x}"

        def put() -> str:
            self._blob(upload.key).stage_block(block, bytes(content), validate_content=True)
            return block

        return self._requests.needed(self._named("write", upload.key), put)

    def parts(self, upload: Upload) -> Mapping[int, Held] | None:
        found = {
            number: Held(size, block, int(crc, 16))
            for identity, number, crc, size, block in self._blocks(upload.key)
            if identity == upload.identity
        }
        return found or None

    def _blocks(self, key: str) -> list[tuple[str, int, str, int, str]]:
        """(upload, part's number, CRC-32, size, id) of each block of megaconv that no commit has used."""

        def listed() -> list[tuple[str, int, str, int, str]]:
            _, staged = self._blob(key).get_block_list("uncommitted")
            found = []
            for each in staged:
                match = _BLOCK.fullmatch(each.id)
                if match is not None:
                    found.append((match[1], int(match[2]), match[3], int(each.size), match[0]))
            return found

        return self._requests.found(self.request(key), listed) or []

    def uploads(self, prefix: str) -> list[Upload]:
        def listed() -> list[str]:
            wanted = ["uncommittedblobs", "metadata"]
            found = self._client.list_blobs(name_starts_with=prefix, include=wanted)
            # Directories of a hierarchical namespace are listed as blobs. They have no blocks.
            return [each.name for each in found if not (each.metadata or {}).get(_FOLDER)]

        keys = self._requests.needed(self._named("list", prefix), listed)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            blocks = dict(zip(keys, pool.map(self._blocks, keys), strict=True))
        found = {(key, each[0]) for key, blocks_of_key in blocks.items() for each in blocks_of_key}
        return [Upload(key, identity, 0.0) for key, identity in sorted(found)]

    def complete(
        self, upload: Upload, parts: Mapping[int, Held], whole: Held, *, only: str | None
    ) -> Held:
        request = self._named("write", upload.key)
        blocks = [parts[number].tag for number in sorted(parts)]
        crc = {} if whole.crc is None else {_SUM: f"{whole.crc:08x}"}

        def commit() -> None:
            self._blob(upload.key).commit_block_list(blocks, metadata=crc, **_condition(only))

        try:
            self._requests.made(request, commit)
        except Refused as refused:
            answer = refused.answer
            is_expected = answer.is_condition or answer.is_absent
            if not is_expected and answer.code != "InvalidBlockList":
                raise refused.error from None
            there = self.head(upload.key)
            if there is None or not is_same(there, whole):
                raise Conflict(upload.key) from None
            return there
        return as_sent(self.head(upload.key), whole, f"{self.uri}/{upload.key}")

    def abort(self, upload: Upload) -> None:
        """Nothing to do: Azure drops the blocks with the next commit of the object, or after a week."""

    # Requests.

    def _blob(self, key: str) -> Any:
        return self._client.get_blob_client(key)

    def _named(self, action: str, key: str) -> str:
        return f"azure {action} on {self._container}/{key}"

    def _failure(self, error: Exception, request: str) -> Transient | CheckpointError:
        """The failure to repeat, or the error if repeating can't help."""
        from azure.core.exceptions import AzureError, ClientAuthenticationError

        if isinstance(error, Transient | CheckpointError):
            return error
        answer = _answer_of(error)
        if answer.status:
            return refusals.failure(answer, request, Place(self.endpoint, _ADVICE, self._signed))
        if isinstance(error, ClientAuthenticationError):
            return _unusable(error, request)
        if any(word in str(error) for word in _WRONG_TLS):
            return CheckpointError(
                f"{request}: {self.endpoint} has no certificate that is trusted here; check the endpoint, or set REQUESTS_CA_BUNDLE",
                code="store-refused",
            )
        if isinstance(error, AzureError | OSError):
            return Transient(f"{type(error).__name__} at {self.endpoint}")
        return _unusable(error, request)


def _answer_of(error: Exception) -> Answer:
    """The store's answer in an error of azure-core."""
    response = getattr(error, "response", None)
    if response is None or not getattr(response, "status_code", 0):
        return NO_ANSWER
    headers: Mapping[str, str] = response.headers
    code = getattr(error, "error_code", None) or headers.get("x-ms-error-code") or ""
    return answer_with(int(response.status_code), str(getattr(code, "value", code)), headers)


def _crc_of(state: Any) -> int | None:
    """The CRC-32 in an object's metadata; None if megaconv hasn't written it."""
    word = str((state.metadata or {}).get(_SUM, ""))
    return int(word, 16) if re.fullmatch("[0-9a-f]{8}", word) else None


def _tag(etag: str | None) -> str:
    """An ETag without quotation marks: listings have none, headers have them."""
    return (etag or "").strip('"')


def _noting(noted: dict[str, str]) -> Callable[[Any], None]:
    """A hook that notes the headers of an answer."""

    def note(response: Any) -> None:
        headers = response.http_response.headers
        noted.update({name.lower(): value for name, value in headers.items()})

    return note


def _condition(only: str | None) -> dict[str, Any]:
    from azure.core import MatchConditions

    if only is None:
        return {}
    if only == ABSENT:
        return {"match_condition": MatchConditions.IfMissing}
    return {"etag": f'"{only}"', "match_condition": MatchConditions.IfNotModified}


def _unusable(error: Exception, request: str = "azure") -> CheckpointError:
    return CheckpointError(
        f"{request}: {type(error).__name__}; check AZURE_STORAGE_ACCOUNT, AZURE_STORAGE_CONNECTION_STRING and the other AZURE_* variables",
        code="store-refused",
    )


def _client(container: str, account: str) -> tuple[bool, Any]:
    """(True if requests are signed, azure-storage-blob's client)."""
    from azure.storage.blob import ContainerClient

    settings: dict[str, Any] = {
        "retry_total": 0, "connection_timeout": _TIMEOUT_SECONDS, "read_timeout": _TIMEOUT_SECONDS,
        "max_single_get_size": _MOST_BYTES, "max_single_put_size": _MOST_BYTES, "logging_enable": False,
    }  # fmt: skip
    environment = os.environ
    words = environment.get("AZURE_STORAGE_CONNECTION_STRING")
    try:
        if words and (not account or account.partition(".")[0] == _account_of(words)):
            return True, ContainerClient.from_connection_string(words, container, **settings)
        name = _named_account()
        if not account and not name:
            raise CheckpointError(
                f"az://{container}: no account is named; set AZURE_STORAGE_ACCOUNT, or write abfs://{container}@ACCOUNT.dfs.core.windows.net/...",
                code="store-refused",
            )
        host = account.replace(".dfs.", ".blob.") or f"{name}.blob.core.windows.net"
        credential = _credential()
        made = ContainerClient(f"https://{host}", container, credential=credential, **settings)
        return credential is not None, made
    except ValueError as error:
        raise _unusable(error) from None


def account_of_environment() -> str:
    """The name of the account that a URI without one means; empty if the environment names none."""
    words = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    return _account_of(words) if words else _named_account()


def _named_account() -> str:
    names = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _account_of(words: str) -> str:
    """The name of the account in a connection string; empty if it names none."""
    pairs = [each.partition("=") for each in words.split(";")]
    values = {name.strip().lower(): value.strip() for name, _, value in pairs}
    host = urlsplit(values.get("blobendpoint", "")).hostname or ""
    return values.get("accountname") or host.partition(".")[0]


def _credential() -> Any:
    """A key or a token of the environment, else azure-identity's; None without any."""
    for name in ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"):
        if os.environ.get(name):
            return os.environ[name]
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError:
        _log.warning("az: no credentials were found; requests are not signed")
        return None
    return DefaultAzureCredential()
