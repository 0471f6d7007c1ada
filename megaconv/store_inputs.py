"""Inputs in object stores: `s3://bucket/prefix`. Their objects become a directory of stand-ins (formats/stores/)."""

from pathlib import Path
from typing import TYPE_CHECKING

from formats.stores.addresses import is_store, parse
from formats.stores.directory import open_directory
from megaconv.errors import UsageError
from megaconv.extras import install

if TYPE_CHECKING:
    from formats.stores.writing import WritableStore

__all__ = ["is_store", "stand_in", "writable_store"]

_BESIDE = ("hf", "context", "tokenizer")
"""Directories next to an iteration or to weights, with the configuration and the tokenizer: megaconv's and NeMo's."""


def stand_in(place: str) -> Path:
    """The local path that stands for a URI, until the process ends. Reads listings only.

    Raises UsageError for a URI at which nothing is, and without boto3; CheckpointError for a store that can't be asked.
    """
    try:
        address = parse(place)
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        from formats.stores.s3 import S3Bucket

        bucket = S3Bucket(address.bucket, requester_pays=address.requester_pays)
    except ImportError as error:
        raise UsageError(f"{place}: s3:// needs boto3 ({error}); {install('s3')}") from error
    path = open_directory(bucket, address.prefix, _BESIDE)
    if path is None:
        raise UsageError(
            f"{place}: no object has this name or begins with it, at {bucket.endpoint}; check the name, AWS_REGION and AWS_ENDPOINT_URL",
            code="no-such-input",
        )
    return path


def writable_store(place: str) -> "WritableStore":
    """The bucket of a URI, for writing. Raises UsageError for a wrong URI, and without boto3."""
    try:
        address = parse(place)
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        from formats.stores.s3_writing import WritableS3Bucket

        return WritableS3Bucket(address.bucket, requester_pays=address.requester_pays)
    except ImportError as error:
        raise UsageError(f"{place}: s3:// needs boto3 ({error}); {install('s3')}") from error
