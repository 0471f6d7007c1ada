"""moto as the store, in a process of its own, behind the proxy."""

import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from formats.stores import part_sizes, patience
from tests.stores import azurite, proxy, small_store
from tests.stores.azurite import Azurite
from tests.stores.proxy import Proxy
from tests.stores.small_azure import SmallAzure
from tests.stores.small_google import SmallGoogle
from tests.stores.small_store import SmallStore

BUCKET = "models"
KEY, SECRET = "AKIAMARKEDKEYOFTESTS", "marked/secret/of/the/tests/0123456789abcd"
_SERVER = "from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session", autouse=True)
def _descriptions_of_services_are_read_once() -> Iterator[None]:
    """Each client of boto3 reads megabytes of JSON anew, and each command makes clients."""
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(ImportError):
            from botocore import session

            patch.setattr(session, "create_loader", functools.cache(session.create_loader))
        yield


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The address of a running moto."""
    pytest.importorskip("moto")
    port = _free_port()
    command = [sys.executable, "-c", _SERVER.format(port=port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, "moto ended"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="session")
def _proxy(moto: str) -> Iterator[Proxy]:
    with proxy.running(moto) as running:
        yield running


@pytest.fixture
def store(_proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """An empty bucket, and an environment in which boto3 finds it. No pause between attempts is longer than 10 ms."""
    point_at(_proxy.url, tmp_path, monkeypatch)
    client = plain_client(_proxy)
    empty(client)
    _proxy.reset()
    return _proxy


def point_at(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make boto3 find a store at an address, with marked credentials. No pause is longer than 10 ms."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-credentials"),
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(patience, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(patience, "_LONGEST_PAUSE", 0.01)


def plain_client(store: Proxy) -> Any:
    """boto3's own client, for filling and looking at the bucket."""
    return _client_at(f"http://{store.target.netloc}")


@functools.cache
def _client_at(address: str) -> Any:
    import boto3

    session = boto3.Session(KEY, SECRET, region_name="us-east-1")
    return session.client("s3", endpoint_url=address)


def empty(client: Any) -> None:
    """Create the bucket if it isn't there, and delete all objects and uploads."""
    if BUCKET not in [each["Name"] for each in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for each in page.get("Contents", ()):
            client.delete_object(Bucket=BUCKET, Key=each["Key"])
    for each in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        client.abort_multipart_upload(Bucket=BUCKET, Key=each["Key"], UploadId=each["UploadId"])


def put(store: Proxy, source: Path, prefix: str, *, public: bool = False) -> str:
    """Copy a file or a directory into the bucket. Returns the URI of the copy. Requests before are not counted."""
    client = plain_client(store)
    if public:
        client.put_bucket_acl(Bucket=BUCKET, ACL="public-read")
    files = [source] if source.is_file() else [each for each in source.rglob("*") if each.is_file()]
    for file in files:
        inner = "" if file == source else f"/{file.relative_to(source)}"
        access = {"ACL": "public-read"} if public else {}
        client.put_object(Bucket=BUCKET, Key=f"{prefix}{inner}", Body=file.read_bytes(), **access)
    store.reset()
    return f"s3://{BUCKET}/{prefix}"


@pytest.fixture(scope="session")
def _small_store() -> Iterator[SmallStore]:
    with small_store.running(SmallStore(BUCKET)) as running:
        yield running


@pytest.fixture
def writable(
    _small_store: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SmallStore:
    """An empty store in this process. Parts have 16 KiB, so that small models have many."""
    pytest.importorskip("boto3")
    point_at(_small_store.url, tmp_path, monkeypatch)
    monkeypatch.setattr(part_sizes, "PART_BYTES", 16 << 10)
    _small_store.clear()
    _small_store.checksums = True
    return _small_store


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallGoogle]:
    """An empty bucket of Google's. Parts have 16 KiB."""
    for package in ("boto3", "google.auth", "google_crc32c", "cryptography"):
        pytest.importorskip(package)
    with small_store.running(SmallGoogle(BUCKET)) as server:
        point_at("http://127.0.0.1:9", tmp_path, monkeypatch)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(server.account(tmp_path)))
        monkeypatch.setattr(part_sizes, "PART_BYTES", 16 << 10)
        yield server


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallAzure]:
    """An empty container of Azure's. Parts have 16 KiB."""
    pytest.importorskip("azure.storage.blob")
    with small_store.running(SmallAzure(BUCKET)) as server:
        point_at("http://127.0.0.1:9", tmp_path, monkeypatch)
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", server.settings)
        monkeypatch.setattr(part_sizes, "PART_BYTES", 16 << 10)
        yield server


@pytest.fixture(scope="session")
def _azurite() -> Iterator[int]:
    """The port of Microsoft's emulator."""
    pytest.importorskip("azure.storage.blob")
    if azurite.PROGRAM is None:
        pytest.skip(
            "azurite-blob is not in PATH, and AZURITE names no such program (CONTRIBUTING.md)"
        )
    with azurite.running() as port:
        yield port


@pytest.fixture
def microsofts(_azurite: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Azurite]:
    """An empty container of azurite. Parts have 16 KiB."""
    with small_store.running(Azurite(BUCKET, _azurite)) as server:
        point_at("http://127.0.0.1:9", tmp_path, monkeypatch)
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", server.settings)
        monkeypatch.setattr(part_sizes, "PART_BYTES", 16 << 10)
        yield server
