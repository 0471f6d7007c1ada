"""The stores' own clients, without megaconv's code: they fill a bucket, look into it and empty it."""

import os
from collections.abc import Iterable
from typing import Any, Protocol
from urllib.parse import quote
from xml.etree import ElementTree


class Plain(Protocol):
    """A bucket."""

    def put(self, key: str, content: bytes) -> None: ...

    def keys(self, prefix: str) -> list[str]: ...

    def delete(self, key: str) -> None: ...

    def unfinished(self, prefix: str) -> list[str]:
        """The keys of uploads that are neither completed nor aborted."""
        ...


def plain(uri: str) -> Plain:
    """The client of a bucket: `s3://bucket`, `gs://bucket`, `az://container`; a bare name is a bucket of S3."""
    scheme, separator, bucket = uri.rpartition("://")
    kinds: dict[str, type[S3] | type[Google] | type[Azure]] = {
        "s3": S3,
        "gs": Google,
        "az": Azure,
    }
    return kinds[scheme if separator else "s3"](bucket)


class S3:
    """boto3."""

    def __init__(self, bucket: str) -> None:
        import boto3

        self._bucket: Any = boto3.resource("s3").Bucket(bucket)

    def put(self, key: str, content: bytes) -> None:
        self._bucket.put_object(Key=key, Body=content)

    def keys(self, prefix: str) -> list[str]:
        return [each.key for each in self._bucket.objects.filter(Prefix=prefix)]

    def delete(self, key: str) -> None:
        self._bucket.Object(key).delete()

    def unfinished(self, prefix: str) -> list[str]:
        found = self._bucket.multipart_uploads.filter(Prefix=prefix)
        return [each.object_key for each in found]


class Google:
    """google-auth's session, with requests of the XML API."""

    def __init__(self, bucket: str) -> None:
        import google.auth
        from google.auth.transport.requests import AuthorizedSession

        scope = "https://www.googleapis.com/auth/devstorage.read_write"
        credentials, _ = google.auth.default(scopes=[scope])
        host = os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
        self._session: Any = AuthorizedSession(credentials)
        self._url = f"{host}/{bucket}"

    def _asked(self, method: str, key: str = "", **settings: Any) -> bytes:
        answer = self._session.request(method, f"{self._url}/{quote(key)}", **settings)
        answer.raise_for_status()
        content: bytes = answer.content
        return content

    def put(self, key: str, content: bytes) -> None:
        self._asked("PUT", key, data=content)

    def keys(self, prefix: str) -> list[str]:
        return _texts(self._asked("GET", params={"prefix": prefix, "list-type": "2"}), "Key")

    def delete(self, key: str) -> None:
        self._asked("DELETE", key)

    def unfinished(self, prefix: str) -> list[str]:
        return _texts(self._asked("GET", params={"uploads": "", "prefix": prefix}), "Key")


class Azure:
    """azure-storage-blob."""

    def __init__(self, container: str) -> None:
        from azure.storage.blob import ContainerClient

        settings = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
        if settings:
            self._client: Any = ContainerClient.from_connection_string(settings, container)
            return
        host = f"https://{os.environ['AZURE_STORAGE_ACCOUNT']}.blob.core.windows.net"
        self._client = ContainerClient(host, container, credential=_credential_of_azure())

    def put(self, key: str, content: bytes) -> None:
        self._client.upload_blob(key, content, overwrite=True, validate_content=True)

    def keys(self, prefix: str) -> list[str]:
        return [each.name for each in self._client.list_blobs(name_starts_with=prefix)]

    def delete(self, key: str) -> None:
        self._client.delete_blob(key)

    def unfinished(self, prefix: str) -> list[str]:
        """Empty: nobody can remove blocks from Azure, which drops them after a week."""
        return []


def _credential_of_azure() -> Any:
    for name in ("AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"):
        if os.environ.get(name):
            return os.environ[name]
    from azure.identity import DefaultAzureCredential

    return DefaultAzureCredential()


def _texts(content: bytes, name: str) -> list[str]:
    """The texts of all elements with a name, in any namespace."""
    elements: Iterable[Any] = ElementTree.fromstring(content).iter()
    return [each.text for each in elements if each.tag.rpartition("}")[2] == name]
