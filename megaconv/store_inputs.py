"""Inputs in object stores: `s3://bucket/prefix`, `gs://…`, `az://…`. Their objects become a directory of stand-ins (formats/stores/)."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from formats.stores.addresses import AZURE, GOOGLE, S3, Address, is_plain, is_store, parse
from megaconv.errors import UsageError
from megaconv.extras import install

if TYPE_CHECKING:
    from formats.stores.writing import WritableStore

__all__ = ["is_store", "output_prefix", "parsed", "stand_in", "writable_store"]

_BESIDE = ("hf", "context", "tokenizer")
"""Directories next to an iteration or to weights, with the configuration and the tokenizer: megaconv's and NeMo's."""

_NEEDED = {
    S3: ("s3", "boto3"),
    GOOGLE: ("gcs", "boto3, google-auth and google-crc32c"),
    AZURE: ("azure", "azure-storage-blob"),
}
"""The extra of each kind of store, and its packages."""
_CHECKED = {
    S3: "the name, AWS_REGION and AWS_ENDPOINT_URL",
    GOOGLE: "the name",
    AZURE: "the name and AZURE_STORAGE_ACCOUNT",
}


def stand_in(place: str) -> Path:
    """The local path that stands for a URI, until the process ends. Reads listings only.

    Raises UsageError for a URI at which nothing is, and without boto3; CheckpointError for a store that can't be asked, and
    for an output that isn't complete.
    """
    from formats.stores.directory import open_directory
    from formats.stores.leftovers import require_complete

    address, bucket = parsed(place), writable_store(place)
    path = open_directory(bucket, address.prefix, _BESIDE, partial(require_complete, bucket))
    if path is None:
        raise UsageError(
            f"{place}: no object has this name or begins with it, at {bucket.endpoint}; check {_CHECKED[address.kind]}",
            code="no-such-input",
        )
    return path


def parsed(place: str) -> Address:
    """The bucket and the prefix of a URI. Raises UsageError for a URI that names none, or that holds a secret."""
    try:
        return parse(place)
    except ValueError as error:
        raise UsageError(str(error)) from None


def output_prefix(place: str) -> str:
    """The prefix that the URI of an output names.

    Raises UsageError for a wrong URI, for a whole bucket, and for a prefix that nobody could read as a directory. Clients
    of Azure resolve `..` in a request, so that the objects would lie somewhere else.
    """
    prefix = parsed(place).prefix
    if not prefix:
        raise UsageError(f"{place}: names a whole bucket; expected s3://bucket/prefix")
    for part in prefix.split("/"):
        if not is_plain(part):
            raise UsageError(
                f"{place}: no output can have the part {part!r:.100} between two slashes; write the prefix as a plain path"
            )
    return prefix


def writable_store(place: str) -> "WritableStore":
    """The bucket of a URI. Raises UsageError for a wrong URI, and without the packages of the store."""
    address = parsed(place)
    try:
        return _opened(address)
    except ImportError as error:
        extra, packages = _NEEDED[address.kind]
        scheme = address.root.partition("//")[0]
        raise UsageError(
            f"{place}: {scheme}// needs {packages} ({error}); {install(extra)}"
        ) from error


def _opened(address: Address) -> "WritableStore":
    """Import the client of a kind of store only when a URI asks for it."""
    if address.kind == GOOGLE:
        from formats.stores.gs import GoogleBucket

        return GoogleBucket(address.bucket, requester_pays=address.requester_pays)
    if address.kind == AZURE:
        from formats.stores.az import AzureContainer

        return AzureContainer(address.bucket, address.account, address.root)
    from formats.stores.s3_writing import WritableS3Bucket

    return WritableS3Bucket(address.bucket, requester_pays=address.requester_pays)
