"""A store's answers to requests that fail: those that may be other next time, and the errors of those that stay.

A message holds the store's error code and never the text of an answer, which may repeat a key or a token.
"""

from collections.abc import Mapping
from typing import NamedTuple

from formats.errors import CheckpointError, UnsupportedInput
from formats.stores.patience import Transient

_TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)
_TRANSIENT_CODES = {
    # S3
    "SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "BadDigest",
    "ConditionalRequestConflict", "OperationAborted", "XAmzContentChecksumMismatch",
    # Azure
    "Md5Mismatch", "OperationTimedOut", "ServerBusy",
}  # fmt: skip
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_ARCHIVED = {
    "InvalidObjectState": "restore it from Glacier first",
    "BlobArchived": "restore it to another tier first",
}
_CODE_LENGTH = 60


class Answer(NamedTuple):
    """A store's answer to a request that fails."""

    status: int = 0
    """HTTP status; 0 if no answer came."""
    code: str = ""
    """The store's own code for the error."""
    seconds: float = 0.0
    """The time that the store asks to wait."""

    @property
    def is_condition(self) -> bool:
        """True if the condition of the request doesn't hold."""
        return self.status == 412 or (self.status, self.code) == (409, "BlobAlreadyExists")

    @property
    def is_absent(self) -> bool:
        """True if the bucket has no such object or upload."""
        return self.status == 404 and self.code not in _NO_BUCKET


NO_ANSWER = Answer()


def answer_with(status: int, code: str, headers: Mapping[str, str]) -> Answer:
    """An answer by its status, its code and its headers, which have to be found by names in lower case."""
    after = str(headers.get("retry-after", ""))
    seconds = float(after) if after.isascii() and after.isdigit() else 0.0
    return Answer(status, code[:_CODE_LENGTH], seconds)


class Advice(NamedTuple):
    """The advice to a user about refused requests to one kind of store."""

    denied: str
    unsigned: str
    bucket: str
    """Behind "there is no such bucket at ...;"."""
    other: str
    hints: Mapping[str, str] = {}
    """By the store's code."""


class Place(NamedTuple):
    """The place of a bucket, for messages."""

    endpoint: str
    advice: Advice
    signed: bool
    """False if there were no credentials."""


def failure(answer: Answer, request: str, place: Place) -> Transient | CheckpointError:
    """The failure of a request with this answer. CheckpointError: repeating the request can't help.

    request: its name, such as `s3:GetObject on bucket/key`.
    """
    status, code, seconds = answer
    if status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES:
        return Transient(f"{status} {code}", seconds)
    if code in _ARCHIVED:
        return UnsupportedInput(f"{request}: the object is archived; {_ARCHIVED[code]}")
    if code in _NO_BUCKET:
        return CheckpointError(
            f"{request}: there is no such bucket at {place.endpoint}; {place.advice.bucket}",
            code="store-refused",
        )
    return CheckpointError(
        f"{request}: refused by {place.endpoint} ({status} {code}); {_hint(answer, place)}",
        code="store-refused",
    )


def _hint(answer: Answer, place: Place) -> str:
    advice = place.advice
    if answer.code in advice.hints:
        return advice.hints[answer.code]
    if answer.status in (401, 403):
        return advice.denied if place.signed else advice.unsigned
    return advice.other
