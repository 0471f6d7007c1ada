"""URIs of stores.

s3://bucket/prefix                      objects below a prefix, or one object
s3://requester-pays@bucket/prefix       a bucket whose readers pay for requests and traffic
"""

import re
from typing import NamedTuple

SCHEME = "s3://"
_REQUESTER_PAYS = "requester-pays"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")


class Address(NamedTuple):
    """A parsed URI."""

    bucket: str
    prefix: str
    requester_pays: bool


def is_store(place: str) -> bool:
    """True for a URI of a store that can be read."""
    return place.lower().startswith(SCHEME)


def parse(place: str) -> Address:
    """The bucket and the prefix of a URI. Raises ValueError for a URI that names none, or that holds a secret."""
    host, _, prefix = place[len(SCHEME) :].partition("/")
    payer, at, bucket = host.rpartition("@")
    # The message repeats nothing: a secret key may contain a slash, so that a part of it looks like a prefix.
    if (at and payer != _REQUESTER_PAYS) or ":" in host or "X-Amz-" in place:
        raise ValueError(
            f"{SCHEME}...: a URI must not hold credentials or a signature; boto3 finds credentials (AWS_PROFILE, AWS_*)"
        )
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(
            f"{place}: {bucket!r} is no bucket's name (3 to 63 letters, digits, dots and hyphens); expected s3://bucket/prefix"
        )
    return Address(bucket, prefix.strip("/"), bool(at))
