"""Errors of boto3 as megaconv's own."""

from typing import Any
from urllib.parse import urlsplit

from formats.errors import CheckpointError
from formats.stores import refusals
from formats.stores.patience import Transient
from formats.stores.refusals import NO_ANSWER, Advice, Answer, Place, answer_with

_NETWORK = {
    "ConnectionClosedError", "ReadTimeoutError", "ConnectTimeoutError", "EndpointConnectionError", "ConnectionError",
    "ResponseStreamingError", "IncompleteReadError", "HTTPClientError", "ProxyConnectionError", "ConnectionResetError",
    "FlexibleChecksumError",
}  # fmt: skip
"""Names of boto3's network errors. The classes are not imported: this module is also loaded without boto3."""
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


def answer_of(error: Exception) -> Answer:
    """The store's answer in an error of boto3."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return NO_ANSWER
    metadata = response.get("ResponseMetadata", {})
    code = str(response.get("Error", {}).get("Code", ""))
    return answer_with(
        int(metadata.get("HTTPStatusCode", 0)), code, metadata.get("HTTPHeaders", {})
    )


def failure(error: Exception, request: str, place: Place) -> Transient | CheckpointError:
    """The failure to repeat, or the error if repeating can't help."""
    if isinstance(error, Transient | CheckpointError):
        return error
    answer = answer_of(error)
    if answer.status:
        return refusals.failure(answer, request, place)
    if type(error).__name__ in _NETWORK:
        return Transient(f"{type(error).__name__} at {place.endpoint}")
    return of_configuration(error, request)


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
