"""Errors of boto3 as megaconv's own: the request that was refused, and what to do.

A message holds the store's error code and never the text of an answer, which may repeat a key or a token.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from formats.errors import CheckpointError, UnsupportedInput
from formats.stores.patience import Transient

_TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)
_TRANSIENT_CODES = {
    "SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "BadDigest",
    "ConditionalRequestConflict", "OperationAborted", "XAmzContentChecksumMismatch",
}  # fmt: skip
_NETWORK = {
    "ConnectionClosedError", "ReadTimeoutError", "ConnectTimeoutError", "EndpointConnectionError", "ConnectionError",
    "ResponseStreamingError", "IncompleteReadError", "HTTPClientError", "ProxyConnectionError", "ConnectionResetError",
}  # fmt: skip
"""Names of boto3's network errors. The classes are not imported: this module is also loaded without boto3."""


class Advice(NamedTuple):
    """The advice to a user about refused requests to one kind of store."""

    denied: str
    unsigned: str
    bucket: str
    """Behind "there is no such bucket at ...;"."""
    other: str
    hints: Mapping[str, str] = {}
    """By the store's code."""


_CHOOSE = "choose other credentials (AWS_PROFILE)"
OF_S3 = Advice(
    denied=f"ask the bucket's owner for this permission, or {_CHOOSE}; "
    "if readers pay for this bucket, write s3://requester-pays@bucket/...",
    unsigned="no credentials were found, so the request was not signed: set AWS_PROFILE, or log in with `aws sso login`",
    bucket="check the name, AWS_REGION and AWS_ENDPOINT_URL",
    other="check the endpoint (AWS_ENDPOINT_URL) and the region (AWS_REGION)",
    hints={
        "RequestTimeTooSkewed": "the clock of this machine is wrong: set it",
        "ExpiredToken": "the credentials have expired: log in again",
        "ExpiredTokenException": "the credentials have expired: log in again",
        "InvalidAccessKeyId": f"the store doesn't know this access key: {_CHOOSE}",
        "SignatureDoesNotMatch": f"the secret key doesn't belong to the access key: {_CHOOSE}",
        "PermanentRedirect": "the bucket is in another region: set AWS_REGION",
        "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION",
        "AllAccessDisabled": "the bucket is locked: ask its owner",
    },
)


class Context(NamedTuple):
    """The circumstances of a request, for the message of an error."""

    request: str
    """Its name, such as `s3:GetObject on bucket/key`."""
    endpoint: str
    advice: Advice
    signed: bool
    """False if there were no credentials."""


def _answer(error: Exception) -> tuple[int, str, float]:
    """(HTTP status, the store's code, seconds that it asks to wait) of an answer; (0, "", 0) if none came."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return 0, "", 0.0
    metadata = response.get("ResponseMetadata", {})
    code = str(response.get("Error", {}).get("Code", ""))
    after = str(metadata.get("HTTPHeaders", {}).get("retry-after", "0"))
    seconds = float(after) if after.isascii() and after.isdigit() else 0.0
    return int(metadata.get("HTTPStatusCode", 0)), code[:60], seconds


def answer_of(error: Exception) -> tuple[int, str]:
    """(HTTP status, the store's code) of an answer; (0, "") if none came."""
    status, code, _ = _answer(error)
    return status, code


def is_replaced(error: Exception) -> bool:
    """True if the answer says that the object with this ETag isn't there any more."""
    status, code, _ = _answer(error)
    return status in (404, 412) and code != "NoSuchBucket"


def transient(error: Exception, context: Context) -> Transient:
    """The failure to repeat. Raises CheckpointError if repeating can't help."""
    if isinstance(error, Transient):
        return error
    if isinstance(error, CheckpointError):
        raise error
    status, code, after = _answer(error)
    if status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES:
        return Transient(f"{status} {code}", after)
    if status:
        raise _refused(status, code, context) from None
    if type(error).__name__ in _NETWORK:
        return Transient(f"{type(error).__name__} at {context.endpoint}")
    raise of_configuration(error, context.request) from None


def _refused(status: int, code: str, context: Context) -> CheckpointError:
    """The error for an answer that repeating doesn't change."""
    request, endpoint, advice, signed = context
    if code == "InvalidObjectState":
        return UnsupportedInput(f"{request}: the object is archived; restore it from Glacier first")
    if code == "NoSuchBucket":
        return CheckpointError(
            f"{request}: there is no such bucket at {endpoint}; {advice.bucket}",
            code="store-refused",
        )
    if code in advice.hints:
        hint = advice.hints[code]
    elif status in (401, 403):
        hint = advice.denied if signed else advice.unsigned
    else:
        hint = advice.other
    return CheckpointError(
        f"{request}: refused by {endpoint} ({status} {code}); {hint}", code="store-refused"
    )


def of_configuration(error: Exception, request: str = "s3") -> CheckpointError:
    """The error for credentials or settings that boto3 can't use."""
    kind = type(error).__name__
    hint = "check AWS_PROFILE, ~/.aws/config and the AWS_* variables"
    if kind in ("SSLError", "SSLCertVerificationError"):
        hint = "its certificate isn't trusted here: set AWS_CA_BUNDLE"
    return CheckpointError(f"{request}: {kind}; {hint}", code="store-refused")


def shown_endpoint(url: str) -> str:
    """An endpoint's address without a name, a password or a query."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}"
