"""Inputs in object stores: `s3://bucket/prefix`. Their objects become a directory of stand-ins (formats/stores/)."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from formats.stores.addresses import Address, is_store, parse
from formats.stores.directory import open_directory
from formats.stores.leftovers import require_complete
from megaconv.errors import UsageError
from megaconv.extras import install

if TYPE_CHECKING:
    from formats.stores.s3_writing import WritableS3Bucket

__all__ = ["is_store", "parsed", "stand_in", "writable_store"]

_BESIDE = ("hf", "context", "tokenizer")
"""Directories next to an iteration or to weights, with the configuration and the tokenizer: megaconv's and NeMo's."""


def stand_in(place: str) -> Path:
    """The local path that stands for a URI, until the process ends. Reads listings only.

    Raises UsageError for a URI at which nothing is, and without boto3; CheckpointError for a store that can't be asked, and
    for an output that isn't complete.
    """
    address, bucket = parsed(place), writable_store(place)
    path = open_directory(bucket, address.prefix, _BESIDE, partial(require_complete, bucket))
    if path is None:
        raise UsageError(
            f"{place}: no object has this name or begins with it, at {bucket.endpoint}; check the name, AWS_REGION and AWS_ENDPOINT_URL",
            code="no-such-input",
        )
    return path


def parsed(place: str) -> Address:
    """The bucket and the prefix of a URI. Raises UsageError for a URI that names none, or that holds a secret."""
    try:
        return parse(place)
    except ValueError as error:
        raise UsageError(str(error)) from None


def writable_store(place: str) -> "WritableS3Bucket":
    """The bucket of a URI. Raises UsageError for a wrong URI, and without boto3."""
    address = parsed(place)
    try:
        from formats.stores.s3_writing import WritableS3Bucket

        return WritableS3Bucket(address.bucket, requester_pays=address.requester_pays)
    except ImportError as error:
        raise UsageError(f"{place}: s3:// needs boto3 ({error}); {install('s3')}") from error
