"""Writes to buckets of S3 and of stores that speak its protocol.

    POST /bucket/key?uploads                         begins an upload
    PUT  /bucket/key?uploadId=…&partNumber=7         x-amz-checksum-crc32: the store refuses other bytes
    POST /bucket/key?uploadId=…   If-None-Match: *   makes the object visible, unless there is one

A request whose answer was lost may have succeeded. Before an attempt is called a conflict, the object that is there is
compared with the one that was sent.
"""

import logging
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import partial
from hashlib import md5
from typing import Any, TypeVar

from formats.stores.checksums import CRC32
from formats.stores.requests import Refused
from formats.stores.s3 import S3Bucket
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

_NO_CHECKSUMS = ("NotImplemented", "InvalidArgument", "InvalidRequest", "XNotImplemented")
"""Codes of stores that know no checksums, for a request to begin an upload with one."""
_log = logging.getLogger("megaconv")
_Answer = TypeVar("_Answer")


class WritableS3Bucket(S3Bucket):
    """A bucket (formats.stores.writing.WritableStore)."""

    checksum = CRC32
    lists_checksums = True

    def __init__(self, bucket: str, *, requester_pays: bool = False) -> None:
        super().__init__(bucket, requester_pays=requester_pays)
        self._checksums = True
        """False for a store that refuses checksums; parts then have an MD5."""

    def put(self, key: str, content: bytes, *, only: str | None = None) -> str:
        request = self._named("PutObject", key)

        def put() -> Any:
            sums = self._sums(content, self.checksum.of(content))
            return self._client.put_object(
                Bucket=self._bucket,
                Key=key,
                Body=content,
                **sums,
                **_condition(only),
                **self._extra,
            )

        try:
            return str(self._with_checksums(request, put)["ETag"])
        except Refused as refused:
            answer = refused.answer
            if only is None or not (answer.is_condition or answer.is_absent):
                raise refused.error from None
            there = self.get(key)
            if there is None or there.content != content:
                raise Conflict(request) from None
            return there.tag

    def get(self, key: str) -> Small | None:
        place = {**self._asked_checksum(), "Bucket": self._bucket, "Key": key, **self._extra}

        def get() -> tuple[bytes, Any]:
            answer = self._client.get_object(**place)
            content = answer["Body"].read()
            require_same(self.checksum.of(content), self._crc_of(answer))
            return content, answer

        found = self._requests.found(self._named("GetObject", key), get)
        if found is None:
            return None
        content, answer = found
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        age = (now - answer["LastModified"]).total_seconds()
        return Small(content, str(answer["ETag"]), max(0.0, age))

    def head(self, key: str) -> Held | None:
        answer = self._answer_to_head(key)
        if answer is None:
            return None
        return Held(int(answer["ContentLength"]), str(answer["ETag"]), self._crc_of(answer))

    def _answer_to_head(self, key: str) -> Any:
        place = {**self._asked_checksum(), "Bucket": self._bucket, "Key": key, **self._extra}
        call = partial(self._client.head_object, **place)
        return self._requests.found(self._named("GetObject", key), call)

    def _asked_checksum(self) -> dict[str, str]:
        """The setting of a request whose answer should have the object's checksum."""
        return {"ChecksumMode": "ENABLED"} if self._checksums else {}

    def _crc_of(self, answer: Mapping[str, Any]) -> int | None:
        """The checksum of a whole object in an answer about it; None if the store keeps none."""
        is_whole = answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
        return _crc(answer) if is_whole else None

    def delete(self, key: str) -> None:
        place = {"Bucket": self._bucket, "Key": key, **self._extra}
        call = partial(self._client.delete_object, **place)
        self._requests.found(self._named("DeleteObject", key), call)

    def begin_upload(self, key: str) -> str:
        request = self._named("PutObject", key)

        def begin() -> Any:
            wanted = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}
            asked = wanted if self._checksums else {}
            return self._client.create_multipart_upload(
                Bucket=self._bucket, Key=key, **asked, **self._extra
            )

        try:
            return str(self._with_checksums(request, begin)["UploadId"])
        except Refused as refused:
            raise refused.error from None

    def _with_checksums(self, request: str, call: Callable[[], _Answer]) -> _Answer:
        """The answer to a request with a checksum, and without it from a store that knows none. Raises Refused."""
        try:
            return self._requests.made(request, call)
        except Refused as refused:
            if not self._checksums or refused.answer.code not in _NO_CHECKSUMS:
                raise
        self._checksums = False
        _log.warning("%s: the store knows no checksums; parts are sent with an MD5", self.uri)
        return self._requests.made(request, call)

    def put_part(self, upload: Upload, number: int, content: bytes | bytearray, crc: int) -> str:
        request = self._named("PutObject", upload.key)
        sums = self._sums(content, crc)

        def put() -> Any:
            return self._client.upload_part(
                **self._place(upload), PartNumber=number, Body=content, **sums
            )

        return str(self._requests.needed(request, put)["ETag"])

    def parts(self, upload: Upload) -> Mapping[int, Held] | None:
        request = self._named("ListMultipartUploadParts", upload.key)
        found: dict[int, Held] = {}
        after = 0
        while True:
            place = {**self._place(upload), "PartNumberMarker": after}
            page = self._requests.found(request, partial(self._client.list_parts, **place))
            if page is None:
                return None
            for each in page.get("Parts", ()):
                held = Held(int(each["Size"]), str(each["ETag"]), _crc(each))
                found[int(each["PartNumber"])] = held
            following = int(page.get("NextPartNumberMarker") or 0)
            if not page.get("IsTruncated") or following <= after:
                return found
            after = following

    def uploads(self, prefix: str) -> list[Upload]:
        request = self._named("ListBucketMultipartUploads", prefix)
        found: list[Upload] = []
        marker: dict[str, str] = {}
        while True:
            asked = {"Bucket": self._bucket, "Prefix": prefix, **marker}
            call = partial(self._client.list_multipart_uploads, **asked, **self._extra)
            page: Any = self._requests.needed(request, call)
            for each in page.get("Uploads", ()):
                began = each["Initiated"].timestamp()
                found.append(Upload(str(each["Key"]), str(each["UploadId"]), began))
            following = {
                "KeyMarker": str(page.get("NextKeyMarker") or ""),
                "UploadIdMarker": str(page.get("NextUploadIdMarker") or ""),
            }
            if not page.get("IsTruncated") or following == marker:
                return [each for each in found if each.key.startswith(prefix)]
            marker = following

    def complete(
        self, upload: Upload, parts: Mapping[int, Held], whole: Held, *, only: str | None
    ) -> Held:
        request = self._named("PutObject", upload.key)
        listed = [{"PartNumber": number, "ETag": parts[number].tag} for number in sorted(parts)]
        sums: dict[str, Any] = {}
        if self._checksums and whole.crc is not None:
            sums = {"ChecksumCRC32": _word(whole.crc), "ChecksumType": "FULL_OBJECT"}

        def complete() -> Any:
            return self._client.complete_multipart_upload(
                **self._place(upload),
                MultipartUpload={"Parts": listed},
                **sums,
                **_condition(only),
            )

        try:
            self._requests.made(request, complete)
        except Refused as refused:
            if not (refused.answer.is_condition or refused.answer.is_absent):
                raise refused.error from None
            there = self.head(upload.key)
            if there is None or not is_same(there, whole):
                raise Conflict(upload.key) from None
            return there
        return as_sent(self.head(upload.key), whole, f"{self.uri}/{upload.key}")

    def abort(self, upload: Upload) -> None:
        call = partial(self._client.abort_multipart_upload, **self._place(upload))
        self._requests.found(self._named("AbortMultipartUpload", upload.key), call)

    def _place(self, upload: Upload) -> dict[str, Any]:
        place = {"Bucket": self._bucket, "Key": upload.key, "UploadId": upload.identity}
        return {**place, **self._extra}

    def _sums(self, content: bytes | bytearray, crc: int) -> dict[str, str]:
        """The checksum of a request's body, as the store knows it."""
        if self._checksums:
            return {"ChecksumCRC32": _word(crc)}
        digest = md5(content, usedforsecurity=False).digest()
        return {"ContentMD5": b64encode(digest).decode()}


def _condition(only: str | None) -> dict[str, str]:
    if only is None:
        return {}
    return {"IfNoneMatch": ABSENT} if only == ABSENT else {"IfMatch": only}


def _word(crc: int) -> str:
    return b64encode(crc.to_bytes(4, "big")).decode()


def _crc(answer: Mapping[str, Any]) -> int | None:
    word = str(answer.get("ChecksumCRC32") or "")
    # A composite checksum, of the parts' checksums, ends with their number.
    return int.from_bytes(b64decode(word), "big") if word and "-" not in word else None
