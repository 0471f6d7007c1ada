"""Reads and writes checkpoints in a real bucket. `tests/stores/real.sh BUCKET` runs this; other runs skip it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaconv.engine.conversion import fingerprint
from megaconv.errors import CheckpointError, CorruptCheckpoint
from megaconv.hub import resolve
from tests.conftest import FIXTURES
from tests.runs import run
from tests.stores.test_reading import FORMATS

BUCKET = os.environ.get("MEGACONV_TEST_BUCKET", "")
PREFIX = os.environ.get("MEGACONV_TEST_PREFIX", "megaconv-tests")

pytestmark = pytest.mark.skipif(not BUCKET, reason="tests/stores/real.sh names a bucket")


@pytest.fixture
def client() -> Iterator[Any]:
    """boto3's client. Objects below the prefix are deleted afterwards."""
    import boto3

    made = boto3.Session().client("s3")
    yield made
    pages = made.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{PREFIX}/")
    for page in pages:
        for each in page.get("Contents", ()):
            made.delete_object(Bucket=BUCKET, Key=each["Key"])


def upload(client: Any, source: Path) -> str:
    files = [source] if source.is_file() else [each for each in source.rglob("*") if each.is_file()]
    for file in files:
        key = f"{PREFIX}/{file.relative_to(source.parent)}"
        client.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())
    return f"s3://{BUCKET}/{PREFIX}/{source.name}"


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_reads_as_from_the_disk(client: Any, name: str) -> None:
    source = FIXTURES / FORMATS[name]
    assert fingerprint(upload(client, source)) == fingerprint(source)


def test_an_object_that_was_replaced_is_not_read(client: Any) -> None:
    source = FIXTURES / "peft-llama-all-linear/base"
    place = resolve(upload(client, source))
    file = next(source.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    key = f"{PREFIX}/{source.name}/{file.name}"
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(content))
    assert isinstance(place, Path)
    with pytest.raises(CorruptCheckpoint, match="replaced or deleted"):
        fingerprint(place)


@pytest.mark.parametrize("words", ["--saver hf --verify", "--saver core --tp 2"])
def test_an_output_is_written_and_read_back(client: Any, words: str) -> None:
    source = FIXTURES / "peft-llama-all-linear/base"
    target = f"s3://{BUCKET}/{PREFIX}/written"
    assert run("convert", source, target, *words.split()).status == 0
    assert fingerprint(target).weights == fingerprint(source).weights
    left = client.list_multipart_uploads(Bucket=BUCKET, Prefix=f"{PREFIX}/").get("Uploads", ())
    assert not left


def test_a_prefix_without_objects_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no object has this name"):
        resolve(f"s3://{BUCKET}/{PREFIX}/nothing-is-here")
