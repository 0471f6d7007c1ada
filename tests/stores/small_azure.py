"""Azure's Blob Storage as a small server in this process: objects, ranges, conditions, blocks and their lists."""

import base64
import re
import zlib
from hashlib import md5
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

from tests.stores.small_store import Answer, Handler, Object, Refused, SmallStore, answer_xml

ACCOUNT, KEY = "devstoreaccount1", base64.b64encode(b"marked secret of the tests").decode()


class SmallAzure(SmallStore):
    """A container. `blocks` has the blocks that no commit has used, by object and id."""

    def __init__(self, bucket: str, handler: "type[AzureHandler] | None" = None) -> None:
        super().__init__(bucket, handler or AzureHandler)

    def clear(self) -> None:
        super().clear()
        self.blocks: dict[str, dict[str, bytes]] = {}
        self.sums: dict[str, str] = {}
        self.folders: set[str] = set()
        """Objects that stand for directories of a hierarchical namespace."""

    @property
    def unfinished(self) -> list[str]:
        """Keys of the objects with blocks that no commit has used."""
        with self.lock:
            return sorted(self.blocks)

    @property
    def settings(self) -> str:
        """The connection string."""
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={self.url}/{ACCOUNT};"
        )


class AzureHandler(Handler):
    server: SmallAzure

    def place(self) -> tuple[str, str]:
        _, _, rest = unquote(urlsplit(self.path).path.lstrip("/")).partition("/")
        bucket, _, key = rest.partition("/")
        return bucket, key

    def action(self, key: str, query: dict[str, str]) -> str:
        if query.get("comp") == "blocklist":
            return "complete" if self.command == "PUT" else "list-parts"
        if query.get("comp") == "block":
            return "part"
        if query.get("comp") == "list":
            return "list-uploads" if "uncommittedblobs" in query.get("include", "") else "list"
        return {"GET": "get", "HEAD": "head", "PUT": "put", "DELETE": "delete"}[self.command]

    def require_signed(self) -> None:
        if not self.headers.get("Authorization", "").startswith(f"SharedKey {ACCOUNT}:"):
            raise Refused(403, "AuthenticationFailed")

    def error(self, status: int, code: str) -> Answer:
        code = {"NoSuchKey": "BlobNotFound", "NoSuchBucket": "ContainerNotFound"}.get(code, code)
        _, headers, content = answer_xml(f"<Error><Code>{code}</Code><Message>no</Message></Error>")
        return status, headers | {"x-ms-error-code": code}, content

    def described(self, found: Object, key: str) -> dict[str, str]:
        headers = super().described(found, key) | {"x-ms-blob-type": "BlockBlob"}
        if key in self.server.sums:
            headers["x-ms-meta-megaconv_crc32"] = self.server.sums[key]
        return headers

    def span(self) -> str | None:
        return self.headers.get("x-ms-range") or self.headers.get("Range")

    def require(self, key: str) -> None:
        there = self.server.objects.get(key)
        if self.headers.get("If-None-Match") == "*" and there is not None:
            raise Refused(409, "BlobAlreadyExists")
        wanted = self.headers.get("If-Match")
        if wanted is not None and (there is None or wanted != there.tag):
            raise Refused(412, "ConditionNotMet")

    def checked(self, body: bytes) -> Object:
        digest = self.headers.get("Content-MD5")
        if digest is None or digest != base64.b64encode(md5(body).digest()).decode():
            raise Refused(400, "Md5Mismatch")
        return self.server.made(body, zlib.crc32(body))

    def do_put(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        made = self.checked(body)
        with self.server.lock:
            self.require(key)
            self._show(key, made)
        return 201, self.described(made, key), b""

    def _show(self, key: str, made: Object) -> None:
        self.server.objects[key] = made
        self.server.blocks.pop(key, None)
        self.server.sums[key] = self.headers.get("x-ms-meta-megaconv_crc32", "")

    def do_delete(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        with self.server.lock:
            if self.server.objects.pop(key, None) is None:
                raise Refused(404, "BlobNotFound")
        return 202, {}, b""

    def do_part(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        self.checked(body)
        with self.server.lock:
            self.server.blocks.setdefault(key, {})[query["blockid"]] = body
        return 201, {}, b""

    def do_complete(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        wanted = re.findall(r"<Latest>([^<]*)</Latest>", body.decode())
        with self.server.lock:
            staged = self.server.blocks.get(key, {})
            self.require(key)
            if not set(wanted) <= set(staged):
                raise Refused(400, "InvalidBlockList")
            content = b"".join(staged[block] for block in wanted)
            made = self.server.made(content, zlib.crc32(content))
            self._show(key, made)
        return 201, self.described(made, key), b""

    def do_list_parts(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        with self.server.lock:
            staged = dict(self.server.blocks.get(key, {}))
            if not staged and key not in self.server.objects:
                raise Refused(404, "BlobNotFound")
        listed = "".join(
            f"<Block><Name>{escape(block)}</Name><Size>{len(content)}</Size></Block>"
            for block, content in staged.items()
        )
        return answer_xml(f"<BlockList><UncommittedBlocks>{listed}</UncommittedBlocks></BlockList>")

    def do_list_uploads(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        with self.server.lock:
            names = sorted(set(self.server.objects) | set(self.server.blocks))
        prefix, asked = query.get("prefix", ""), query.get("include", "")
        return self._listed([name for name in names if name.startswith(prefix)], [], asked)

    def do_list(self, key: str, query: dict[str, str], body: bytes) -> Answer:
        names, folders = self.names(query.get("prefix", ""), query.get("delimiter"))
        return self._listed(names, folders, query.get("include", ""))

    def _listed(self, names: list[str], folders: list[str], asked: str) -> Answer:
        listed = ""
        for name in names:
            found = self.server.objects.get(name)
            size, tag = (0, "") if found is None else (len(found.content), found.tag.strip('"'))
            is_folder = name in self.server.folders and "metadata" in asked
            metadata = "<hdi_isfolder>true</hdi_isfolder>" if is_folder else ""
            listed += (
                f"<Blob><Name>{escape(name)}</Name><Properties><Content-Length>{size}</Content-Length>"
                f"<Etag>{tag}</Etag><BlobType>BlockBlob</BlobType></Properties>"
                f"<Metadata>{metadata}</Metadata></Blob>"
            )
        listed += "".join(
            f"<BlobPrefix><Name>{escape(each)}</Name></BlobPrefix>" for each in folders
        )
        return answer_xml(
            f"<EnumerationResults><Blobs>{listed}</Blobs><NextMarker /></EnumerationResults>"
        )
