"""URIs of stores.

s3://bucket/prefix                                       objects below a prefix, or one object
gs://bucket/prefix                                       the same in Google Cloud Storage
az://container/prefix                                    the same in Azure, in the account of the environment
abfs://container@account.dfs.core.windows.net/prefix     the same in a named account; abfss:// too
s3://requester-pays@bucket/prefix                        a bucket whose readers pay for requests and traffic; gs:// too
"""

import re
from typing import NamedTuple

S3, GOOGLE, AZURE = "s3", "gs", "az"
_KINDS = {"s3": S3, "gs": GOOGLE, "gcs": GOOGLE, "az": AZURE, "abfs": AZURE, "abfss": AZURE}
_REQUESTER_PAYS = "requester-pays"
_URI = re.compile(r"([A-Za-z0-9]+)://([^/]*)/?(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}\.(dfs|blob)\.[a-z0-9.-]+")
_SIGNED = re.compile("[?&](X-Amz-|X-Goog-|sig=)", re.IGNORECASE)
"""A parameter of a signed URL. The same letters may be in a key's path."""
_LONGEST_PART = 255
_CHAINS = {
    S3: "boto3 finds credentials (AWS_PROFILE, AWS_*)",
    GOOGLE: "google-auth finds credentials (GOOGLE_APPLICATION_CREDENTIALS, gcloud)",
    AZURE: "azure-identity finds credentials (AZURE_*, `az login`)",
}


class Address(NamedTuple):
    """A parsed URI."""

    kind: str
    """S3, GOOGLE or AZURE."""
    bucket: str
    prefix: str
    requester_pays: bool = False
    account: str = ""
    """The host of an Azure account; empty for the account of the environment."""
    root: str = ""
    """The URI of the bucket, without a final slash."""


def is_store(place: str) -> bool:
    """True for a URI of a store that can be read and written."""
    scheme, separator, _ = place.partition("://")
    return bool(separator) and scheme.lower() in _KINDS


def parse(place: str) -> Address:
    """The bucket and the prefix of a URI. Raises ValueError for a URI that names none, or that holds a secret."""
    match = _URI.fullmatch(place)
    assert match is not None
    scheme, authority, prefix = match[1].lower(), match[2], match[3].strip("/")
    kind = _KINDS[scheme]
    user, at, host = authority.rpartition("@")
    is_account = kind == AZURE and bool(at) and _ACCOUNT.fullmatch(host) is not None
    is_payer = kind != AZURE and user == _REQUESTER_PAYS
    # The message repeats nothing: a secret key may contain a slash, so that a part of it looks like a prefix.
    has_user = bool(at) and not is_account and not is_payer
    if has_user or ":" in authority or _SIGNED.search(place):
        raise ValueError(
            f"{scheme}://...: a URI must not hold credentials or a signature; {_CHAINS[kind]}"
        )
    if not _is_text(prefix):
        raise ValueError(f"{place}: is not UTF-8, as names of objects are; check the locale (LANG)")
    bucket = user if is_account else host
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(
            f"{place}: {bucket!r} is no bucket's name (3 to 63 letters, digits, dots and hyphens); expected {scheme}://bucket/prefix"
        )
    root = f"{scheme}://{authority if is_account else bucket}"
    return Address(kind, bucket, prefix, is_payer, host if is_account else "", root)


def _is_text(name: str) -> bool:
    """False for a name with bytes that are no UTF-8, or that a locale hides."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def place_of(address: Address, account: str) -> tuple[str, ...]:
    """The place that an address names, part by part. It is the same for all spellings of one place.

    account: the name of the environment's account of Azure.
    """
    of_azure = address.account.partition(".")[0] or account
    parts = address.prefix.split("/") if address.prefix else []
    return (address.kind, of_azure if address.kind == AZURE else "", address.bucket, *parts)


def is_plain(part: str) -> bool:
    """True if a part of a key, between two slashes, can be the name of a file or a directory."""
    is_name = part not in ("", ".", "..") and not set(part) & {"\0", "\\"}
    return is_name and len(part.encode("utf-8", "replace")) <= _LONGEST_PART
