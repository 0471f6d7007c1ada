"""azurite, Microsoft's emulator of Azure's Blob Storage, behind a server of this process that counts requests and lets them fail.

    npm install --prefix DIR azurite        the program is then DIR/node_modules/.bin/azurite-blob

The tests take the program that AZURITE names, or the one in PATH. They install nothing.
"""

import http.client
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.stores.small_azure import ACCOUNT, KEY, AzureHandler, SmallAzure
from tests.stores.small_store import Answer

PROGRAM = os.environ.get("AZURITE") or shutil.which("azurite-blob")
_OF_ONE_CONNECTION = ("connection", "keep-alive", "transfer-encoding", "content-length", "date")


class Azurite(SmallAzure):
    """A container of azurite. `clear` makes it anew."""

    def __init__(self, bucket: str, port: int) -> None:
        from azure.storage.blob import BlobServiceClient

        self.port = port
        service = BlobServiceClient.from_connection_string(self.settings_at(port), retry_total=0)
        self._container: Any = service.get_container_client(bucket)
        super().__init__(bucket, RelayHandler)

    @staticmethod
    def settings_at(port: int) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
        )

    def clear(self) -> None:
        super().clear()
        if self._container.exists():
            self._container.delete_container()
        self._container.create_container()

    def all_keys(self) -> list[str]:
        return sorted(each.name for each in self._container.list_blobs())

    def put(self, key: str, content: bytes) -> None:
        self._container.upload_blob(key, content, overwrite=True)

    def below(self, prefix: str) -> dict[str, bytes]:
        found = [key for key in self.all_keys() if key.startswith(prefix)]
        contents = {key: self._container.download_blob(key).readall() for key in found}
        return {key.removeprefix(prefix): content for key, content in contents.items()}

    @property
    def unfinished(self) -> list[str]:
        listed = self._container.list_blobs(include=["uncommittedblobs"])
        return [each.name for each in listed if self._has_blocks(each.name)]

    def _has_blocks(self, key: str) -> bool:
        _, staged = self._container.get_blob_client(key).get_block_list("all")
        return bool(staged)


class RelayHandler(AzureHandler):
    """Passes each request on to azurite, with the client's own signature."""

    server: Azurite  # type: ignore[assignment]

    def require_signed(self) -> None:
        """azurite compares the signature."""

    def _relayed(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name != "Connection"}
            connection.request(self.command, self.path, body=body, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        told = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in _OF_ONE_CONNECTION
        }
        if self.command == "HEAD":
            told["Content-Length"] = answer.getheader("Content-Length") or "0"
        return answer.status, told, content

    do_get = do_head = do_put = do_delete = do_part = do_complete = _relayed
    do_list = do_list_parts = do_list_uploads = _relayed


@contextmanager
def running() -> Iterator[int]:
    """The port of an azurite that keeps everything in memory."""
    assert PROGRAM is not None
    port = _free_port()
    command = [
        PROGRAM, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent",
        "--disableTelemetry", "--skipApiVersionCheck",  # azure-storage-blob may be newer than azurite
    ]  # fmt: skip
    environment = os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        _wait_for(server, port)
        yield port
    finally:
        server.terminate()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(server: "subprocess.Popen[bytes]", port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert server.poll() is None, "azurite ended"
        time.sleep(0.1)
    raise AssertionError("azurite doesn't listen")
